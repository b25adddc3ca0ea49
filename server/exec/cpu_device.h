// The CPU as a device: a fixed pool of threads, over which streams take turns, one job each. A job of some microseconds
// runs on the thread that enqueues it if its stream is idle; no other work does.
#pragma once

#include <cstdint>
#include <memory>

#include "server/exec/device.h"

namespace tessera::server {

struct CpuDeviceOptions {
  int threads = 0;  // 0 = one per hardware thread
  std::int64_t workspace_bytes_max = 0;
};

// The device's destructor waits for queued jobs.
std::unique_ptr<Device> MakeCpuDevice(const CpuDeviceOptions& options);

}  // namespace tessera::server
