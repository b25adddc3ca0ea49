// tesserad where no GPU can be served, on any machine: it tells what is wrong and what to do, and serves on the CPU;
// told which GPU to serve, it does not start. A driver that this test brings takes the place of the machine's own.

#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/workload/shared_problem.h"

#ifdef TESSERA_HAVE_CUDA
#include "server/exec/cuda_device.h"
#endif

namespace tessera::e2e {
namespace {

using namespace std::chrono_literals;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using workload::MemoryOwner;
using workload::SharedProblem;

constexpr auto kRefusedWithin = 5s;
constexpr char kUuid[] = "GPU-01234567-89ab-cdef-0123-456789abcdef";

struct Situation {
  std::string name;
  std::vector<std::string> driver;  // NAME=value for the driver; empty = none that loads
  std::string reason;               // regular expression
};

void PrintTo(const Situation& situation, std::ostream* out) {
  *out << situation.name;
}

#ifdef TESSERA_HAVE_CUDA
constexpr char kFakeDriver[] = FAKE_DRIVER_DIRECTORY;

std::string Driver(int version) {
  return "FAKE_CUDA_DRIVER_VERSION=" + std::to_string(version);
}
std::string Init(int result) {
  return "FAKE_CUDA_INIT_RESULT=" + std::to_string(result);
}

// Later than any toolkit: never the reason.
constexpr int kNewDriver = 99000;

std::vector<Situation> Situations() {
  return {
      {"NoDriver",
       {},
       "no NVIDIA driver on this machine: libcuda.so.1 does not load; install the driver, .*NVIDIA runtime"},
      {"OldDriver",
       {Driver(11040), Init(0)},
       "the driver serves CUDA 11.4 and this build needs 1[0-9].[0-9]; update the driver"},
      {"NoDevice", {Driver(kNewDriver), Init(100)}, "the driver shows no GPU; CUDA_VISIBLE_DEVICES, .* decide .*"},
      {"UnknownError",
       {Driver(kNewDriver), Init(999)},
       "the driver does not start: unknown error \\(cudaErrorUnknown\\); nvidia-smi and the kernel's log say more"},
      {"NoFabricManager",
       {Driver(kNewDriver), Init(802)},
       "the driver does not start: .* \\(cudaErrorSystemNotReady\\); .*Fabric Manager must run"},
      {"HalfUpdatedDriver",
       {Driver(kNewDriver), Init(803)},
       "the driver does not start: .* \\(cudaErrorSystemDriverMismatch\\); .*different versions; reboot .*"},
      {"ForeignCompatibilityDriver",
       {Driver(kNewDriver), Init(804)},
       "the driver does not start: .* \\(cudaErrorCompatNotSupportedOnDevice\\); take .*cuda-compat.* out .*"},
  };
}
#else
constexpr char kFakeDriver[] = "";

std::vector<Situation> Situations() {
  return {{"NoCudaInThisBuild", {}, "this build has no CUDA code; configure it with TESSERA_CUDA_ARCHS"}};
}
#endif

class NoGpuTest : public ::testing::TestWithParam<Situation> {
 protected:
  // A command line that starts tesserad in a situation. Only the child sees what is set for it.
  std::vector<std::string> Tesserad(const Situation& situation, const std::string& cuda_device) const {
    // The loader ends its search at a file of the right name, whatever is in it.
    if (situation.driver.empty()) std::ofstream(directory_.File("libcuda.so.1")) << "no library\n";
    std::string path = situation.driver.empty() ? directory_.File("") : kFakeDriver;
    const char* inherited = std::getenv("LD_LIBRARY_PATH");
    if (inherited != nullptr) path += std::string(":") + inherited;
    std::vector<std::string> argv = {"/usr/bin/env", "LD_LIBRARY_PATH=" + path, "FAKE_CUDA_MARK=" + mark()};
    argv.insert(argv.end(), situation.driver.begin(), situation.driver.end());
    argv.insert(argv.end(), {TESSERAD, "--socket", socket(), "--http-address", "127.0.0.1:0"});
    argv.insert(argv.end(), {"--cuda-device", cuda_device});
    return argv;
  }

  std::string socket() const { return directory_.File("d.sock"); }

  bool FakeDriverWasLoaded() const { return std::filesystem::exists(mark()); }

  // In every way in which a client can see it.
  void ExpectServesOnTheCpu(const ChildProcess& daemon, const std::string& reason) const;

