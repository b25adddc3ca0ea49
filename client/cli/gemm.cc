// `tessera gemm`: one matrix product through the daemon, timed, checked if asked, on random data or files.

#include <algorithm>
#include <cstdio>
#include <memory>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/gemm_problem.h"
#include "client/tensor_file.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client::cli {
namespace {

struct Outcome {
  v1::OpReport report;                // of the median call
  std::vector<double> round_trip_us;  // sorted
  std::vector<double> run_us;         // sorted
  std::optional<CheckResult> check;
  GemmSpec spec;
};

double Median(const std::vector<double>& sorted) {
  return sorted[sorted.size() / 2];
}

v1::Backend BackendOf(const std::string& name) {
  if (name == "auto") return v1::BACKEND_AUTO;
  if (name == "cpu") return v1::BACKEND_CPU;
  if (name == "cuda") return v1::BACKEND_CUDA;
  if (name == "vendor") return v1::BACKEND_VENDOR;
  return v1::BACKEND_UNSPECIFIED;
}

absl::StatusOr<OperandPlace> PlaceOf(const Client& client, const GemmArguments& arguments) {
  const bool gpu_backend = arguments.backend == "cuda" || arguments.backend == "vendor";
  const bool gpu = arguments.memory.empty() ? gpu_backend : arguments.memory == "gpu";
  if (!client.remote()) return gpu ? OperandPlace::kGpu : OperandPlace::kHost;
  if (gpu)
    return absl::InvalidArgumentError("memory of the GPU is for processes of its node, at the daemon's Unix socket");
  return OperandPlace::kMessage;
}

absl::StatusOr<Outcome> RunGemm(const GlobalOptions& options, const GemmArguments& arguments) {
  ASSIGN_OR_RETURN(Client client, Connect(options));
  std::optional<Session> session;
  if (!client.remote()) {
    ASSIGN_OR_RETURN(session, client.OpenSession("tessera gemm"));
  }
  ASSIGN_OR_RETURN(const OperandPlace place, PlaceOf(client, arguments));
  OperandMemory memory(place, session.has_value() ? &*session : nullptr);
  ASSIGN_OR_RETURN(GemmSpec spec, MakeGemmProblem(memory, arguments));
  RETURN_IF_ERROR(memory.Upload());
  spec.accumulation = arguments.accumulation == "exact" ? v1::ACCUMULATION_EXACT : v1::ACCUMULATION_FAST;
  spec.backend = BackendOf(arguments.backend);
  spec.profile = true;

  Outcome outcome;
  Progress progress("gemm", static_cast<std::uint64_t>(arguments.repeat));
  for (std::int64_t i = 0; i < arguments.repeat; ++i) {
    std::future<absl::StatusOr<GemmResult>> pending =
        session.has_value() ? session->GemmAsync(spec) : client.GemmAsync(spec);
    while (pending.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
      progress.Update(static_cast<std::uint64_t>(i));
    }
    ASSIGN_OR_RETURN(GemmResult result, pending.get());
    progress.Update(static_cast<std::uint64_t>(i) + 1);
    outcome.round_trip_us.push_back(static_cast<double>(result.round_trip.count()) / 1e3);
    outcome.run_us.push_back(static_cast<double>(result.report.timing().run_ns()) / 1e3);
    outcome.report = std::move(result.report);
  }
  std::sort(outcome.round_trip_us.begin(), outcome.round_trip_us.end());
  std::sort(outcome.run_us.begin(), outcome.run_us.end());
  RETURN_IF_ERROR(memory.Download());
  if (arguments.check) outcome.check = CheckGemm(spec);
  if (!arguments.save.empty()) {
    const std::vector<std::byte> data = PackedOutput(spec.d);
    RETURN_IF_ERROR(
        WriteTensorFile(arguments.save, {.name = "d", .dtype = spec.d.dtype, .shape = spec.d.shape, .data = data}));
  }
  outcome.spec = std::move(spec);  // for its shapes; the memory goes now
  return outcome;
}

std::string ShapeText(const TensorView& view) {
  std::string text;
  for (const std::int64_t extent : view.shape) absl::StrAppend(&text, text.empty() ? "" : "x", extent);
  return text;
}

double Gflops(const Outcome& outcome) {
  const double run_us = Median(outcome.run_us);
  return run_us > 0 ? static_cast<double>(outcome.report.flops()) / run_us / 1e3 : 0;
}

void PrintJson(const Outcome& outcome) {
  nlohmann::json document = {{"variant", outcome.report.variant()},
                             {"backend", outcome.report.backend()},
                             {"source", outcome.report.source()},
                             {"split", outcome.report.split()},
                             {"a", ShapeText(outcome.spec.a)},
                             {"b", ShapeText(outcome.spec.b)},
                             {"d", ShapeText(outcome.spec.d)},
                             {"calls", outcome.run_us.size()},
                             {"round_trip_us", Median(outcome.round_trip_us)},
                             {"run_us", Median(outcome.run_us)},
                             {"gflops", Gflops(outcome)}};
  if (outcome.check.has_value()) {
    document["wrong"] = outcome.check->wrong;
    document["worst_error_of_allowed"] = outcome.check->worst;
  }
  std::printf("%s\n", document.dump(2).c_str());
}

void PrintTable(const Outcome& outcome) {
  Table table(
      {"gemm", ShapeText(outcome.spec.a) + " . " + ShapeText(outcome.spec.b) + "^T -> " + ShapeText(outcome.spec.d)});
  table.Add({"variant", outcome.report.variant().empty() ? "nothing to compute" : outcome.report.variant()});
  table.Add({"chosen by",
             outcome.report.source() +
                 (outcome.report.split() > 1 ? ", K in " + std::to_string(outcome.report.split()) + " slices" : "")});
  table.Add({"run", Fixed(Median(outcome.run_us), 1) + " us"});
  table.Add({"round trip", Fixed(Median(outcome.round_trip_us), 1) + " us"});
  table.Add({"speed", Fixed(Gflops(outcome), 2) + " GFLOP/s"});
  table.Add({"calls", std::to_string(outcome.run_us.size()) + " (medians)"});
  if (outcome.check.has_value()) {
    table.Add({"check", outcome.check->wrong == 0
                            ? "ok, worst error " + Fixed(outcome.check->worst, 3) + " of the allowed"
                            : std::to_string(outcome.check->wrong) + " elements WRONG"});
  }
  std::fputs(table.ToString().c_str(), stdout);
}

int Run(const GlobalOptions& options, const GemmArguments& arguments) {
  auto outcome = RunGemm(options, arguments);
  if (!outcome.ok()) return Fail(options, outcome.status());
  options.json ? PrintJson(*outcome) : PrintTable(*outcome);
  return outcome->check.has_value() && outcome->check->wrong > 0 ? kExitFailed : kExitOk;
}

}  // namespace

