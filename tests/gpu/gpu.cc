#include "tests/gpu/gpu.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

namespace tessera::gpu_test {
namespace {

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// From the kernel module's own file; the runtime knows only which CUDA a driver serves.
std::string DriverVersion() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    const bool dotted = word.find('.') != std::string::npos;
    if (dotted && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  }
  return "unknown";
}

}  // namespace

void Require(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "tessera-gpu-conformance: %.*s: %s (%s)\n", static_cast<int>(what.size()), what.data(),
               cudaGetErrorString(error), cudaGetErrorName(error));
  std::fflush(nullptr);
  std::_Exit(1);
}

Gpu::Gpu() {
  int devices = 0;
  Require(cudaGetDeviceCount(&devices), "no usable GPU (is there a device, and a driver for it?)");
  if (devices == 0) Require(cudaErrorNoDevice, "no GPU");
  Require(cudaSetDevice(0), "cannot use device 0");
  cudaDeviceProp properties;
  Require(cudaGetDeviceProperties(&properties, 0), "cannot read the properties of device 0");
  int driver = 0;
  int runtime = 0;
  Require(cudaDriverGetVersion(&driver), "cannot read the driver's version");
  Require(cudaRuntimeGetVersion(&runtime), "cannot read the runtime's version");
  facts_.name = properties.name;
  facts_.driver = DriverVersion();
  facts_.cuda = VersionText(runtime) + " (driver serves " + VersionText(driver) + ")";
  facts_.capability = properties.major * 10 + properties.minor;
  Require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cannot create a stream");
}

// A lost device cannot be cleaned up; its errors say nothing new.
Gpu::~Gpu() {
  static_cast<void>(cudaStreamDestroy(stream_));
}

DeviceBytes::DeviceBytes(std::size_t size) : size_(size) {
  if (size == 0) return;
  void* data = nullptr;
  Require(cudaMalloc(&data, size), "cudaMalloc of " + std::to_string(size) + " bytes");
  data_ = static_cast<std::byte*>(data);
}

DeviceBytes& DeviceBytes::operator=(DeviceBytes&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

DeviceBytes::~DeviceBytes() {
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
}

DeviceBytes Upload(const Gpu& gpu, std::span<const std::byte> bytes) {
  DeviceBytes device(bytes.size());
  if (bytes.empty()) return device;
  Require(cudaMemcpyAsync(device.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, gpu.stream()), "upload");
  Require(cudaStreamSynchronize(gpu.stream()), "upload");
  return device;
}

std::vector<std::byte> Download(const Gpu& gpu, const std::byte* from, std::size_t size) {
  std::vector<std::byte> bytes(size);
  if (size == 0) return bytes;
  Require(cudaMemcpyAsync(bytes.data(), from, size, cudaMemcpyDeviceToHost, gpu.stream()), "download");
  Require(cudaStreamSynchronize(gpu.stream()), "download");
  return bytes;
}

}  // namespace tessera::gpu_test
