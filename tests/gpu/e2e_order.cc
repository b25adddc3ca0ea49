// Order on a GPU: chains of products, each of which doubles what the one before it wrote, over streams and timelines,
// in one submission, and answered when they are launched. Out of order they would double poison.
#include <chrono>
#include <cstdint>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "common/status_macros.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_product.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kExtent = 2048;  // of M, N and K: tens of microseconds, so that the next would overtake
constexpr float kHalfOfOnes = 2.0F / kExtent;
constexpr int kSteps = 20;  // 2^20 is exact in bf16
constexpr std::uint64_t kMatrixBytes = kExtent * kExtent * kBf16Bytes;

class Chain {
 public:
  static absl::StatusOr<Chain> Make(client::Session& session) {
    Chain chain;
    ASSIGN_OR_RETURN(client::Buffer b, session.AllocateOnDevice(kMatrixBytes));
    const std::vector<std::byte> factors = Repeated(kHalfOfOnes, kMatrixBytes);
    RETURN_IF_ERROR(b.Upload(factors.data(), factors.size()));
    chain.buffers_.push_back(std::move(b));
    for (int i = 0; i <= kSteps; ++i) {
      ASSIGN_OR_RETURN(client::Buffer d, session.AllocateOnDevice(kMatrixBytes));
      chain.buffers_.push_back(std::move(d));
    }
    return chain;
  }

  // One in the first matrix, poison in the others.
  absl::Status Reset() {
    for (int i = 0; i <= kSteps; ++i) {
      const std::vector<std::byte> bytes =
          i == 0 ? Repeated(1, kMatrixBytes) : std::vector<std::byte>(kMatrixBytes, kPoison);
      RETURN_IF_ERROR(matrix(i).Upload(bytes.data(), bytes.size()));
    }
    return absl::OkStatus();
  }

  client::GemmSpec Step(int i) {
    return {.a = View(matrix(i)), .b = View(buffers_[0]), .d = View(matrix(i + 1)), .backend = v1::BACKEND_CUDA};
  }

  std::string Wrong() {
    std::vector<std::byte> bytes(kMatrixBytes);
    for (int i = 0; i <= kSteps; ++i) {
      const absl::Status status = matrix(i).Download(bytes.data(), bytes.size());
      const std::string wrong = status.ok() ? WrongNumbers(bytes, static_cast<float>(1U << static_cast<unsigned>(i)))
                                            : std::string(status.message());
      if (!wrong.empty()) return absl::StrCat("matrix ", i, ": ", wrong);
    }
    return "";
  }

 private:
  client::Buffer& matrix(int i) { return buffers_[static_cast<std::size_t>(i) + 1]; }
  static client::TensorView View(const client::Buffer& buffer) {
    return buffer.Tensor(DType::kBf16, {kExtent, kExtent});
  }

  std::vector<client::Buffer> buffers_;  // B, then the matrices
};

// Steps on streams of all priorities in turns, ordered by a timeline alone.
absl::Status OverStreams(client::Session& session, Chain& chain, Row& row) {
  ASSIGN_OR_RETURN(client::Timeline done, session.CreateTimeline());
  std::vector<client::WorkStream> streams;
  for (const auto priority : {v1::STREAM_PRIORITY_LOW, v1::STREAM_PRIORITY_NORMAL, v1::STREAM_PRIORITY_HIGH}) {
    ASSIGN_OR_RETURN(client::WorkStream stream, session.OpenWorkStream(priority));
    streams.push_back(std::move(stream));
  }
  std::vector<std::future<absl::StatusOr<client::GemmResult>>> steps;
  for (int i = 0; i < kSteps; ++i) {
    client::GemmSpec spec = chain.Step(i);
    const auto number = static_cast<std::uint64_t>(i);
    spec.order = {
        .stream = streams[number % streams.size()].id(), .wait = {done.At(number)}, .signal = {done.At(number + 1)}};
    steps.push_back(session.GemmAsync(spec));
    // Calls on the way together may arrive in any order, and in one stream a step must not stand behind a later one.
    if (number % streams.size() == streams.size() - 1) {
      const absl::StatusOr<std::uint64_t> reached = done.Wait(number + 1, 10s);
      CheckOk(row, "a turn of the streams", reached.status());
    }
  }
  for (auto& step : steps) CheckOk(row, "a step over streams", step.get().status());
  const absl::StatusOr<std::uint64_t> value = done.Wait(kSteps, 10s);
  row.Check(value.ok() && *value == kSteps, absl::StrCat("the timeline: ", Text(value.status())));
  CheckRight(row, "over streams", chain.Wrong());
  return absl::OkStatus();
}

absl::Status InOneSubmission(client::Session& session, Chain& chain, Row& row) {
  std::vector<client::GemmSpec> specs;
  for (int i = 0; i < kSteps; ++i) specs.push_back(chain.Step(i));
  ASSIGN_OR_RETURN(const client::WorkStream high, session.OpenWorkStream(v1::STREAM_PRIORITY_HIGH));
  CheckOk(row, "Execute", session.Execute(specs, {.stream = high.id()}).status());
  CheckRight(row, "in one submission", chain.Wrong());
  return absl::OkStatus();
}

absl::Status AnsweredWhenLaunched(client::Session& session, Chain& chain, Row& row) {
  for (int i = 0; i < kSteps; ++i) {
    client::GemmSpec spec = chain.Step(i);
    spec.order.reply_when = v1::REPLY_WHEN_ENQUEUED;
    CheckOk(row, "ENQUEUED", session.Gemm(spec).status());
  }
  CheckOk(row, "Synchronize", session.Synchronize(10s));
  CheckRight(row, "answered when launched", chain.Wrong());
  return absl::OkStatus();
}

// What waits for what never comes is dropped, and what is behind it runs.
absl::Status AWaitThatNeverComes(client::Session& session, Chain& chain, Row& row) {
  ASSIGN_OR_RETURN(client::Timeline never, session.CreateTimeline());
  client::GemmSpec spec = chain.Step(0);
  spec.order = {.wait = {never.At(1)}, .signal = {never.At(2)}, .launch_timeout = 300ms};
  auto waits = session.GemmAsync(spec);
  CheckRefused(row, "a wait that never comes", waits.get().status(), absl::StatusCode::kDeadlineExceeded,
               {"timeout_ms"});
  spec.order = {.wait = {never.At(2)}};
  CheckRefused(row, "behind it", session.Gemm(spec).status(), absl::StatusCode::kAborted, {"timeout_ms"});
  spec.order = {};
  CheckOk(row, "the next", session.Gemm(spec).status());
  return absl::OkStatus();
}

}  // namespace

absl::Status RunOrder(const ClientJob& job, Row& row) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(Chain chain, Chain::Make(connected.session));
  for (const auto part : {&OverStreams, &InOneSubmission, &AnsweredWhenLaunched, &AWaitThatNeverComes}) {
    RETURN_IF_ERROR(chain.Reset());
    RETURN_IF_ERROR(part(connected.session, chain, row));
  }
  return absl::OkStatus();
}

}  // namespace tessera::gpu_test
