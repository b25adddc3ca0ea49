// A kernel of the client's that writes A, the product of bench_launch.cc, and a kernel of the client's that reads D,
// over and over: on one stream of one process, and with the product in the daemon, which waits for one shared timeline
// on the GPU and signals another. Every D is checked by the sum of all.
#include "tests/gpu/bench_handover.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/gemm_stream.h"
#include "common/float_codec.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "kernels/launch/gemm_addressable.h"
#include "kernels/launch/gemm_launch.h"
#include "planner/gemm_planner.h"
#include "server/exec/devices.h"
#include "server/telemetry/log.h"
#include "tests/gpu/bench_gemm.h"
#include "tests/gpu/bench_samples.h"
#include "tests/gpu/handover_kernels.h"
#include "tests/oracle/test_data.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Future = std::future<absl::StatusOr<client::GemmResult>>;

constexpr std::int64_t kM = 16;
constexpr std::int64_t kN = 4096;
constexpr std::int64_t kK = 4096;
constexpr std::uint64_t kElementBytes = 2;
constexpr std::int64_t kWorkspaceBytesMax = std::int64_t{256} << 20;

constexpr int kRounds = 5;
constexpr std::uint32_t kTurns = 1000;  // in a round
constexpr std::size_t kDepth = 16;
constexpr std::uint64_t kEnd = std::uint64_t{1} << 62U;  // beyond all points

absl::StatusOr<planner::DeviceFacts> CudaFacts() {
  ASSIGN_OR_RETURN(const server::OpenedDevices opened,
                   server::OpenDevices(
                       {.cpu_threads = 1, .cuda_device = "0", .workspace_bytes_max = kWorkspaceBytesMax, .lost = {}}));
  for (const auto& device : opened.devices) {
    for (const planner::DeviceFacts& facts : device->facts()) {
      if (facts.backend == kernels::Backend::kCuda) return facts;
    }
  }
  return absl::UnavailableError("no device serves backend cuda");
}

// 1 or -1: what is computed of them and of RowNumber is exact, but for the rounding of D.
std::vector<std::int8_t> Signs() {
  oracle::Random random(1);
  std::vector<std::int8_t> signs(kN * kK);
  for (std::int8_t& sign : signs) sign = random.Int(0, 1) == 0 ? -1 : 1;
  return signs;
}

// The operands, in the daemon's memory, and what this process does with them on a stream of its own.
class Work {
 public:
  static absl::StatusOr<std::unique_ptr<Work>> Make(client::Session& session) {
    ASSIGN_OR_RETURN(const planner::DeviceFacts facts, CudaFacts());
    std::unique_ptr<Work> work(new Work);
    ASSIGN_OR_RETURN(work->a_, AllocateOnDevice(session, kM * kK));
    ASSIGN_OR_RETURN(work->b_, AllocateOnDevice(session, kN * kK));
    ASSIGN_OR_RETURN(work->d_, AllocateOnDevice(session, kM * kN));
    ASSIGN_OR_RETURN(work->sums_, AllocatePlain(kM * kN * sizeof(float)));
    RETURN_IF_ERROR(work->WriteB());
    work->params_.m = kM;
    work->params_.n = kN;
    work->params_.k = kK;
    work->params_.a = {.data = work->a_->data(), .row_stride = kK, .col_stride = 1};
    work->params_.b = {.data = work->b_->data(), .row_stride = kK, .col_stride = 1};
    work->params_.d = {.data = work->d_->data(), .row_stride = kN, .col_stride = 1};
    planner::GemmProblem problem{
        .gemm_class = {.a = DType::kBf16, .b = DType::kBf16, .out = DType::kBf16}, .m = kM, .n = kN, .k = kK};
    problem.addressable = kernels::AddressableBy(problem.gemm_class, work->params_);
    ASSIGN_OR_RETURN(work->plan_, planner::GemmPlanner(kernels::GemmVariants()).Decide(problem, facts));
    ASSIGN_OR_RETURN(BenchStream stream, BenchStream::Make(static_cast<std::size_t>(work->plan_.workspace_bytes)));
    work->stream_ = std::make_unique<BenchStream>(std::move(stream));
    return work;
  }

