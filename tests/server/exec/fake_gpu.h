// A device that keeps waits as a GPU does, on host memory: launching returns at once, each stream works through its
// jobs in order, waits for their words without a way back, and writes its own.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/exec/device.h"
#include "tests/server/session/fake_device_memory.h"

namespace tessera::server {

class FakeGpu final : public Device {
 public:
  ~FakeGpu() override {
    for (std::thread& thread : threads_) thread.join();  // all streams have gone, and with them their threads' work
  }

  std::span<const planner::DeviceFacts> facts() const override { return facts_; }
  const MemorySpace& space() const override { return space_; }
  std::string Describe() const override { return "fake"; }
  bool keeps_waits() const override { return true; }
  std::shared_ptr<Stream> OpenStream(StreamPriority /*priority*/) override {
    auto work = std::make_shared<Work>();
    const std::lock_guard<std::mutex> lock(mutex_);
    threads_.emplace_back([work] { Run(*work); });
    return std::make_shared<FakeStream>(std::move(work));
  }

 private:
  struct Work {
    std::mutex mutex;
    std::condition_variable more;
    std::deque<Job> jobs;
    bool over = false;
  };

  class FakeStream final : public Stream {
   public:
    explicit FakeStream(std::shared_ptr<Work> work) : work_(std::move(work)) {}
    ~FakeStream() override {
      const std::lock_guard<std::mutex> lock(work_->mutex);
      work_->over = true;
      work_->more.notify_one();
    }
    void Enqueue(Job job) override {
      if (const absl::Status status = job.admit(); !status.ok()) return job.done({.status = status});
      const auto launched = std::move(job.launched);
      {
        const std::lock_guard<std::mutex> lock(work_->mutex);
        work_->jobs.push_back(std::move(job));
        work_->more.notify_one();
      }
      if (launched) launched();
    }
    void DropUnwanted() override {}  // all is launched

   private:
    const std::shared_ptr<Work> work_;
  };

  static std::atomic_ref<std::uint64_t> WordAt(std::uint64_t address) {
    return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(address));
  }

  static void Run(Work& work) {
    while (true) {
      std::unique_lock<std::mutex> lock(work.mutex);
      work.more.wait(lock, [&] { return work.over || !work.jobs.empty(); });
      if (work.jobs.empty()) return;
      Job job = std::move(work.jobs.front());
      work.jobs.pop_front();
      lock.unlock();
      Do(job);
    }
  }

  static void Do(const Job& job) {
    for (const DeviceWord& word : job.wait) {
      // As the hardware compares.
      while (static_cast<std::int64_t>(WordAt(word.address).load(std::memory_order_acquire) - word.value) < 0) {
        std::this_thread::yield();
      }
    }
    JobResult result{.launched = true};
    const kernels::LaunchContext context;
    if (job.launch(context) != kernels::kLaunchOk) result.status = absl::InternalError("launch failed");
    if (result.status.ok()) {
      for (const DeviceWord& word : job.write) WordAt(word.address).store(word.value, std::memory_order_release);
      for (const auto& event : job.record) EXPECT_TRUE(event->Record(nullptr).ok());
    }
    job.done(result);
  }

  const std::array<planner::DeviceFacts, 1> facts_ = {
      {{.backend = kernels::Backend::kCpu, .archs = {kernels::Arch::kCpu}, .processors = 1, .workspace_bytes_max = 0}}};
  const MemorySpace space_ = MemorySpace::Gpu(kFakeGpu);
  std::mutex mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace tessera::server
