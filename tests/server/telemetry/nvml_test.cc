// The GPU's sensors through a library that stands in NVML's place: what is read, what a driver may lack, and that none
// of its troubles holds the daemon up.
#include "server/telemetry/nvml.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "common/text.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::Optional;

constexpr char kUuid[] = "GPU-01234567-89ab-cdef-0123-456789abcdef";
constexpr char kLibrary[] = FAKE_NVML_PATH;
constexpr seconds kPatience(5);  // beyond it a test has failed

class NvmlTest : public testing::Test {
 protected:
  void SetUp() override { Set("FAKE_NVML_LOG", log_path_.c_str()); }
  void TearDown() override {
    for (const char* name : set_) ::unsetenv(name);
    ::unlink(log_path_.c_str());
  }

  // For the fake; not while a call of it runs.
  void Set(const char* name, const char* value) {
    ::setenv(name, value, 1);
    set_.push_back(name);
  }

  std::string Log() const {
    std::ifstream file(log_path_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  static absl::StatusOr<std::unique_ptr<Nvml>> Open(const char* library = kLibrary) {
    return Nvml::Open(kUuid, library, {.open = kPatience, .read = kPatience});
  }

  static std::string OpenError(const std::string& uuid = kUuid, const char* library = kLibrary) {
    const auto nvml = Nvml::Open(uuid, library, {.open = kPatience, .read = kPatience});
    EXPECT_EQ(nvml.status().code(), absl::StatusCode::kUnavailable) << nvml.status();
    return MessageOf(nvml.status());
  }

 private:
  const std::string log_path_ = testing::TempDir() + "fake_nvml." + std::to_string(::getpid()) + ".log";
  std::vector<const char*> set_;
};

bool Loaded(const char* library) {
  void* handle = ::dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr) ::dlclose(handle);
  return handle != nullptr;
}

TEST_F(NvmlTest, ReadsEverySensorInBaseUnits) {
  Set("FAKE_NVML_REASONS", "0x5");
  const auto nvml = Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  EXPECT_EQ((*nvml)->driver_version(), "570.86.15");
  EXPECT_EQ((*nvml)->identity().uuid, kUuid);
  EXPECT_EQ((*nvml)->identity().name, "NVIDIA Test \"One\"");
  const auto reading = (*nvml)->Read();
  ASSERT_TRUE(reading.ok()) << reading.status();
  EXPECT_THAT(reading->power_watts, Optional(testing::DoubleEq(345.678)));
  EXPECT_THAT(reading->power_limit_watts, Optional(testing::DoubleEq(700)));
  EXPECT_THAT(reading->temperature_celsius, Optional(61));
  EXPECT_THAT(reading->sm_clock_hertz, Optional(testing::DoubleEq(1.98e9)));
  EXPECT_THAT(reading->memory_used_bytes, Optional(1'000'000'000u));
  EXPECT_THAT(reading->memory_total_bytes, Optional(150'000'000'000u));
  EXPECT_THAT(reading->utilization_ratio, Optional(testing::DoubleEq(0.42)));
  EXPECT_THAT(reading->power_capped, Optional(true));
}

TEST_F(NvmlTest, OnlyThePowerLimitMakesThePowerCap) {
  Set("FAKE_NVML_REASONS", "0xfffffffffffffffb");
  const auto nvml = Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  EXPECT_THAT((*nvml)->Read().value().power_capped, Optional(false));
}

TEST_F(NvmlTest, EveryReadingIsNew) {
  const auto nvml = Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  EXPECT_THAT((*nvml)->Read().value().power_capped, Optional(false));
  Set("FAKE_NVML_REASONS", "0x4");
  EXPECT_THAT((*nvml)->Read().value().power_capped, Optional(true));
}

TEST_F(NvmlTest, KnowsTheNameOfTheReasonsBeforeRelease535) {
  Set("FAKE_NVML_REASONS", "0x4");
  const auto nvml = Open(FAKE_NVML_BEFORE_535_PATH);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  EXPECT_THAT((*nvml)->Read().value().power_capped, Optional(true));
}

TEST_F(NvmlTest, AMissingLibrarySaysWhereItComesFrom) {
  EXPECT_THAT(OpenError(kUuid, "libtessera-no-such-nvml.so.1"),
              AllOf(HasSubstr("libtessera-no-such-nvml.so.1"), HasSubstr("NVIDIA driver"), HasSubstr("container")));
}

TEST_F(NvmlTest, AMissingFunctionIsNamedAndTheLibraryUnloaded) {
  EXPECT_THAT(OpenError(kUuid, FAKE_NVML_INCOMPLETE_PATH),
              AllOf(HasSubstr("nvmlDeviceGetPowerUsage"), HasSubstr("update")));
  EXPECT_FALSE(Loaded(FAKE_NVML_INCOMPLETE_PATH));
  EXPECT_EQ(Log(), "");
}

TEST_F(NvmlTest, AnUnknownUuidIsNamedAndNvmlShutDown) {
  EXPECT_THAT(OpenError("GPU-no-such"), AllOf(HasSubstr("GPU-no-such"), HasSubstr("nvidia-smi -L")));
  EXPECT_EQ(Log(), "nvmlInit_v2\nnvmlShutdown\n");
  EXPECT_FALSE(Loaded(kLibrary));
}

TEST_F(NvmlTest, AFailedInitIsNotShutDown) {
  Set("FAKE_NVML_FAIL", "nvmlInit_v2=9");
  EXPECT_THAT(OpenError(), AllOf(HasSubstr("nvmlInit_v2: some error (9)"), HasSubstr("nvidia-smi")));
  EXPECT_EQ(Log(), "nvmlInit_v2\n");
  EXPECT_FALSE(Loaded(kLibrary));
}

TEST_F(NvmlTest, EveryOtherCallOfOpeningMayFail) {
  for (const char* call : {"nvmlSystemGetDriverVersion", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetName"}) {
    Set("FAKE_NVML_FAIL", (std::string(call) + "=15").c_str());
    EXPECT_THAT(OpenError(), HasSubstr(std::string(call) + ": GPU is lost (15)"));
  }
}

TEST_F(NvmlTest, ClosingShutsDownAndUnloads) {
  {
    const auto nvml = Open();
    ASSERT_TRUE(nvml.ok()) << nvml.status();
    EXPECT_TRUE(Loaded(kLibrary));
    EXPECT_EQ(Log(), "nvmlInit_v2\n");
  }
  EXPECT_EQ(Log(), "nvmlInit_v2\nnvmlShutdown\n");
  EXPECT_FALSE(Loaded(kLibrary));
}

TEST_F(NvmlTest, WhatTheDriverDoesNotOfferIsAbsentAndTheRestIsThere) {
  Set("FAKE_NVML_FAIL",
      "nvmlDeviceGetPowerUsage=3,nvmlDeviceGetTemperature=4,nvmlDeviceGetMemoryInfo=3,"
      "nvmlDeviceGetUtilizationRates=13,nvmlDeviceGetCurrentClocksEventReasons=3");
  const auto nvml = Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const auto reading = (*nvml)->Read();
  ASSERT_TRUE(reading.ok()) << reading.status();
  EXPECT_EQ(reading->power_watts, std::nullopt);
  EXPECT_EQ(reading->temperature_celsius, std::nullopt);
  EXPECT_EQ(reading->memory_used_bytes, std::nullopt);
  EXPECT_EQ(reading->memory_total_bytes, std::nullopt);
  EXPECT_EQ(reading->utilization_ratio, std::nullopt);
  EXPECT_EQ(reading->power_capped, std::nullopt);
  EXPECT_THAT(reading->power_limit_watts, Optional(700));
  EXPECT_THAT(reading->sm_clock_hertz, Optional(1.98e9));
}

TEST_F(NvmlTest, AFailingSensorFailsTheReadingUntilItWorksAgain) {
  const auto nvml = Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  for (const char* call : {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTemperature",
                           "nvmlDeviceGetClockInfo", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates",
                           "nvmlDeviceGetCurrentClocksEventReasons"}) {
    Set("FAKE_NVML_FAIL", (std::string(call) + "=15").c_str());
    const auto reading = (*nvml)->Read();
    EXPECT_EQ(reading.status().code(), absl::StatusCode::kUnavailable) << call;
    EXPECT_THAT(MessageOf(reading.status()), HasSubstr(std::string(call) + ": GPU is lost (15)"));
  }
  Set("FAKE_NVML_FAIL", "");
  EXPECT_TRUE((*nvml)->Read().ok());
}

TEST_F(NvmlTest, ALateDriverHoldsNobodyUpAndIsReadAgainOnceItIsBack) {
  Set("FAKE_NVML_SLOW", "nvmlDeviceGetPowerUsage=1000");
  const auto nvml = Nvml::Open(kUuid, kLibrary, {.open = kPatience, .read = milliseconds(50)});
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const auto start = steady_clock::now();
  const auto late = (*nvml)->Read();
  EXPECT_EQ(late.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(MessageOf(late.status()), AllOf(HasSubstr("within 50 ms"), HasSubstr("nvidia-smi")));
  for (int i = 0; i < 100; ++i) EXPECT_FALSE((*nvml)->Read().ok());  // 5 s if each waited
  EXPECT_LT(steady_clock::now() - start, milliseconds(900));
  std::this_thread::sleep_until(start + milliseconds(1100));
  Set("FAKE_NVML_SLOW", "");
  absl::StatusOr<GpuReading> reading = (*nvml)->Read();
  while (!reading.ok() && steady_clock::now() < start + kPatience) reading = (*nvml)->Read();
  EXPECT_TRUE(reading.ok()) << reading.status();
}

// The driver's thread is left alone and closes NVML when it comes back.
TEST_F(NvmlTest, ClosingDoesNotWaitForALateDriver) {
  Set("FAKE_NVML_SLOW", "nvmlDeviceGetPowerUsage=1000");
  auto nvml = Nvml::Open(kUuid, kLibrary, {.open = kPatience, .read = milliseconds(50)});
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const auto start = steady_clock::now();
  EXPECT_FALSE((*nvml)->Read().ok());
  nvml->reset();
  EXPECT_LT(steady_clock::now() - start, milliseconds(900));
  EXPECT_TRUE(Loaded(kLibrary));
  while (Loaded(kLibrary) && steady_clock::now() < start + kPatience) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(Log(), "nvmlInit_v2\nnvmlShutdown\n");
  EXPECT_FALSE(Loaded(kLibrary));
}

TEST_F(NvmlTest, OpeningDoesNotWaitForALateDriver) {
  Set("FAKE_NVML_SLOW", "nvmlInit_v2=1000");
  const auto start = steady_clock::now();
  const auto nvml = Nvml::Open(kUuid, kLibrary, {.open = milliseconds(50), .read = milliseconds(50)});
  EXPECT_EQ(nvml.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(steady_clock::now() - start, milliseconds(900));
  while (Loaded(kLibrary) && steady_clock::now() < start + kPatience) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(Log(), "nvmlInit_v2\nnvmlShutdown\n");
}

TEST_F(NvmlTest, ManyReadersTakeTurns) {
  const auto nvml = Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  std::vector<std::jthread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&nvml] {
      for (int read = 0; read < 200; ++read) {
        const auto reading = (*nvml)->Read();
        EXPECT_TRUE(reading.ok()) << reading.status();
        EXPECT_THAT(reading->temperature_celsius, Optional(61));
      }
    });
  }
}

TEST_F(NvmlTest, AReadingReachesTheScrape) {
  Set("FAKE_NVML_REASONS", "0x4");
  Set("FAKE_NVML_FAIL", "nvmlDeviceGetTemperature=3");
  const auto nvml = Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  Metrics metrics({.version = "test", .variants = {}, .gpu = (*nvml)->identity()});
  metrics.SetGpu((*nvml)->Read().value());
  const std::string text = metrics.Serialize();
  const std::string labels = std::string("{uuid=\"") + kUuid + "\"} ";
  EXPECT_THAT(text, HasSubstr(std::string("tessera_gpu_info{driver=\"570.86.15\",name=\"NVIDIA Test \\\"One\\\"\",") +
                              "uuid=\"" + kUuid + "\"} 1\n"));
  for (const char* sample : {"readable=1", "power_watts=345.678", "power_limit_watts=700", "power_capped=1",
                             "temperature_celsius=0", "sm_clock_hertz=1980000000", "memory_used_bytes=1000000000",
                             "memory_total_bytes=150000000000", "utilization_ratio=0.42"}) {
    const std::string_view row(sample);
    const std::size_t equals = row.find('=');
    EXPECT_THAT(text, HasSubstr("\ntessera_gpu_" + std::string(row.substr(0, equals)) + labels +
                                std::string(row.substr(equals + 1)) + "\n"));
  }
  EXPECT_THAT(text, Not(HasSubstr("Nan")));
}

}  // namespace
}  // namespace tessera::server
