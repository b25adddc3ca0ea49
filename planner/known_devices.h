// Devices that the planner knows by name, so that any machine plans as any of them, and tests and the CLI can name
// them.
#pragma once

#include <span>
#include <string_view>

#include "planner/plan.h"

namespace tessera::planner {

struct KnownDevice {
  std::string_view name;  // such as h200
  std::string_view description;
  DeviceFacts facts;
  std::string_view device;  // as its driver names it: what built-in rows are for
};

std::span<const KnownDevice> KnownDevices();

// Null if no device has that name.
const KnownDevice* FindDevice(std::string_view name);

}  // namespace tessera::planner
