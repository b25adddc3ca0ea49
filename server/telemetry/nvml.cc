#include "server/telemetry/nvml.h"

#include <dlfcn.h>

#include <condition_variable>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace tessera::server {
namespace {

// The part of NVML's C interface that is used, declared from its reference: the daemon must build where no header of
// NVIDIA's is.
using NvmlReturn = int;
using NvmlDevice = void*;  // opaque

constexpr NvmlReturn kNvmlSuccess = 0;
constexpr NvmlReturn kNvmlInvalidArgument = 2;
constexpr NvmlReturn kNvmlNotSupported = 3;
constexpr NvmlReturn kNvmlNoPermission = 4;
constexpr NvmlReturn kNvmlNotFound = 6;
constexpr NvmlReturn kNvmlFunctionNotFound = 13;
constexpr unsigned kNvmlClockSm = 1;                 // nvmlClockType_t
constexpr unsigned kNvmlTemperatureGpu = 0;          // nvmlTemperatureSensors_t
constexpr unsigned long long kNvmlSwPowerCap = 0x4;  // a bit of the clocks' event reasons
constexpr unsigned kNvmlNameBytes = 96;
constexpr unsigned kNvmlVersionBytes = 80;

struct NvmlMemory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};
static_assert(sizeof(NvmlMemory) == 24);

struct NvmlUtilization {
  unsigned gpu;     // percent
  unsigned memory;  // percent
};
static_assert(sizeof(NvmlUtilization) == 8);

constexpr const char* kReasonsSymbol = "nvmlDeviceGetCurrentClocksEventReasons";
constexpr const char* kReasonsSymbolBefore535 = "nvmlDeviceGetCurrentClocksThrottleReasons";

struct NvmlFunctions {
  NvmlReturn (*init)() = nullptr;
  NvmlReturn (*shutdown)() = nullptr;
  const char* (*error_string)(NvmlReturn) = nullptr;
  NvmlReturn (*driver_version)(char* text, unsigned bytes) = nullptr;
  NvmlReturn (*handle_by_uuid)(const char* uuid, NvmlDevice* device) = nullptr;
  NvmlReturn (*name)(NvmlDevice, char* text, unsigned bytes) = nullptr;
  NvmlReturn (*power_usage)(NvmlDevice, unsigned* milliwatts) = nullptr;
  NvmlReturn (*power_limit)(NvmlDevice, unsigned* milliwatts) = nullptr;
  NvmlReturn (*temperature)(NvmlDevice, unsigned sensor, unsigned* celsius) = nullptr;
  NvmlReturn (*clock)(NvmlDevice, unsigned domain, unsigned* megahertz) = nullptr;
  NvmlReturn (*memory)(NvmlDevice, NvmlMemory*) = nullptr;
  NvmlReturn (*utilization)(NvmlDevice, NvmlUtilization*) = nullptr;
  NvmlReturn (*clock_event_reasons)(NvmlDevice, unsigned long long* bits) = nullptr;  // null: the driver has none
};

std::string LastDlError() {
  const char* text = ::dlerror();
  return text == nullptr ? "unknown error" : text;
}

// NVML loaded and initialised, and the handle of one GPU in it. Used by one thread.
class NvmlSession {
 public:
  NvmlSession() = default;
  NvmlSession(const NvmlSession&) = delete;
  NvmlSession& operator=(const NvmlSession&) = delete;

  ~NvmlSession() {
    if (initialised_) functions_.shutdown();
    if (library_ != nullptr) ::dlclose(library_);
  }

  absl::StatusOr<GpuIdentity> Open(const std::string& library, const std::string& uuid) {
    RETURN_IF_ERROR(Load(library));
    if (const NvmlReturn code = functions_.init(); code != kNvmlSuccess) {
      return Failure("nvmlInit_v2", code, "; does nvidia-smi work, in the daemon's container too?");
    }
    initialised_ = true;
    char version[kNvmlVersionBytes] = {};
    if (const NvmlReturn code = functions_.driver_version(version, sizeof(version)); code != kNvmlSuccess) {
      return Failure("nvmlSystemGetDriverVersion", code);
    }
    const NvmlReturn found = functions_.handle_by_uuid(uuid.c_str(), &device_);
    if (found == kNvmlNotFound || found == kNvmlInvalidArgument) {
      return absl::UnavailableError(
          absl::StrCat("NVML knows no GPU ", uuid, "; compare with what nvidia-smi -L lists where the daemon runs"));
    }
    if (found != kNvmlSuccess) return Failure("nvmlDeviceGetHandleByUUID", found);
    char name[kNvmlNameBytes] = {};
    if (const NvmlReturn code = functions_.name(device_, name, sizeof(name)); code != kNvmlSuccess) {
      return Failure("nvmlDeviceGetName", code);
    }
    return GpuIdentity{.name = name, .uuid = uuid, .driver_version = version};
  }