Command AddGemm(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand("gemm", "D = A . B^T through the daemon: A is [M, K], B is [N, K]");
  auto arguments = std::make_shared<GemmArguments>();
  GemmArguments& to = *arguments;
  const auto extent = CLI::Range(std::int64_t{0}, std::int64_t{1} << 40);
  command->add_option("-m,--m", to.m, "Rows of A and D")->capture_default_str()->check(extent);
  command->add_option("-n,--n", to.n, "Rows of B, columns of D")->capture_default_str()->check(extent);
  command->add_option("-k,--k", to.k, "Columns of A and B")->capture_default_str()->check(extent);
  command->add_option("--batch", to.batch, "Number of products; 0 = no batch dimension")->check(extent);
  command->add_option("--pair", to.pair, "Types of A and B: bf16_bf16, e4m3_e5m2, s8_s8, bf16_s8, ...")
      ->capture_default_str();
  command->add_option("--layout", to.layout, "Storage of A and B: N = A K-contiguous / B N-contiguous")
      ->capture_default_str()
      ->check(CLI::IsMember({"NT", "NN", "TN", "TT"}));
  command->add_option("--out", to.out, "Type of D")->capture_default_str()->check(CLI::IsMember({"bf16", "f32"}));
  command->add_option("--scales", to.scales, "For 8-bit operands: one a tensor, or one a row of A and channel of B")
      ->check(CLI::IsMember({"tensor", "row_col"}));
  command->add_option("--a-scale", to.a_scale, "Scale of A, a number");
  command->add_option("--b-scale", to.b_scale, "Scale of B, a number");
  command->add_flag("--bias", to.bias, "Add a random bias");
  command->add_option("--accumulation", to.accumulation, "Of fp8 products")
      ->capture_default_str()
      ->check(CLI::IsMember({"fast", "exact"}));
  command->add_option("--backend", to.backend, "A named backend is strict: an error if it cannot")
      ->capture_default_str()
      ->check(CLI::IsMember({"default", "auto", "cpu", "cuda", "vendor"}));
  command->add_option("--memory", to.memory, "Where the operands are; gpu by default for backends cuda and vendor")
      ->check(CLI::IsMember({"host", "gpu"}));
  command->add_option("--a", to.a_file, "A from FILE.npy or FILE.safetensors[:NAME], [.., M, K]");
  command->add_option("--b", to.b_file, "B from a file, [.., N, K]");
  command->add_flag("--b-is-kn", to.b_is_kn, "B's file holds [.., K, N]");
  command->add_option("--save", to.save, "Write D to FILE.npy or FILE.safetensors (as tensor d)");
  command->add_option("--seed", to.seed, "Of random data")->capture_default_str();
  command->add_option("--repeat", to.repeat, "Calls; times are medians")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1000000}));
  command->add_flag("--check", to.check, "Compare D with float64; exit code 1 if an element is wrong");
  return {command, [&options, arguments] { return Run(options, *arguments); }};
}

}  // namespace tessera::client::cli
