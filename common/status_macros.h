// RETURN_IF_ERROR and ASSIGN_OR_RETURN for absl::Status, with the meaning that later Abseil gives its own.
// The distribution's Abseil has neither. __COUNTER__ keeps two uses on one line apart.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define TESSERA_CONCAT_INNER_(a, b) a##b
#define TESSERA_CONCAT_(a, b) TESSERA_CONCAT_INNER_(a, b)

#define RETURN_IF_ERROR(expression)                    \
  do {                                                 \
    ::absl::Status tessera_status_ = (expression);     \
    if (!tessera_status_.ok()) return tessera_status_; \
  } while (false)

#define ASSIGN_OR_RETURN(target, expression) \
  TESSERA_ASSIGN_OR_RETURN_(TESSERA_CONCAT_(tessera_statusor_, __COUNTER__), target, expression)

#define TESSERA_ASSIGN_OR_RETURN_(statusor, target, expression) \
  auto statusor = (expression);                                 \
  if (!statusor.ok()) return std::move(statusor).status();      \
  target = std::move(statusor).value()