  absl::StatusOr<GpuReading> Read() const {
    GpuReading reading;
    unsigned value = 0;
    ASSIGN_OR_RETURN(bool offered, Offered("nvmlDeviceGetPowerUsage", functions_.power_usage(device_, &value)));
    if (offered) reading.power_watts = value * 1e-3;
    ASSIGN_OR_RETURN(offered, Offered("nvmlDeviceGetEnforcedPowerLimit", functions_.power_limit(device_, &value)));
    if (offered) reading.power_limit_watts = value * 1e-3;
    ASSIGN_OR_RETURN(offered,
                     Offered("nvmlDeviceGetTemperature", functions_.temperature(device_, kNvmlTemperatureGpu, &value)));
    if (offered) reading.temperature_celsius = value;
    ASSIGN_OR_RETURN(offered, Offered("nvmlDeviceGetClockInfo", functions_.clock(device_, kNvmlClockSm, &value)));
    if (offered) reading.sm_clock_hertz = value * 1e6;
    NvmlMemory memory = {};
    ASSIGN_OR_RETURN(offered, Offered("nvmlDeviceGetMemoryInfo", functions_.memory(device_, &memory)));
    if (offered) {
      reading.memory_used_bytes = memory.used;
      reading.memory_total_bytes = memory.total;
    }
    NvmlUtilization utilization = {};
    ASSIGN_OR_RETURN(offered, Offered("nvmlDeviceGetUtilizationRates", functions_.utilization(device_, &utilization)));
    if (offered) reading.utilization_ratio = utilization.gpu * 1e-2;
    if (functions_.clock_event_reasons == nullptr) return reading;
    unsigned long long reasons = 0;
    ASSIGN_OR_RETURN(offered, Offered(kReasonsSymbol, functions_.clock_event_reasons(device_, &reasons)));
    if (offered) reading.power_capped = (reasons & kNvmlSwPowerCap) != 0;
    return reading;
  }

 private:
  absl::Status Load(const std::string& library) {
    library_ = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) {
      return absl::UnavailableError(
          absl::StrCat("NVML: ", LastDlError(),
                       "; it comes with the NVIDIA driver, and into a container with the driver capability `utility`"));
    }
    RETURN_IF_ERROR(Find("nvmlInit_v2", functions_.init));
    RETURN_IF_ERROR(Find("nvmlShutdown", functions_.shutdown));
    RETURN_IF_ERROR(Find("nvmlErrorString", functions_.error_string));
    RETURN_IF_ERROR(Find("nvmlSystemGetDriverVersion", functions_.driver_version));
    RETURN_IF_ERROR(Find("nvmlDeviceGetHandleByUUID", functions_.handle_by_uuid));
    RETURN_IF_ERROR(Find("nvmlDeviceGetName", functions_.name));
    RETURN_IF_ERROR(Find("nvmlDeviceGetPowerUsage", functions_.power_usage));
    RETURN_IF_ERROR(Find("nvmlDeviceGetEnforcedPowerLimit", functions_.power_limit));
    RETURN_IF_ERROR(Find("nvmlDeviceGetTemperature", functions_.temperature));
    RETURN_IF_ERROR(Find("nvmlDeviceGetClockInfo", functions_.clock));
    RETURN_IF_ERROR(Find("nvmlDeviceGetMemoryInfo", functions_.memory));
    RETURN_IF_ERROR(Find("nvmlDeviceGetUtilizationRates", functions_.utilization));
    if (!Find(kReasonsSymbol, functions_.clock_event_reasons).ok()) {
      Find(kReasonsSymbolBefore535, functions_.clock_event_reasons).IgnoreError();
    }
    return absl::OkStatus();
  }

  template <typename Function>
  absl::Status Find(const char* symbol, Function& function) {
    void* const address = ::dlsym(library_, symbol);
    if (address == nullptr) {
      return absl::UnavailableError(absl::StrCat("NVML has no ", symbol, "; update the NVIDIA driver"));
    }
    function = reinterpret_cast<Function>(address);
    return absl::OkStatus();
  }

  absl::Status Failure(const char* call, NvmlReturn code, const char* advice = "; see nvidia-smi and dmesg") const {
    const char* text = functions_.error_string(code);
    return absl::UnavailableError(
        absl::StrCat(call, ": ", text == nullptr ? "unknown error" : text, " (", code, ")", advice));
  }

  // Whether a value was read; false where this GPU, driver or user has none; an error where the driver failed.
  absl::StatusOr<bool> Offered(const char* call, NvmlReturn code) const {
    switch (code) {
      case kNvmlSuccess:
        return true;
      case kNvmlNotSupported:
      case kNvmlNoPermission:
      case kNvmlFunctionNotFound:
        return false;
      default:
        return Failure(call, code);
    }
  }

  void* library_ = nullptr;
  NvmlFunctions functions_;
  bool initialised_ = false;
  NvmlDevice device_ = nullptr;
};

}  // namespace

