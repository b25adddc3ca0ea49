// A real workload for one daemon: seeded GEMMs over every pair and layout on shared memory, each checked against
// float64, then one whose operands come from files. Exit code 0 only if every result is right.

#include <sys/types.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/tensor_file.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/oracle/codec.h"
#include "tests/workload/shared_problem.h"

namespace tessera::workload {
namespace {

using oracle::GemmCase;

constexpr int kVariantsWanted = 3;

struct Options {
  std::string socket;
  int calls = 240;
  std::uint64_t seed = 20260101;
  bool corrupt = false;
  bool hold = false;
};

struct Tally {
  int right = 0;
  int wrong = 0;
  double worst = 0;                    // error / allowed
  std::map<std::string, int> recipes;  // recipe -> calls
};

// Pairs and layouts in turn; shapes in three kinds: a handful of outputs, few outputs with a long K, everything else.
GemmCase CaseNumber(int number, oracle::Random& random) {
  GemmCase gemm_case;
  std::tie(gemm_case.a, gemm_case.b) = oracle::kGemmPairs[number % oracle::kGemmPairs.size()];
  gemm_case.layout = oracle::kGemmLayouts[number / oracle::kGemmPairs.size() % oracle::kGemmLayouts.size()];
  gemm_case.d = random.Int(0, 1) == 0 ? DType::kBf16 : DType::kF32;
  switch (random.Int(0, 2)) {
    case 0:
      gemm_case.m = random.Int(1, 16), gemm_case.n = random.Int(1, 16), gemm_case.k = random.Int(1, 64);
      break;
    case 1:
      gemm_case.m = random.Int(1, 96), gemm_case.n = random.Int(1, 96), gemm_case.k = random.Int(1025, 3000);
      break;
    default:
      gemm_case.m = random.Int(1, 200), gemm_case.n = random.Int(97, 300), gemm_case.k = random.Int(1, 300);
  }
  if (random.Int(0, 3) == 0) {
    gemm_case.batch = {1, 1, random.Int(2, 3)};
    gemm_case.b_broadcast[2] = random.Int(0, 1) == 0;
  }
  const auto pick = [&random](const auto& from) { return from[random.Int(0, static_cast<int>(from.size()) - 1)]; };
  gemm_case.a_scale = pick(oracle::LegalScales(gemm_case.a));
  gemm_case.b_scale = pick(oracle::LegalScales(gemm_case.b));
  gemm_case.bias = static_cast<oracle::BiasMode>(random.Int(0, 2));
  gemm_case.padding = random.Int(0, 3);
  gemm_case.offset = random.Int(0, 2);
  return gemm_case;
}

std::string ShapeText(const client::GemmSpec& spec) {
  const kernels::GemmParams params = ParamsOf(spec);
  return absl::StrCat(oracle::BatchCount(params), "x", params.m, "x", params.n, "x", params.k);
}

void Print(int number, const client::GemmSpec& spec, const client::GemmResult& result, const oracle::Verdict& verdict) {
  std::printf("%4d  %-18s  %-62s  %-9s  run %8.1f us  call %8.1f us  %s\n", number, ShapeText(spec).c_str(),
              result.report.variant().c_str(), result.report.source().c_str(),
              static_cast<double>(result.report.timing().run_ns()) / 1e3,
              static_cast<double>(result.round_trip.count()) / 1e3,
              verdict.ok ? "right" : ("WRONG: " + verdict.first).c_str());
}

void Count(const client::GemmResult& result, const oracle::Verdict& verdict, Tally& tally) {
  ++(verdict.ok ? tally.right : tally.wrong);
  tally.worst = std::max(tally.worst, verdict.worst);
  const std::string& id = result.report.variant();
  ++tally.recipes[id.substr(id.find('/') + 1)];
}

absl::Status RunCases(client::Session& session, const Options& options, Tally& tally) {
  oracle::Random random(options.seed);
  for (int number = 1; number <= options.calls; ++number) {
    const GemmCase gemm_case = CaseNumber(number - 1, random);
    ASSIGN_OR_RETURN(SharedProblem problem,
                     SharedProblem::Make(session, gemm_case, random.Next(),
                                         number % 2 == 0 ? MemoryOwner::kDaemon : MemoryOwner::kClient));
    problem.spec().profile = true;
    ASSIGN_OR_RETURN(const client::GemmResult result, session.Gemm(problem.spec()));
    if (options.corrupt && number == options.calls) {
      problem.DamageOutput();
      std::printf("damaging one element of the next result on purpose (--corrupt)\n");
    }
    const oracle::Verdict verdict = problem.Check();
    Print(number, problem.spec(), result, verdict);
    Count(result, verdict, tally);
  }
  return absl::OkStatus();
}

// A folder that goes with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_(std::filesystem::temp_directory_path() / absl::StrCat("tessera-workload-", ::getpid())) {
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string File(const char* name) const { return path_ / name; }

