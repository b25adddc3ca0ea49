// What a call costs a client of the daemon: the product of bench_launch.cc on buffers that the daemon owns.
#include <chrono>
#include <future>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/gemm_stream.h"
#include "common/status_macros.h"
#include "tests/gpu/bench_samples.h"
#include "tests/gpu/bench_workers.h"
#include "tests/gpu/e2e_problem.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kM = 16;
constexpr std::int64_t kN = 4096;
constexpr std::int64_t kK = 4096;

absl::Status TimeGemm(client::Session& session, const std::string& name, const client::GemmSpec& spec, LineFile& file) {
  absl::Status failed;
  const Samples samples = TimeCalls([&] {
    failed = session.Gemm(spec).status();
    return failed.ok();
  });
  if (!failed.ok()) return absl::InternalError(absl::StrCat(name, ": ", failed.message()));
  file.Add(CaseLine(name, samples));
  return absl::OkStatus();
}

// The same products on one Stream call: each after the answer to the one before, and kDepth of them at a time.
absl::Status TimeStream(client::Session& session, const client::GemmSpec& spec, LineFile& file) {
  constexpr int kDepth = 32;
  client::GemmStream stream = session.OpenStream();
  absl::Status failed;
  const auto run = [&](int depth) {
    std::vector<std::future<absl::StatusOr<client::GemmResult>>> pending;
    for (int i = 0; i < depth; ++i) pending.push_back(stream.Gemm(spec));
    for (auto& result : pending) failed.Update(result.get().status());
    return failed.ok();
  };
  const Samples one_by_one = TimeCalls([&] { return run(1); });
  const Samples pipelined = TimeCalls([&] { return run(kDepth); }, kDepth);
  RETURN_IF_ERROR(stream.Finish());
  if (!failed.ok()) return absl::InternalError(absl::StrCat("grpc_stream: ", failed.message()));
  file.Add(CaseLine("grpc_stream", one_by_one));
  file.Add(CaseLine("grpc_stream_pipelined", pipelined));
  return absl::OkStatus();
}

}  // namespace

absl::Status BenchDaemon(const std::string& socket, const std::string& lines) {
  ASSIGN_OR_RETURN(client::Client client,
                   client::Client::Connect({.socket = socket, .side_channel = {}, .timeout = 20s}));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession("bench"));
  ASSIGN_OR_RETURN(client::Buffer a, session.AllocateOnDevice(kM * kK * 2));
  ASSIGN_OR_RETURN(client::Buffer b, session.AllocateOnDevice(kN * kK * 2));
  ASSIGN_OR_RETURN(client::Buffer d, session.AllocateOnDevice(kM * kN * 2));
  RETURN_IF_ERROR(a.Upload(RandomBf16(kM * kK, 1).data(), a.bytes()));
  RETURN_IF_ERROR(b.Upload(RandomBf16(kN * kK, 2).data(), b.bytes()));

  LineFile file(lines);
  const client::TensorView b_view = b.Tensor(DType::kBf16, {kN, kK});
  const client::GemmSpec spec = {.a = a.Tensor(DType::kBf16, {kM, kK}),
                                 .b = b_view,
                                 .d = d.Tensor(DType::kBf16, {kM, kN}),
                                 .backend = v1::BACKEND_CUDA};
  RETURN_IF_ERROR(TimeGemm(session, "grpc_unary", spec, file));
  RETURN_IF_ERROR(TimeStream(session, spec, file));
  // Nothing to launch: the call alone.
  return TimeGemm(session, "grpc_unary_empty",
                  {.a = a.Tensor(DType::kBf16, {0, kK}),
                   .b = b_view,
                   .d = d.Tensor(DType::kBf16, {0, kN}),
                   .backend = v1::BACKEND_CUDA},
                  file);
}

}  // namespace tessera::gpu_test
