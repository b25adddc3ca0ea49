#include "tests/gpu/e2e_client.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/e2e_hostile.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/e2e_problem.h"
#include "tests/gpu/e2e_report.h"
#include "tests/gpu/gpu.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Json = nlohmann::ordered_json;

constexpr int kCycles = 200;
constexpr std::int64_t kLeakMax = std::int64_t{2} << 20;

// Written under another name first: whoever waits for the file finds all of it.
absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path + ".part");
  file << text << "\n";
  file.close();
  std::error_code error;
  if (!file.fail()) std::filesystem::rename(path + ".part", path, error);
  if (file.fail() || error) return absl::InternalError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

// Offsets that keep 256 bytes of alignment, and that keep an element's alone.
std::vector<Problem> Problems(bool few) {
  std::vector<Problem> problems;
  problems.emplace_back("NT 256x384x512", 256, 384, 512, false, 512);
  if (few) return problems;
  problems.emplace_back("NN 256x384x512", 256, 384, 512, true, 512);
  problems.emplace_back("NT 67x129x93, odd offset", 67, 129, 93, false, 514);
  problems.emplace_back("NN 67x129x93, odd offset", 67, 129, 93, true, 514);
  return problems;
}

const std::map<std::string, Homes>& Routes() {
  static const std::map<std::string, Homes> routes = {
      {"daemon-owned", {Home::kDaemon, Home::kDaemon, Home::kDaemon}},
      {"handle", {Home::kLegacy, Home::kLegacy, Home::kLegacy}},
      {"descriptor", {Home::kDescriptor, Home::kDescriptor, Home::kDescriptor}},
      {"mixed", {Home::kLegacy, Home::kDaemon, Home::kDescriptor}},
  };
  return routes;
}

// Why the daemon has no backend `name`; nullopt if it has it.
std::optional<std::string> Missing(const client::Client& client, const std::string& name) {
  const absl::StatusOr<v1::ServerInfoReply> info = client.ServerInfo();
  if (!info.ok()) return Text(info.status());
  for (const v1::BackendInfo& backend : info->backends()) {
    if (backend.name() == name) return backend.available() ? std::nullopt : std::optional(backend.reason());
  }
  return "unknown to the daemon";
}

Row RunRoute(Connected& connected, const std::string& route, std::vector<Problem>& problems) {
  Row row{.environment = {}, .route = route};
  const Homes& homes = Routes().at(route);
  const std::optional<std::string> no_vendor = Missing(connected.client, "vendor");
  bool vendor_ran = false;
  for (Problem& problem : problems) {
    const std::string wrong = problem.Run(connected.session, homes, v1::BACKEND_CUDA, "cuda");
    row.Check(wrong.empty(), wrong);
    if (!problem.aligned() || vendor_ran || no_vendor.has_value()) continue;
    vendor_ran = true;
    const std::string vendor_wrong = problem.Run(connected.session, homes, v1::BACKEND_VENDOR, "vendor");
    row.Check(vendor_wrong.empty(), vendor_wrong);
  }
  if (no_vendor.has_value()) row.Remark("without backend vendor: " + *no_vendor);
  return row;
}

std::vector<Row> RunRoutes(Connected& connected, const std::vector<std::string>& routes, bool few) {
  std::vector<Problem> problems = Problems(few);
  std::vector<Row> rows;
  for (const std::string& route : routes) rows.push_back(RunRoute(connected, route, problems));
  return rows;
}

constexpr std::int64_t kExtent = 128;  // of M, N and K where the numbers do not matter
constexpr std::uint64_t kTensorBytes = kExtent * kExtent * 2;

client::GemmSpec SpecOf(const client::Buffer& a, const client::Buffer& b, const client::Buffer& d) {
  const auto view = [](const client::Buffer& buffer) { return buffer.Tensor(DType::kBf16, {kExtent, kExtent}); };
  return {.a = view(a), .b = view(b), .d = view(d), .backend = v1::BACKEND_CUDA};
}

absl::Status RefuseHostMemory(client::Session& session, Row& row) {
  ASSIGN_OR_RETURN(const client::Buffer a, session.Allocate(kTensorBytes));
  ASSIGN_OR_RETURN(const client::Buffer b, session.Allocate(kTensorBytes));
  ASSIGN_OR_RETURN(const client::Buffer d, session.Allocate(kTensorBytes));
  CheckRefused(row, "host memory with backend cuda", session.Gemm(SpecOf(a, b, d)).status(),
               absl::StatusCode::kUnimplemented, {"backend cuda computes on memory of GPU-", "memory of host"});
  ASSIGN_OR_RETURN(const client::Buffer on_device, session.AllocateOnDevice(kTensorBytes));
  CheckRefused(row, "two spaces in one call", session.Gemm(SpecOf(a, b, on_device)).status(),
               absl::StatusCode::kInvalidArgument, {"must be in one space"});
  return absl::OkStatus();
}

