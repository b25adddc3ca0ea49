// What the executor asks of a device, CPU or GPU: in-order streams that launch jobs and report their completion.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/launch/launch.h"
#include "planner/plan.h"
#include "server/session/device_memory.h"
#include "server/session/session.h"

namespace tessera::server {

struct JobResult {
  absl::Status status;         // OK: outputs are written
  bool launched = false;       // false: no launch was tried, outputs are untouched
  std::uint64_t queue_ns = 0;  // from Enqueue to launch, or to the refusal
  std::uint64_t run_ns = 0;    // on the device
};

// A 64-bit word that a device's work waits for, or writes, at an address of the device.
struct DeviceWord {
  std::uint64_t address = 0;
  std::uint64_t value = 0;
};

// One launch. Callbacks run on device threads or, for a small job, on the thread that enqueues it, before Enqueue
// returns; they must not block.
struct Job {
  std::int64_t workspace_bytes = 0;
  // How much there is to do, in multiply-adds or elements: what a host device goes by to tell a small job.
  std::uint64_t scalar_operations = 0;
  // Asked right before the launch, and by DropUnwanted; an error drops the job with that status.
  std::function<absl::Status()> admit;
  std::function<kernels::LaunchError(const kernels::LaunchContext&)> launch;
  // Of devices that keep waits: the words reach their values before the work begins, and are written after it. Nothing
  // is written or recorded for a job that was not launched, or whose launch failed.
  std::vector<DeviceWord> wait;
  std::vector<DeviceWord> write;
  std::vector<std::shared_ptr<DeviceEvent>> record;  // recorded behind it
  // May be empty. Called when nothing can keep the job from running any more; it may come after `done`.
  std::function<void()> launched;
  // Called exactly once, whatever happens, after everything the job touches is idle.
  std::function<void(const JobResult&)> done;
};

// Jobs of one stream run in the order they were enqueued; streams run side by side. Thread-safe; the caller holds no
// lock that a callback takes. A stream may be dropped while jobs are queued: they still run or are refused by `admit`,
// and `done` is called.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void Enqueue(Job job) = 0;
  // Asks `admit` of every job that waits, and drops at once those that it refuses. Their `done` runs on the caller.
  virtual void DropUnwanted() = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  // One for each backend that it serves.
  virtual std::span<const planner::DeviceFacts> facts() const = 0;
  // The memory that its kernels read and write.
  virtual const MemorySpace& space() const = 0;
  virtual std::string Describe() const = 0;                                 // one line for operators
  virtual std::shared_ptr<Stream> OpenStream(StreamPriority priority) = 0;  // the CPU has none
  // Whether it takes Job::wait, write and record.
  virtual bool keeps_waits() const { return false; }
};

}  // namespace tessera::server