 private:
  client::Client AwaitDaemon(const ChildProcess& daemon) const {
    absl::StatusOr<client::Client> client = absl::UnknownError("");
    EXPECT_TRUE(Eventually(20s, [&] {
      client = client::Client::Connect({.socket = socket(), .side_channel = {}, .timeout = 1s});
      return client.ok();
    })) << daemon.Err();
    return std::move(client).value();
  }

  std::string mark() const { return directory_.File("mark"); }

  const TemporaryDirectory directory_;
};

void ExpectCpuAlone(const v1::ServerInfoReply& info, const std::string& reason) {
  EXPECT_EQ(info.default_backend(), "cpu");
  EXPECT_EQ(info.isolation_mode(), "none");
  std::map<std::string, v1::BackendInfo> backends;
  for (const v1::BackendInfo& backend : info.backends()) backends[backend.name()] = backend;
  EXPECT_TRUE(backends["cpu"].available());
  for (const char* name : {"cuda", "vendor"}) {
    EXPECT_FALSE(backends[name].available()) << name;
    EXPECT_THAT(backends[name].reason(), MatchesRegex(reason)) << name;
  }
}

void ExpectIsolationNone(const std::string& metrics) {
  EXPECT_EQ(MetricSum(metrics, "tessera_isolation_mode", {"mode=\"none\""}), 1);
  EXPECT_EQ(MetricSum(metrics, "tessera_isolation_mode"), 1);
}

// What names the GPU is refused with the reason; what names nothing runs on the CPU.
void ExpectCpuComputes(client::Client& client, const std::string& reason) {
  client::Session session = client.OpenSession("no gpu").value();
  auto problem = SharedProblem::Make(session, {.m = 20, .n = 30, .k = 40}, 9, MemoryOwner::kClient).value();
  for (const v1::Backend backend : {v1::BACKEND_CUDA, v1::BACKEND_VENDOR}) {
    problem.spec().backend = backend;
    const absl::Status refused = session.Gemm(problem.spec()).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented) << refused;
    EXPECT_THAT(Text(refused), ContainsRegex("options.backend: .* is not available in this daemon \\(" + reason));
  }
  problem.spec().backend = v1::BACKEND_UNSPECIFIED;
  const auto result = session.Gemm(problem.spec());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->report.backend(), "cpu");
  EXPECT_TRUE(problem.Check().ok);
}

void NoGpuTest::ExpectServesOnTheCpu(const ChildProcess& daemon, const std::string& reason) const {
  client::Client client = AwaitDaemon(daemon);
  const v1::ServerInfoReply info = client.ServerInfo().value();
  ExpectCpuAlone(info, reason);
  ExpectCpuComputes(client, reason);
  ExpectIsolationNone(HttpGet(info.http_address(), "/metrics").body);
  EXPECT_EQ(HttpGet(info.http_address(), "/readyz").code, 200);
}

TEST_P(NoGpuTest, AutoServesOnTheCpuAndSaysWhy) {
  ChildProcess daemon(Tesserad(GetParam(), "auto"));
  ExpectServesOnTheCpu(daemon, GetParam().reason);
  EXPECT_THAT(daemon.Err(), ContainsRegex("backend cuda is off: " + GetParam().reason));
  EXPECT_EQ(FakeDriverWasLoaded(), !GetParam().driver.empty());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(20s), 0) << daemon.Err();
}

TEST_P(NoGpuTest, AGpuThatIsNamedIsRefusedAtStart) {
  for (const std::string& name : {std::string("0"), std::string(kUuid)}) {
    ChildProcess daemon(Tesserad(GetParam(), name));
    EXPECT_EQ(daemon.Wait(kRefusedWithin), 1) << daemon.Err();
    EXPECT_THAT(daemon.Err(), ContainsRegex("cannot start: cuda_device: " + GetParam().reason));
    EXPECT_FALSE(std::filesystem::exists(socket()));
  }
}

TEST_P(NoGpuTest, OffDoesNotTouchTheDriver) {
  const ChildProcess daemon(Tesserad(GetParam(), "off"));
  ExpectServesOnTheCpu(daemon, "the setting cuda_device is off");
  EXPECT_FALSE(FakeDriverWasLoaded());
}

INSTANTIATE_TEST_SUITE_P(Machines, NoGpuTest, ::testing::ValuesIn(Situations()),
                         [](const auto& param) { return param.param.name; });

#ifdef TESSERA_HAVE_CUDA
using server::CheckKernels;
using server::ChooseDevice;
using server::CudaFacts;