absl::Status RefuseReleased(client::Session& session, Row& row) {
  ASSIGN_OR_RETURN(client::Buffer a, session.AllocateOnDevice(kTensorBytes));
  ASSIGN_OR_RETURN(const client::Buffer b, session.AllocateOnDevice(kTensorBytes));
  ASSIGN_OR_RETURN(const client::Buffer d, session.AllocateOnDevice(kTensorBytes));
  const client::GemmSpec spec = SpecOf(a, b, d);
  const absl::Status before = session.Gemm(spec).status();
  row.Check(before.ok(), absl::StrCat("before the release: ", before.ToString()));
  RETURN_IF_ERROR(a.Release());
  CheckRefused(row, "a released buffer", session.Gemm(spec).status(), absl::StatusCode::kNotFound, {"op.a"});
  return absl::OkStatus();
}

absl::Status RefuseImports(client::Session& session, Row& row) {
  ASSIGN_OR_RETURN(const auto pooled, AllocateFromPool(kTensorBytes));
  CheckRefused(row, "memory of cudaMallocAsync", session.ImportDevice(pooled->data()).status(),
               absl::StatusCode::kFailedPrecondition, {"cudaMallocAsync", "AllocateOnDevice"});
  ASSIGN_OR_RETURN(const auto plain, AllocatePlain(kTensorBytes));
  CheckRefused(row, "more bytes than allocated", session.ImportDevice(plain->data(), 64 * kMiB).status(),
               absl::StatusCode::kInvalidArgument, {"bytes"});
  std::array<std::byte, 256> host{};
  CheckRefused(row, "host memory as GPU memory", session.ImportDevice(host.data()).status(),
               absl::StatusCode::kInvalidArgument, {"not GPU memory"});
  return absl::OkStatus();
}

std::vector<Row> RunRefusals(Connected& connected) {
  Row row{.environment = {}, .route = "refusals"};
  for (const auto refuse : {RefuseHostMemory, RefuseReleased, RefuseImports}) {
    const absl::Status status = refuse(connected.session, row);
    if (!status.ok()) row.Check(false, Text(status));
  }
  // After all that, the session still computes.
  std::vector<Problem> problems = Problems(/*few=*/true);
  const Row after = RunRoute(connected, "daemon-owned", problems);
  row.Check(after.failed == 0, "after the refusals: " + after.detail);
  return {row};
}

// One of every kind: allocated, imported, used if `compute`, released, freed.
absl::Status Cycle(client::Session& session, bool compute) {
  ASSIGN_OR_RETURN(const auto plain, AllocatePlain(8 * kMiB));
  ASSIGN_OR_RETURN(const auto vmm, AllocateVmm(8 * kMiB));
  ASSIGN_OR_RETURN(client::Buffer a, session.ImportDevice(plain->data() + 256));
  ASSIGN_OR_RETURN(client::Buffer b, session.ImportDevice(vmm->data() + 256));
  ASSIGN_OR_RETURN(client::Buffer d, session.AllocateOnDevice(8 * kMiB));
  if (compute) RETURN_IF_ERROR(session.Gemm(SpecOf(a, b, d)).status());
  RETURN_IF_ERROR(a.Release());
  RETURN_IF_ERROR(b.Release());
  return d.Release();
}

absl::Status Cycles(Connected& connected, Row& row) {
  // The first ones load and allocate what then stays.
  for (int i = 0; i < 3; ++i) RETURN_IF_ERROR(Cycle(connected.session, /*compute=*/true));
  ASSIGN_OR_RETURN(const std::uint64_t before, FreeDeviceBytes());
  for (int i = 0; i < kCycles; ++i) {
    const absl::Status status = Cycle(connected.session, /*compute=*/i % 10 == 0);
    row.Check(status.ok(), absl::StrCat("cycle ", i, ": ", status.ToString()));
    if (!status.ok()) return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::uint64_t after, FreeDeviceBytes());
  const std::int64_t lost = static_cast<std::int64_t>(before) - static_cast<std::int64_t>(after);
  row.Check(lost <= kLeakMax, absl::StrCat(lost, " bytes of GPU memory are gone after ", kCycles, " cycles"));
  ASSIGN_OR_RETURN(const v1::ServerInfoReply info, connected.client.ServerInfo());
  row.Check(info.buffers() == 0 && info.buffer_bytes() == 0,
            absl::StrCat(info.buffers(), " buffers of ", info.buffer_bytes(), " bytes are left in the daemon"));
  row.Remark(absl::StrCat(lost, " bytes less free"));
  return absl::OkStatus();
}

