// What a call costs a client of the daemon: the product of bench_launch.cc on buffers that the daemon owns.
#include <chrono>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
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
  RETURN_IF_ERROR(TimeGemm(session, "grpc_unary",
                           {.a = a.Tensor(DType::kBf16, {kM, kK}),
                            .b = b_view,
                            .d = d.Tensor(DType::kBf16, {kM, kN}),
                            .backend = v1::BACKEND_CUDA},
                           file));
  // Nothing to launch: the call alone.
  return TimeGemm(session, "grpc_unary_empty",
                  {.a = a.Tensor(DType::kBf16, {0, kK}),
                   .b = b_view,
                   .d = d.Tensor(DType::kBf16, {0, kN}),
                   .backend = v1::BACKEND_CUDA},
                  file);
}

}  // namespace tessera::gpu_test