// A machine with GPUs of these compute capabilities, whose UUIDs are their ordinals.
class Machine {
 public:
  explicit Machine(std::vector<int> capabilities) : capabilities_(std::move(capabilities)) {}

  absl::StatusOr<CudaFacts> Choose(const std::string& wanted) const {
    return ChooseDevice(wanted, static_cast<int>(capabilities_.size()),
                        [this](int ordinal) -> absl::StatusOr<CudaFacts> { return FactsOf(ordinal); });
  }

 private:
  CudaFacts FactsOf(int ordinal) const {
    return {.ordinal = ordinal,
            .name = "GPU",
            .uuid = "GPU-" + std::to_string(ordinal),
            .compute_capability = capabilities_[ordinal]};
  }

  const std::vector<int> capabilities_;
};

TEST(ChooseDeviceTest, AutoTakesTheFirstThatKernelsRunOn) {
  EXPECT_EQ(Machine({90, 90}).Choose("auto")->ordinal, 0);
  EXPECT_EQ(Machine({75, 61, 80, 90}).Choose("auto")->ordinal, 2);
  // To be refused by its name.
  EXPECT_EQ(Machine({75, 61}).Choose("auto")->ordinal, 0);
}

TEST(ChooseDeviceTest, ANamedDeviceIsThatOneOrNone) {
  const Machine machine({75, 90});
  EXPECT_EQ(machine.Choose("0")->ordinal, 0);
  EXPECT_EQ(machine.Choose("1")->ordinal, 1);
  EXPECT_EQ(machine.Choose("GPU-1")->ordinal, 1);
  const absl::Status no_ordinal = machine.Choose("2").status();
  EXPECT_EQ(no_ordinal.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(no_ordinal),
              HasSubstr("no GPU 2; the driver shows 2, numbered from 0; CUDA_VISIBLE_DEVICES decides which"));
  const absl::Status no_uuid = machine.Choose(kUuid).status();
  EXPECT_EQ(no_uuid.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(no_uuid), HasSubstr("no GPU " + std::string(kUuid) +
                                       " among those that the driver shows (GPU-0, GPU-1); CUDA_VISIBLE_DEVICES"));
}

TEST(ChooseDeviceTest, ADeviceThatDoesNotAnswerIsTheReason) {
  const auto broken = [](int) -> absl::StatusOr<CudaFacts> { return absl::UnavailableError("broken"); };
  for (const char* wanted : {"auto", "0", kUuid}) {
    EXPECT_THAT(Text(ChooseDevice(wanted, 1, broken).status()), HasSubstr("broken")) << wanted;
  }
  EXPECT_THAT(Text(ChooseDevice("1", 1, broken).status()), HasSubstr("no GPU 1"));
}

TEST(CheckKernelsTest, ADeviceWithoutKernelsIsRefusedWithTheRemedy) {
  const auto refusal = [](const char* name, int capability) {
    const absl::Status status = CheckKernels({.name = name, .compute_capability = capability}, {});
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    return Text(status);
  };
  EXPECT_THAT(refusal("Tesla T4", 75), HasSubstr("Tesla T4 (sm_75) is none of the GPUs that this build has kernels "
                                                 "for; kernels need sm_80 or later"));
  EXPECT_THAT(refusal("NVIDIA A10", 86), HasSubstr("configure it with 86 in TESSERA_CUDA_ARCHS"));
  EXPECT_THAT(refusal("NVIDIA H200", 90), HasSubstr("configure it with 90a in TESSERA_CUDA_ARCHS"));
}

// The first check, before anything is loaded, is by what could run.
TEST(CheckKernelsTest, WhatCouldRunIsByComputeCapability) {
  for (const int capability : {50, 61, 75, 79}) {
    EXPECT_FALSE(CheckKernels({.compute_capability = capability}, server::ArchsOf(capability)).ok()) << capability;
  }
  for (const int capability : {80, 86, 89, 90, 100, 120}) {
    EXPECT_TRUE(CheckKernels({.compute_capability = capability}, server::ArchsOf(capability)).ok()) << capability;
    EXPECT_EQ(server::ArchsOf(capability).Has(kernels::Arch::kSm89), capability >= 89) << capability;
    EXPECT_EQ(server::ArchsOf(capability).Has(kernels::Arch::kSm90a), capability == 90) << capability;
  }
}
#endif

}  // namespace
}  // namespace tessera::e2e