 private:
  const std::filesystem::path path_;
};

absl::Status WriteRandom(const std::string& path, DType dtype, std::vector<std::int64_t> shape,
                         oracle::Random& random) {
  std::vector<std::byte> data(client::PackedBytes(dtype, shape));
  for (std::size_t at = 0; at < data.size(); at += DTypeBytes(dtype)) {
    const double value = dtype == DType::kS8 ? static_cast<double>(random.Int(-128, 127)) : random.Uniform(-1, 1);
    oracle::Encode(dtype, value, data.data() + at);
  }
  return client::WriteTensorFile(path, {.name = "x", .dtype = dtype, .shape = std::move(shape), .data = data});
}

absl::StatusOr<client::TensorView> Load(const std::string& path, client::Buffer& buffer, std::uint64_t byte_offset) {
  ASSIGN_OR_RETURN(const client::TensorFile file, client::TensorFile::Open(path));
  ASSIGN_OR_RETURN(const client::TensorFileEntry entry, file.Find(""));
  RETURN_IF_ERROR(file.Read(entry, {buffer.data() + byte_offset, entry.bytes}));
  return buffer.Tensor(entry.dtype, entry.shape, byte_offset, entry.strides);
}

// bf16 activations from .safetensors times int8 weights from .npy.
absl::Status RunFiles(client::Session& session, const Options& options, Tally& tally) {
  const TemporaryFolder folder;
  oracle::Random random(options.seed + 1);
  RETURN_IF_ERROR(WriteRandom(folder.File("activations.safetensors"), DType::kBf16, {130, 260}, random));
  RETURN_IF_ERROR(WriteRandom(folder.File("weights.npy"), DType::kS8, {190, 260}, random));

  constexpr std::uint64_t kPlace = 1 << 18;  // of each operand within the buffer
  ASSIGN_OR_RETURN(client::Buffer buffer, session.Allocate(3 * kPlace));
  client::GemmSpec spec;
  ASSIGN_OR_RETURN(spec.a, Load(folder.File("activations.safetensors"), buffer, 0));
  ASSIGN_OR_RETURN(spec.b, Load(folder.File("weights.npy"), buffer, kPlace));
  spec.d = buffer.Tensor(DType::kF32, {130, 190}, 2 * kPlace);
  spec.b_scale = 0.25F;
  spec.profile = true;
  ASSIGN_OR_RETURN(const client::GemmResult result, session.Gemm(spec));
  const kernels::GemmParams params = ParamsOf(spec);
  const oracle::GemmTypes types{spec.a.dtype, spec.b.dtype, spec.d.dtype};
  const oracle::Verdict verdict = oracle::CheckGemm(params, types, oracle::ComputeGemm(params, types));
  std::printf("operands from activations.safetensors and weights.npy:\n");
  Print(options.calls + 1, spec, result, verdict);
  Count(result, verdict, tally);
  return absl::OkStatus();
}

absl::StatusOr<Tally> Run(const Options& options) {
  ASSIGN_OR_RETURN(client::Client client, client::Client::Connect({.socket = options.socket, .side_channel = {}}));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession("workload"));
  if (options.hold) {
    ASSIGN_OR_RETURN(const client::Buffer buffer, session.Allocate(1 << 20));
    std::printf("holding\n");
    std::fflush(stdout);
    while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  Tally tally;
  std::printf("   #  batch x M x N x K  variant\n");
  RETURN_IF_ERROR(RunCases(session, options, tally));
  RETURN_IF_ERROR(RunFiles(session, options, tally));
  return tally;
}

int Report(const Options& options, const Tally& tally) {
  std::printf("\n%d right, %d wrong; worst error %.3f of the allowed; seed %llu\n", tally.right, tally.wrong,
              tally.worst, static_cast<unsigned long long>(options.seed));
  for (const auto& [recipe, calls] : tally.recipes) std::printf("  %-20s chosen %d times\n", recipe.c_str(), calls);
  if (static_cast<int>(tally.recipes.size()) < kVariantsWanted) {
    std::printf("the planner used fewer than %d recipes\n", kVariantsWanted);
    return 1;
  }
  return tally.wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::workload

int main(int argc, char** argv) {
  tessera::workload::Options options;
  CLI::App app("Pushes checked GEMMs through a daemon.", "tessera-workload");
  app.add_option("--socket", options.socket, "The daemon's socket");
  app.add_option("--calls", options.calls, "Seeded GEMMs")->capture_default_str()->check(CLI::Range(1, 1000000));
  app.add_option("--seed", options.seed, "Of shapes and data")->capture_default_str();
  app.add_flag("--corrupt", options.corrupt, "Damage one result before its check, which must then fail");
  app.add_flag("--hold", options.hold, "Hold a session and a buffer until killed");
  CLI11_PARSE(app, argc, argv);
  auto tally = tessera::workload::Run(options);
  if (!tally.ok()) {
    std::fprintf(stderr, "tessera-workload: %s\n", std::string(tally.status().ToString()).c_str());
    return 1;
  }
  return tessera::workload::Report(options, *tally);
}