// The thread that holds the NvmlSession, and what it shares with its one client. It is abandoned rather than joined
// when the driver does not let it go; what it shares then lives until it ends.
class Nvml::DriverThread {
 public:
  explicit DriverThread(NvmlTimeouts timeouts) : timeouts_(timeouts) {}
  DriverThread(const DriverThread&) = delete;
  DriverThread& operator=(const DriverThread&) = delete;

  ~DriverThread() {
    if (!thread_.joinable()) return;
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->stop = true;
    shared_->changed.notify_all();
    const bool ended = shared_->changed.wait_for(lock, timeouts_.read, [this] { return shared_->ended; });
    lock.unlock();
    if (ended) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

  absl::StatusOr<GpuIdentity> Open(const std::string& library, const std::string& uuid) {
    try {
      thread_ = std::thread(Run, shared_, library, uuid);
    } catch (const std::system_error& error) {
      return absl::UnavailableError(absl::StrCat("NVML: no thread for it: ", error.what(), "; raise the task limit"));
    }
    std::unique_lock<std::mutex> lock(shared_->mutex);
    if (!shared_->changed.wait_for(lock, timeouts_.open, [this] { return shared_->opened.has_value(); })) {
      return Late(timeouts_.open);
    }
    return *shared_->opened;
  }

  absl::StatusOr<GpuReading> Read() {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    if (shared_->asked) return Late(timeouts_.read);  // by a reader who has given up
    shared_->asked = true;
    shared_->changed.notify_all();
    if (!shared_->changed.wait_for(lock, timeouts_.read, [this] { return !shared_->asked; })) {
      return Late(timeouts_.read);
    }
    return shared_->reading;
  }

 private:
  struct Shared {  // all guarded by mutex
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<absl::StatusOr<GpuIdentity>> opened;
    bool asked = false;  // set by a reader, cleared by the thread when `reading` answers
    absl::StatusOr<GpuReading> reading = GpuReading{};
    bool stop = false;
    bool ended = false;
  };

  static absl::Status Late(std::chrono::milliseconds timeout) {
    return absl::UnavailableError(absl::StrCat("NVML: the driver did not answer within ", timeout.count(),
                                               " ms; if nvidia-smi hangs too, see dmesg and reset the GPU"));
  }

  static void Run(const std::shared_ptr<Shared>& shared, const std::string& library, const std::string& uuid) {
    Serve(*shared, library, uuid);
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->ended = true;
    shared->changed.notify_all();
  }

  static void Serve(Shared& shared, const std::string& library, const std::string& uuid) {
    NvmlSession session;
    absl::StatusOr<GpuIdentity> opened = session.Open(library, uuid);
    std::unique_lock<std::mutex> lock(shared.mutex);
    const bool ok = opened.ok();
    shared.opened = std::move(opened);
    shared.changed.notify_all();
    while (ok) {
      shared.changed.wait(lock, [&shared] { return shared.stop || shared.asked; });
      if (shared.stop) break;
      lock.unlock();
      absl::StatusOr<GpuReading> reading = session.Read();
      lock.lock();
      shared.reading = std::move(reading);
      shared.asked = false;
      shared.changed.notify_all();
    }
    lock.unlock();  // the session closes without it: that, too, may take the driver for ever
  }

  const NvmlTimeouts timeouts_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<Nvml>> Nvml::Open(const std::string& gpu_uuid, const char* library,
                                                 NvmlTimeouts timeouts) {
  auto thread = std::make_unique<DriverThread>(timeouts);
  ASSIGN_OR_RETURN(GpuIdentity identity, thread->Open(library, gpu_uuid));
  return std::unique_ptr<Nvml>(new Nvml(std::move(thread), std::move(identity)));
}

Nvml::Nvml(std::unique_ptr<DriverThread> thread, GpuIdentity identity)
    : thread_(std::move(thread)), identity_(std::move(identity)) {}

Nvml::~Nvml() = default;

absl::StatusOr<GpuReading> Nvml::Read() {
  const std::lock_guard<std::mutex> lock(reader_);
  return thread_->Read();
}

}  // namespace tessera::server
