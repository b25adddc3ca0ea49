// A shared library with NVML's names, of one GPU. Its environment, read at each call, makes calls fail or last:
//   FAKE_NVML_FAIL    "nvmlInit_v2=9,nvmlDeviceGetName=15": what they return
//   FAKE_NVML_SLOW    "nvmlDeviceGetPowerUsage=500": how many milliseconds they take
//   FAKE_NVML_REASONS bits of the clocks' event reasons
//   FAKE_NVML_LOG     a file to which nvmlInit_v2 and nvmlShutdown append their names
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>

namespace {

constexpr std::string_view kUuid = "GPU-01234567-89ab-cdef-0123-456789abcdef";
int the_device = 0;

std::string_view Environment(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? std::string_view() : text;
}

// The number after "call=" in the variable; 0 without one.
int NumberOf(const char* variable, std::string_view call) {
  const std::string_view text = Environment(variable);
  const std::size_t at = text.find(std::string(call) + "=");
  return at == std::string_view::npos ? 0 : std::atoi(text.data() + at + call.size() + 1);
}

int Enter(const char* call) {
  std::this_thread::sleep_for(std::chrono::milliseconds(NumberOf("FAKE_NVML_SLOW", call)));
  return NumberOf("FAKE_NVML_FAIL", call);
}

int EnterDevice(const char* call, const void* device) {
  return device == &the_device ? Enter(call) : 2;
}

void Log(const char* line) {
  const std::string path(Environment("FAKE_NVML_LOG"));
  if (path.empty()) return;
  std::FILE* file = std::fopen(path.c_str(), "a");
  std::fprintf(file, "%s\n", line);
  std::fclose(file);
}

int Copy(std::string_view text, char* out, unsigned bytes) {
  if (text.size() + 1 > bytes) return 7;
  std::memcpy(out, text.data(), text.size());
  out[text.size()] = '\0';
  return 0;
}

}  // namespace

extern "C" {

struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};

int nvmlInit_v2() {
  Log("nvmlInit_v2");
  return Enter("nvmlInit_v2");
}

int nvmlShutdown() {
  Log("nvmlShutdown");
  return Enter("nvmlShutdown");
}

const char* nvmlErrorString(int code) {
  return code == 15 ? "GPU is lost" : "some error";
}

int nvmlSystemGetDriverVersion(char* text, unsigned bytes) {
  const int code = Enter("nvmlSystemGetDriverVersion");
  return code != 0 ? code : Copy("570.86.15", text, bytes);
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (uuid != kUuid) return 6;
  *device = &the_device;
  return Enter("nvmlDeviceGetHandleByUUID");
}

int nvmlDeviceGetName(void* device, char* text, unsigned bytes) {
  const int code = EnterDevice("nvmlDeviceGetName", device);
  return code != 0 ? code : Copy("NVIDIA Test \"One\"", text, bytes);
}

#ifndef FAKE_NVML_INCOMPLETE
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  *milliwatts = 345'678;
  return EnterDevice("nvmlDeviceGetPowerUsage", device);
}
#endif

int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* milliwatts) {
  *milliwatts = 700'000;
  return EnterDevice("nvmlDeviceGetEnforcedPowerLimit", device);
}

int nvmlDeviceGetTemperature(void* device, unsigned sensor, unsigned* celsius) {
  *celsius = 61;
  return sensor == 0 ? EnterDevice("nvmlDeviceGetTemperature", device) : 2;
}

int nvmlDeviceGetClockInfo(void* device, unsigned domain, unsigned* megahertz) {
  *megahertz = 1980;
  return domain == 1 ? EnterDevice("nvmlDeviceGetClockInfo", device) : 2;
}

int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  *memory = {.total = 150'000'000'000, .free = 149'000'000'000, .used = 1'000'000'000};
  return EnterDevice("nvmlDeviceGetMemoryInfo", device);
}

int nvmlDeviceGetUtilizationRates(void* device, Utilization* utilization) {
  *utilization = {.gpu = 42, .memory = 7};
  return EnterDevice("nvmlDeviceGetUtilizationRates", device);
}

#ifdef FAKE_NVML_BEFORE_535
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* bits) {
#else
int nvmlDeviceGetCurrentClocksEventReasons(void* device, unsigned long long* bits) {
#endif
  *bits = std::strtoull(std::string(Environment("FAKE_NVML_REASONS")).c_str(), nullptr, 0);
  return EnterDevice("nvmlDeviceGetCurrentClocksEventReasons", device);
}

}  // extern "C"
