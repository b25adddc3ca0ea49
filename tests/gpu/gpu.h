// The device of the conformance program: one context, one stream, one user at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::gpu_test {

// Ends the program with a message if `error` is one: for calls that fail only where the machine, not a kernel, is
// broken. What a kernel may cause is returned instead (see Run in gemm_problem.h).
void Require(cudaError_t error, std::string_view what);

struct GpuFacts {
  std::string name;
  std::string driver;  // the kernel module's version
  std::string cuda;    // runtime, and the newest one that the driver serves
  int capability = 0;  // 90 = compute capability 9.0
};

// Threads share it: whoever calls CUDA holds `mutex`.
class Gpu {
 public:
  // Device 0; ends the program with a message if there is none.
  Gpu();
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const GpuFacts& facts() const { return facts_; }
  cudaStream_t stream() const { return stream_; }

  std::mutex mutex;
  // Set after a fault that no later call survives, such as a read of unmapped memory.
  std::atomic<bool> lost = false;

 private:
  GpuFacts facts_;
  cudaStream_t stream_ = nullptr;
};

// Device memory; move-only.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  explicit DeviceBytes(std::size_t size);
  DeviceBytes(DeviceBytes&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept;
  ~DeviceBytes();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

DeviceBytes Upload(const Gpu& gpu, std::span<const std::byte> bytes);
std::vector<std::byte> Download(const Gpu& gpu, const std::byte* from, std::size_t size);

}  // namespace tessera::gpu_test