std::vector<Row> RunCycles(Connected& connected) {
  Row row{.environment = {}, .route = "cycles"};
  const absl::Status status = Cycles(connected, row);
  if (!status.ok()) row.Check(false, Text(status));
  return {row};
}

std::vector<Row> RunCollision(Connected& connected) {
  Row row{.environment = {}, .route = "handle"};
  const auto plain = AllocatePlain(kTensorBytes);
  if (plain.ok()) {
    CheckRefused(row, "a handle", connected.session.ImportDevice((*plain)->data()).status(),
                 absl::StatusCode::kFailedPrecondition, {"handle", "PID number"});
  } else {
    row.Check(false, Text(plain.status()));
  }
  std::vector<Row> rows = RunRoutes(connected, {"daemon-owned", "descriptor"}, /*few=*/false);
  rows.insert(rows.begin(), std::move(row));
  return rows;
}

// What was tried must not have harmed the daemon: a product after it is right.
std::vector<Row> RunHostile(Connected& connected, const std::string& socket) {
  Row row{.environment = {}, .route = "hostile"};
  const absl::Status status = TryHostileImports(socket, row);
  row.Check(status.ok(), Text(status));
  std::vector<Row> rows = RunRoutes(connected, {"mixed"}, /*few=*/true);
  rows.push_back(row);
  return rows;
}

absl::StatusOr<Json> Probe() {
  int devices = 0;
  // Before all else: its words tell a missing driver from a missing device.
  RETURN_IF_ERROR(ToStatus(cudaGetDeviceCount(&devices), "no usable GPU"));
  if (devices == 0) return absl::UnavailableError("no usable GPU: the driver shows none");
  const Gpu gpu;
  ASSIGN_OR_RETURN(const std::uint64_t free_bytes, FreeDeviceBytes());
  return Json{{"gpu", gpu.facts().name},
              {"driver", gpu.facts().driver},
              {"cuda", gpu.facts().cuda},
              {"free_bytes", free_bytes}};
}

absl::StatusOr<std::vector<Row>> RunRows(const ClientJob& job) {
  if (IsLifetimeJob(job.job)) return RunLifetimeJob(job);
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  if (job.job == "routes") {
    return RunRoutes(connected, {"daemon-owned", "handle", "descriptor", "mixed"}, /*few=*/false);
  }
  if (job.job == "quick") return RunRoutes(connected, {"mixed"}, /*few=*/true);
  if (job.job == "collision") return RunCollision(connected);
  if (job.job == "refusals") return RunRefusals(connected);
  if (job.job == "cycles") return RunCycles(connected);
  if (job.job == "hostile") return RunHostile(connected, job.socket);
  return absl::InvalidArgumentError(absl::StrCat("unknown job ", job.job));
}

absl::Status RunJob(const ClientJob& job) {
  if (IsCompanionJob(job.job)) return RunCompanionJob(job);
  if (job.job == "probe") {
    ASSIGN_OR_RETURN(const Json answer, Probe());
    return WriteFile(job.result, answer.dump());
  }
  ASSIGN_OR_RETURN(const std::vector<Row> rows, RunRows(job));
  return WriteFile(job.result, Json(rows).dump());
}

}  // namespace

std::string Text(const absl::Status& status) {
  return std::string(Sv(status.ToString()));
}

absl::StatusOr<Connected> Connect(const ClientJob& job) {
  ASSIGN_OR_RETURN(client::Client client,
                   client::Client::Connect({.socket = job.socket, .side_channel = {}, .timeout = 20s}));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession(job.job));
  return Connected{.client = std::move(client), .session = std::move(session)};
}

void CheckRefused(Row& row, const std::string& what, const absl::Status& status, absl::StatusCode code,
                  const std::vector<std::string>& words) {
  bool right = status.code() == code;
  for (const std::string& word : words) right = right && absl::StrContains(status.message(), word);
  row.Check(right, absl::StrCat(what, ": ", status.ToString()));
}

int RunClient(const ClientJob& job) {
  const absl::Status status = RunJob(job);
  if (status.ok()) return EXIT_SUCCESS;
  std::fprintf(stderr, "%s\n", MessageOf(status).c_str());
  return EXIT_FAILURE;
}

}  // namespace tessera::gpu_test
