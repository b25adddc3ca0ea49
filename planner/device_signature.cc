#include "planner/device_signature.h"

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::planner {
namespace {

constexpr std::size_t kFieldLimit = 128;
constexpr std::size_t kReadableLimit = 48;

absl::Status Check(std::string_view name, std::string* value) {
  absl::StripAsciiWhitespace(value);
  const std::string field = absl::StrCat("signature.", Av(name));
  if (value->empty()) return InField(field, absl::InvalidArgumentError("is empty"));
  if (value->size() > kFieldLimit) {
    return InField(field, absl::InvalidArgumentError(
                              absl::StrCat(value->size(), " characters; at most ", kFieldLimit, " are allowed")));
  }
  for (char& c : *value) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  return absl::OkStatus();
}

// FNV-1a: no secret, only to tell apart names that read the same.
std::uint64_t HashOf(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

}  // namespace

absl::StatusOr<DeviceSignature> CheckedSignature(DeviceSignature raw) {
  RETURN_IF_ERROR(Check("device", &raw.device));
  RETURN_IF_ERROR(Check("capability", &raw.capability));
  RETURN_IF_ERROR(Check("processors", &raw.processors));
  RETURN_IF_ERROR(Check("driver", &raw.driver));
  RETURN_IF_ERROR(Check("cuda", &raw.cuda));
  return raw;
}

std::string FileStemOf(const DeviceSignature& signature) {
  std::string stem;
  for (const char c : signature.device) {
    const auto byte = static_cast<unsigned char>(c);
    if (absl::ascii_isalnum(byte)) {
      stem += absl::ascii_tolower(byte);
    } else if (!stem.empty() && stem.back() != '-') {
      stem += '-';
    }
    if (stem.size() == kReadableLimit) break;
  }
  if (!stem.empty() && stem.back() != '-') stem += '-';
  std::string all;
  for (const auto& [name, value] : FieldsOf(signature)) absl::StrAppend(&all, Av(name), "=", Av(value), "\n");
  absl::StrAppend(&stem, absl::Hex(HashOf(all), absl::kZeroPad16));
  return stem;
}

}  // namespace tessera::planner