  // What a turn is made of, each enqueued only.
  absl::Status WriteA() {
    return ToStatus(LaunchFillRows(Elements(*a_), kM, kK, turns_++, stream()), "launching a kernel that writes A");
  }
  absl::Status Product() {
    return ToStatus(static_cast<cudaError_t>(
                        kernels::LaunchGemm(plan_.variant, params_, {.split = plan_.split, .raster = plan_.raster},
                                            {.stream = stream(), .workspace = stream_->workspace()})),
                    "LaunchGemm");
  }
  absl::Status AddD() {
    return ToStatus(LaunchAddTo(reinterpret_cast<float*>(sums_->data()), Elements(*d_), kM * kN, stream()),
                    "launching a kernel that reads D");
  }

  // Around the turns of a round.
  absl::Status Begin() {
    turns_ = 0;
    RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(sums_->data(), 0, sums_->bytes(), stream()), "cudaMemsetAsync"));
    return Wait();
  }
  absl::Status Wait() const { return stream_->Wait(); }

  // Of the D of each turn since Begin.
  absl::Status Check() const {
    std::vector<float> sums(kM * kN);
    RETURN_IF_ERROR(CopyOut(sums.data(), sums_->data(), sums.size() * sizeof(float)));
    std::int64_t wrong = 0;
    for (std::uint32_t row = 0; row < kM; ++row) {
      for (std::int64_t column = 0; column < kN; ++column) {
        if (sums[static_cast<std::size_t>(row * kN + column)] != Expected(row, column)) ++wrong;
      }
    }
    if (wrong == 0) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(wrong, " of ", sums.size(), " sums are wrong after ", turns_, " turns"));
  }

  client::GemmSpec Spec() const {
    return {.a = a_->Tensor(DType::kBf16, {kM, kK}),
            .b = b_->Tensor(DType::kBf16, {kN, kK}),
            .d = d_->Tensor(DType::kBf16, {kM, kN}),
            .backend = v1::BACKEND_CUDA};
  }

  std::string_view variant() const { return kernels::GemmVariants()[plan_.variant].info.id; }
  cudaStream_t stream() const { return stream_->get(); }

 private:
  using OwnedBuffer = std::unique_ptr<client::Buffer>;

  Work() = default;

  static absl::StatusOr<OwnedBuffer> AllocateOnDevice(client::Session& session, std::uint64_t elements) {
    ASSIGN_OR_RETURN(client::Buffer buffer, session.AllocateOnDevice(elements * kElementBytes));
    return std::make_unique<client::Buffer>(std::move(buffer));
  }
  static std::uint16_t* Elements(const client::Buffer& buffer) {
    return reinterpret_cast<std::uint16_t*>(buffer.data());
  }

  absl::Status WriteB() {
    const std::vector<std::int8_t> signs = Signs();
    std::vector<std::uint16_t> codes;
    codes.reserve(signs.size());
    for (const std::int8_t sign : signs) codes.push_back(EncodeBf16(static_cast<float>(sign)));
    row_sums_.assign(kN, 0);
    for (std::size_t i = 0; i < signs.size(); ++i) row_sums_[i / kK] += static_cast<float>(signs[i]);
    return b_->Upload(codes.data(), codes.size() * kElementBytes);
  }

  float Expected(std::uint32_t row, std::int64_t column) const {
    float sum = 0;
    for (std::uint32_t first = 0; first < kRowNumbers; ++first) {
      const std::uint32_t times =
          (turns_ + kRowNumbers - 1 - first) / kRowNumbers;  // turns like the one of this number
      const float exact = static_cast<float>(RowNumber(first, row)) * row_sums_[static_cast<std::size_t>(column)];
      sum += static_cast<float>(times) * DecodeBf16(EncodeBf16(exact));
    }
    return sum;
  }

  OwnedBuffer a_;
  OwnedBuffer b_;
  OwnedBuffer d_;
  std::unique_ptr<DeviceAllocation> sums_;  // [kM, kN] in fp32
  std::unique_ptr<BenchStream> stream_;
  kernels::GemmParams params_;
  planner::Plan plan_;
  std::vector<float> row_sums_;  // of B's rows
  std::uint32_t turns_ = 0;      // since Begin
};

