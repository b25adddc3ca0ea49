// What the GPU that is served says of itself: power, heat, clocks, memory. Read through NVIDIA's management library,
// which comes with the driver and is looked up at run time, so that every build can try and none needs it to start.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace tessera::server {

struct GpuIdentity {
  std::string name;            // the product: "NVIDIA H200"
  std::string uuid;            // as nvidia-smi lists it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx
  std::string driver_version;  // "570.86.15"
};

// One reading of all sensors, of the whole GPU and not of this process. nullopt: the driver does not offer it for this
// GPU, or not to this user.
struct GpuReading {
  std::optional<double> power_watts;
  std::optional<double> power_limit_watts;  // the lowest of all limits in force
  std::optional<double> temperature_celsius;
  std::optional<double> sm_clock_hertz;
  std::optional<std::uint64_t> memory_used_bytes;  // what the driver keeps for itself included
  std::optional<std::uint64_t> memory_total_bytes;
  std::optional<double> utilization_ratio;  // share of the driver's last sample period in which any kernel ran, 0 to 1
  std::optional<bool> power_capped;         // clocks are held down now, to stay under the power limit
};

// A driver in trouble may keep a caller for ever, so a thread of its own talks to it and nobody waits longer than this.
struct NvmlTimeouts {
  std::chrono::milliseconds open = std::chrono::seconds(10);
  std::chrono::milliseconds read = std::chrono::milliseconds(250);  // also for closing
};

// Thread-safe; readings are made one at a time.
class Nvml {
 public:
  // UNAVAILABLE, with what to do about it: no library, one that is too old, no driver, no GPU of that UUID, no answer.
  static absl::StatusOr<std::unique_ptr<Nvml>> Open(const std::string& gpu_uuid,
                                                    const char* library = "libnvidia-ml.so.1",
                                                    NvmlTimeouts timeouts = {});

  // Shuts NVML down and unloads it. If the driver does not come back in time, that happens when it does.
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  const GpuIdentity& identity() const { return identity_; }
  const std::string& driver_version() const { return identity_.driver_version; }

  // UNAVAILABLE if the driver fails or is late; once late, at once until it has come back.
  absl::StatusOr<GpuReading> Read();

 private:
  class DriverThread;
  Nvml(std::unique_ptr<DriverThread> thread, GpuIdentity identity);

  const std::unique_ptr<DriverThread> thread_;
  const GpuIdentity identity_;
  std::mutex reader_;  // held by the one who reads
};

}  // namespace tessera::server
