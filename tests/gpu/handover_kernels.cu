#include "tests/gpu/handover_kernels.h"

#include <cuda.h>

namespace tessera::gpu_test {
namespace {

constexpr int kThreads = 256;
constexpr int kEntryPointVersion = 12000;

unsigned BlocksFor(std::size_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__device__ std::size_t Element() {
  return std::size_t{blockIdx.x} * kThreads + threadIdx.x;
}

__global__ void Copy16(std::uint16_t* to, const std::uint16_t* from, std::size_t count) {
  const std::size_t i = Element();
  if (i < count) to[i] = from[i];
}

__global__ void FillRows(std::uint16_t* to, std::size_t count, std::uint32_t columns, std::uint32_t turn) {
  const std::size_t i = Element();
  if (i >= count) return;
  const std::uint32_t row = static_cast<std::uint32_t>(i) / columns;
  const auto number = static_cast<float>(RowNumber(turn, row));
  to[i] = static_cast<std::uint16_t>(__float_as_uint(number) >> 16U);  // small integers are exact in bf16
}

__global__ void AddTo(float* sums, const std::uint16_t* from, std::size_t count) {
  const std::size_t i = Element();
  if (i < count) sums[i] += __uint_as_float(static_cast<unsigned>(from[i]) << 16U);
}

// From the driver that the runtime has loaded: the programs do not link it, and start without one.
template <typename Function>
cudaError_t FindInDriver(const char* name, Function& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &address, kEntryPointVersion, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  function = reinterpret_cast<Function>(address);
  return cudaSuccess;
}

struct DriverCalls {
  decltype(&cuStreamWriteValue64) write = nullptr;
  decltype(&cuStreamWaitValue64) wait = nullptr;
  cudaError_t error = cudaSuccess;

  static const DriverCalls& Get() {
    static const DriverCalls calls = [] {
      DriverCalls found;
      found.error = FindInDriver("cuStreamWriteValue64", found.write);
      if (found.error == cudaSuccess) found.error = FindInDriver("cuStreamWaitValue64", found.wait);
      return found;
    }();
    return calls;
  }
};

}  // namespace

cudaError_t LaunchCopy16(std::uint16_t* to, const std::uint16_t* from, std::size_t count, cudaStream_t stream) {
  Copy16<<<BlocksFor(count), kThreads, 0, stream>>>(to, from, count);
  return cudaGetLastError();
}

cudaError_t LaunchFillRows(std::uint16_t* to, std::int64_t rows, std::int64_t columns, std::uint32_t turn,
                           cudaStream_t stream) {
  const auto count = static_cast<std::size_t>(rows * columns);
  FillRows<<<BlocksFor(count), kThreads, 0, stream>>>(to, count, static_cast<std::uint32_t>(columns), turn);
  return cudaGetLastError();
}

cudaError_t LaunchAddTo(float* sums, const std::uint16_t* from, std::size_t count, cudaStream_t stream) {
  AddTo<<<BlocksFor(count), kThreads, 0, stream>>>(sums, from, count);
  return cudaGetLastError();
}

// The driver's errors have the numbers of the runtime's.
cudaError_t StreamWrite(cudaStream_t stream, std::uint64_t address, std::uint64_t value) {
  const DriverCalls& driver = DriverCalls::Get();
  if (driver.error != cudaSuccess) return driver.error;
  return static_cast<cudaError_t>(driver.write(stream, address, value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

cudaError_t StreamWait(cudaStream_t stream, std::uint64_t address, std::uint64_t value) {
  const DriverCalls& driver = DriverCalls::Get();
  if (driver.error != cudaSuccess) return driver.error;
  return static_cast<cudaError_t>(driver.wait(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ));
}

}  // namespace tessera::gpu_test