// Turns whose product the daemon computes.
class Relay {
 public:
  static absl::StatusOr<std::unique_ptr<Relay>> Make(client::Session& session, Work& work) {
    ASSIGN_OR_RETURN(client::SharedTimeline ready, session.CreateSharedTimeline());
    ASSIGN_OR_RETURN(client::SharedTimeline done, session.CreateSharedTimeline());
    ASSIGN_OR_RETURN(client::WorkStream stream, session.OpenWorkStream(v1::STREAM_PRIORITY_NORMAL, /*gpu_waits=*/true));
    std::unique_ptr<Relay> relay(new Relay(session, work, std::move(ready), std::move(done), std::move(stream)));
    ASSIGN_OR_RETURN(relay->ready_address_, relay->ready_.DevicePointer());
    ASSIGN_OR_RETURN(relay->done_address_, relay->done_.DevicePointer());
    return relay;
  }

  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  // Whatever has failed, nothing stays enqueued behind a point that nobody raises any more.
  ~Relay() {
    ready_.Signal(kEnd);
    done_.Signal(kEnd);
    work_.Wait().IgnoreError();
  }

  // With at most kDepth products that are not answered, i.e. not over.
  absl::Status PipelinedTurn() {
    spec_.order.reply_when = v1::REPLY_WHEN_COMPLETED;
    return Turn([this]() -> absl::Status {
      if (unanswered_.size() == kDepth) RETURN_IF_ERROR(TakeAnswer());
      unanswered_.push_back(products_.Gemm(spec_));
      return absl::OkStatus();
    });
  }
  absl::Status AwaitAnswers() {
    while (!unanswered_.empty()) RETURN_IF_ERROR(TakeAnswer());
    return absl::OkStatus();
  }

  // The answer tells of the launch: the next turn's is held up by no GPU.
  absl::Status UnaryTurn() {
    spec_.order.reply_when = v1::REPLY_WHEN_ENQUEUED;
    return Turn([this] { return Judge(session_.Gemm(spec_)); });
  }

 private:
  Relay(client::Session& session, Work& work, client::SharedTimeline ready, client::SharedTimeline done,
        client::WorkStream stream)
      : session_(session),
        work_(work),
        ready_(std::move(ready)),
        done_(std::move(done)),
        stream_(std::move(stream)),
        products_(session.OpenStream()),
        spec_(work.Spec()) {
    spec_.order.stream = stream_.id();
    spec_.order.wait = {ready_.At(0)};
    spec_.order.signal = {done_.At(0)};
  }

  template <typename Submit>
  absl::Status Turn(const Submit& submit) {
    ++point_;
    spec_.order.wait.front().value = point_;
    spec_.order.signal.front().value = point_;
    RETURN_IF_ERROR(work_.WriteA());
    RETURN_IF_ERROR(ToStatus(StreamWrite(work_.stream(), ready_address_, point_), "cuStreamWriteValue64"));
    RETURN_IF_ERROR(submit());
    RETURN_IF_ERROR(ToStatus(StreamWait(work_.stream(), done_address_, point_), "cuStreamWaitValue64"));
    return work_.AddD();
  }

  absl::Status TakeAnswer() {
    Future first = std::move(unanswered_.front());
    unanswered_.pop_front();
    return Judge(first.get());
  }

  absl::Status Judge(const absl::StatusOr<client::GemmResult>& result) const {
    RETURN_IF_ERROR(result.status());
    if (result->report.variant() == work_.variant()) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("the daemon took ", result->report.variant(), " and this process ", Av(work_.variant())));
  }

  client::Session& session_;
  Work& work_;
  client::SharedTimeline ready_;
  client::SharedTimeline done_;
  client::WorkStream stream_;
  client::GemmStream products_;
  client::GemmSpec spec_;
  std::uint64_t ready_address_ = 0;
  std::uint64_t done_address_ = 0;
  std::uint64_t point_ = 0;
  std::deque<Future> unanswered_;
};

// Microseconds a turn, of `turns` from the first kernel's launch to the last one's end.
absl::StatusOr<double> TimeTurns(Work& work, std::uint32_t turns, const std::function<absl::Status()>& turn,
                                 const std::function<absl::Status()>& await) {
  RETURN_IF_ERROR(work.Begin());
  const Clock::time_point start = Clock::now();
  for (std::uint32_t i = 0; i < turns; ++i) RETURN_IF_ERROR(turn());
  RETURN_IF_ERROR(await());
  RETURN_IF_ERROR(work.Wait());
  const std::chrono::duration<double, std::micro> time = Clock::now() - start;
  RETURN_IF_ERROR(work.Check());
  return time.count() / turns;
}

struct Way {
  std::string name;
  std::function<absl::Status()> turn;
  std::function<absl::Status()> await;
  std::size_t depth = 0;  // products that are sent and not answered
  std::string reply_when;
  Samples samples = {};
};

absl::Status MeasureRound(Work& work, std::vector<Way>& ways, std::uint32_t turns, bool counts) {
  for (Way& way : ways) {
    const absl::StatusOr<double> us = TimeTurns(work, turns, way.turn, way.await);
    if (!us.ok()) return InField(way.name, us.status());
    if (counts) way.samples.Add(*us);
  }
  return absl::OkStatus();
}

nlohmann::ordered_json LineOf(const Way& way, const Way& in_process) {
  const double daemon_us = way.samples.Median();
  const double in_process_us = in_process.samples.Median();
  return {{"case", way.name},
          {"in_process_us", in_process_us},
          {"daemon_us", daemon_us},
          {"extra_us", daemon_us - in_process_us},
          {"depth", way.depth},
          {"reply_when", way.reply_when},
          {"iterations", kRounds * kTurns}};
}

}  // namespace

absl::Status BenchHandover(const std::string& socket, const std::string& lines) {
  RETURN_IF_ERROR(server::InitLogging("warn", "text"));
  ASSIGN_OR_RETURN(client::Client client,
                   client::Client::Connect({.socket = socket, .side_channel = {}, .timeout = 20s}));
  ASSIGN_OR_RETURN(client::Session session, client.OpenSession("bench handover"));
  ASSIGN_OR_RETURN(const std::unique_ptr<Work> work, Work::Make(session));
  const auto in_process_turn = [&]() -> absl::Status {
    RETURN_IF_ERROR(work->WriteA());
    RETURN_IF_ERROR(work->Product());
    return work->AddD();
  };
  const auto nothing = [] { return absl::OkStatus(); };
  // Kernels are loaded before anything waits on the GPU.
  RETURN_IF_ERROR(TimeTurns(*work, 1, in_process_turn, nothing).status());

  ASSIGN_OR_RETURN(const std::unique_ptr<Relay> relay, Relay::Make(session, *work));
  std::vector<Way> ways = {
      {.name = "in_process", .turn = in_process_turn, .await = nothing, .reply_when = {}},
      {.name = "handover_pipelined",
       .turn = [&] { return relay->PipelinedTurn(); },
       .await = [&] { return relay->AwaitAnswers(); },
       .depth = kDepth,
       .reply_when = "COMPLETED"},
      {.name = "handover_unary",
       .turn = [&] { return relay->UnaryTurn(); },
       .await = nothing,
       .depth = 1,
       .reply_when = "ENQUEUED"},
  };
  RETURN_IF_ERROR(MeasureRound(*work, ways, kWarmUpCalls, /*counts=*/false));
  for (int round = 0; round < kRounds; ++round) {
    RETURN_IF_ERROR(MeasureRound(*work, ways, kTurns, /*counts=*/true));
  }
  LineFile file(lines);
  for (const Way& way : ways) {
    if (&way != &ways.front()) file.Add(LineOf(way, ways.front()));
  }
  return absl::OkStatus();
}

}  // namespace tessera::gpu_test
