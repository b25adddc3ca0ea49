#include "tests/gpu/e2e_handover.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/cuda_memory.h"
#include "client/gemm_stream.h"
#include "common/float_codec.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tests/gpu/e2e_board.h"
#include "tests/gpu/e2e_daemon.h"
#include "tests/gpu/e2e_kernels.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/e2e_product.h"
#include "tests/gpu/handover_kernels.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Future = std::future<absl::StatusOr<client::GemmResult>>;

constexpr std::int64_t kM = 256;
constexpr std::int64_t kN = 384;
constexpr std::int64_t kK = 512;  // a power of two: numbers of up to 8 bits times it are exact in bf16
constexpr std::uint64_t kABytes = kM * kK * kBf16Bytes;
constexpr std::uint64_t kBBytes = kN * kK * kBf16Bytes;
constexpr std::uint64_t kDBytes = kM * kN * kBf16Bytes;

constexpr std::uint64_t kRounds = 50;
constexpr std::uint64_t kEventRounds = 5;
constexpr std::int64_t kCyclesPerMs = 2'000'000;         // of some 2 GHz
constexpr std::uint64_t kEnd = std::uint64_t{1} << 62U;  // beyond all points of a job

constexpr auto kAnswerLimit = 20s;
constexpr auto kGoneLimit = 2s;      // what is promised of a client's end
constexpr auto kGonePatience = 10s;  // what is waited, to tell late from never
constexpr auto kAtWorkLimit = 30s;
constexpr unsigned kWatchdogS = 120;
constexpr int kKills = 3;
constexpr std::uint64_t kNumbers = 100;
// Beside the board that owner and heir of an event share: the request with which the event is imported.
constexpr const char* kRequestFile = ".import";

// Every round another one, so that what is left of the last one is wrong.
float NumberOf(std::uint64_t round) {
  return static_cast<float>(1 + round % kNumbers);
}

absl::Status StatusOf(Future& product) {
  if (product.wait_for(kAnswerLimit) == std::future_status::ready) return product.get().status();
  return absl::DeadlineExceededError(absl::StrCat("no answer in ", kAnswerLimit / 1s, " s"));
}

// Operands in the daemon's memory. With an A of one number, D is that times kK everywhere.
class Matrices {
 public:
  static absl::StatusOr<Matrices> Make(client::Session& session) {
    ASSIGN_OR_RETURN(client::Buffer a, session.AllocateOnDevice(kABytes));
    ASSIGN_OR_RETURN(client::Buffer b, session.AllocateOnDevice(kBBytes));
    ASSIGN_OR_RETURN(client::Buffer d, session.AllocateOnDevice(kDBytes));
    Matrices matrices(std::move(a), std::move(b), std::move(d));
    const std::vector<std::byte> ones = Repeated(1, kBBytes);
    RETURN_IF_ERROR(matrices.b_.Upload(ones.data(), ones.size()));
    RETURN_IF_ERROR(matrices.PoisonD());
    return matrices;
  }

  absl::Status WriteA(float number) {
    const std::vector<std::byte> numbers = Repeated(number, kABytes);
    return a_.Upload(numbers.data(), numbers.size());
  }

  absl::Status PoisonD() {
    const std::vector<std::byte> poison(kDBytes, kPoison);
    return d_.Upload(poison.data(), poison.size());
  }

  // What is wrong with D if A was of `number`, or "".
  std::string WrongD(float number) const {
    std::vector<std::byte> d(kDBytes);
    const absl::Status status = d_.Download(d.data(), d.size());
    return status.ok() ? WrongNumbers(d, number * kK) : Text(status);
  }

  client::GemmSpec Spec() const {
    return {.a = a_.Tensor(DType::kBf16, {kM, kK}),
            .b = b_.Tensor(DType::kBf16, {kN, kK}),
            .d = d_.Tensor(DType::kBf16, {kM, kN}),
            .backend = v1::BACKEND_CUDA};
  }

  std::uint16_t* a() const { return reinterpret_cast<std::uint16_t*>(a_.data()); }
  const std::uint16_t* d() const { return reinterpret_cast<const std::uint16_t*>(d_.data()); }

 private:
  Matrices(client::Buffer a, client::Buffer b, client::Buffer d)
      : a_(std::move(a)), b_(std::move(b)), d_(std::move(d)) {}

  client::Buffer a_;
  client::Buffer b_;
  client::Buffer d_;
};

// What this process does itself, on a stream of its own: kernels that write A late, and that copy D.
class OwnWork {
 public:
  static absl::StatusOr<std::unique_ptr<OwnWork>> Make(const Matrices& matrices, std::uint64_t copies) {
    auto work = std::make_unique<OwnWork>(matrices);
    ASSIGN_OR_RETURN(work->copies_, AllocatePlain(copies * kDBytes));
    RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&work->stream_, cudaStreamNonBlocking), "cudaStreamCreate"));
    // Once before anything waits: a kernel that is loaded at its first launch may wait for all that runs.
    RETURN_IF_ERROR(work->FillA(0, 0));
    for (std::uint64_t i = 0; i < copies; ++i) RETURN_IF_ERROR(work->CopyD(i));  // poison, as it is now
    RETURN_IF_ERROR(work->Wait());
    return work;
  }

  explicit OwnWork(const Matrices& matrices) : matrices_(matrices) {}
  OwnWork(const OwnWork&) = delete;
  OwnWork& operator=(const OwnWork&) = delete;
  ~OwnWork() {
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));  // fails only where the context is lost
  }

  absl::Status FillA(float number, std::int64_t cycles) const {
    return ToStatus(LaunchLateFill(matrices_.a(), kABytes / kBf16Bytes, EncodeBf16(number), cycles, stream_),
                    "launching a kernel that writes A");
  }
  absl::Status CopyD(std::uint64_t index) const {
    return ToStatus(
        LaunchCopy16(reinterpret_cast<std::uint16_t*>(Copy(index)), matrices_.d(), kDBytes / kBf16Bytes, stream_),
        "launching a kernel that copies D");
  }
  absl::Status Wait() const { return ToStatus(cudaStreamSynchronize(stream_), "this process's own kernels"); }

  // What is wrong with a copy if A was of `number`, or "".
  std::string WrongCopy(std::uint64_t index, float number) const {
    std::vector<std::byte> copy(kDBytes);
    const absl::Status status = CopyOut(copy.data(), Copy(index), copy.size());
    return status.ok() ? WrongNumbers(copy, number * kK) : Text(status);
  }

  cudaStream_t stream() const { return stream_; }

 private:
  std::byte* Copy(std::uint64_t index) const { return copies_->data() + index * kDBytes; }

  const Matrices& matrices_;
  std::unique_ptr<DeviceAllocation> copies_;
  cudaStream_t stream_ = nullptr;
};

// Whatever ends a job, nothing of it stays on a stream behind a point that nobody raises any more.
class Unblocker {
 public:
  Unblocker(const OwnWork& work, std::vector<client::SharedTimeline*> timelines)
      : work_(work), timelines_(std::move(timelines)) {}
  Unblocker(const Unblocker&) = delete;
  Unblocker& operator=(const Unblocker&) = delete;
  ~Unblocker() {
    for (client::SharedTimeline* const timeline : timelines_) timeline->Signal(kEnd);
    work_.Wait().IgnoreError();
  }

 private:
  const OwnWork& work_;
  const std::vector<client::SharedTimeline*> timelines_;
};

// An event that other processes may open; it lives as long as this process.
absl::StatusOr<cudaEvent_t> MakeEvent() {
  cudaEvent_t event = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
                           "cudaEventCreateWithFlags"));
  return event;
}

// All rounds are on the way before the first is over: a D that is copied too early shows the number before.
absl::Status HandOver(const ClientJob& job, Row& row, bool gpu_waits) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  client::Session& session = connected.session;
  ASSIGN_OR_RETURN(const Matrices matrices, Matrices::Make(session));
  ASSIGN_OR_RETURN(const auto own, OwnWork::Make(matrices, kRounds));
  ASSIGN_OR_RETURN(client::SharedTimeline ready, session.CreateSharedTimeline());
  ASSIGN_OR_RETURN(client::SharedTimeline done, session.CreateSharedTimeline());
  ASSIGN_OR_RETURN(const std::uint64_t ready_address, ready.DevicePointer());
  ASSIGN_OR_RETURN(const std::uint64_t done_address, done.DevicePointer());
  ASSIGN_OR_RETURN(const client::WorkStream stream, session.OpenWorkStream(v1::STREAM_PRIORITY_NORMAL, gpu_waits));
  client::GemmStream products = session.OpenStream();
  const Unblocker unblocker(*own, {&ready, &done});

  const Clock::time_point begin = Clock::now();
  std::vector<Future> answers;
  client::GemmSpec spec = matrices.Spec();
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    RETURN_IF_ERROR(own->FillA(NumberOf(round), 5 * kCyclesPerMs));
    RETURN_IF_ERROR(ToStatus(StreamWrite(own->stream(), ready_address, round), "cuStreamWriteValue64"));
    spec.order = {.stream = stream.id(), .wait = {ready.At(round)}, .signal = {done.At(round)}};
    answers.push_back(products.Gemm(spec));
    RETURN_IF_ERROR(ToStatus(StreamWait(own->stream(), done_address, round), "cuStreamWaitValue64"));
    RETURN_IF_ERROR(own->CopyD(round - 1));
  }
  row.Check(done.value() < kRounds, "the host was too slow: nothing was on the way");
  for (Future& answer : answers) CheckOk(row, "a product", StatusOf(answer));
  if (row.failed > 0) done.Signal(kRounds);
  RETURN_IF_ERROR(own->Wait());
  row.measured["round_ms"] = SecondsSince(begin) * 1e3 / static_cast<double>(kRounds);
  row.Check(row.measured["round_ms"] > 2, "the kernels were too quick: nothing was tried");
  const std::optional<absl::Status> reached = done.Reached(kRounds);
  CheckOk(row, "the last point", reached.value_or(absl::UnknownError("not reached")));
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    CheckRight(row, absl::StrCat("round ", round), own->WrongCopy(round - 1, NumberOf(round)));
  }
  return products.Finish();
}

absl::Status WaitForEvents(const ClientJob& job, Row& row) {
  constexpr double kLateS = 0.02;  // so that whoever does not wait is before it
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  client::Session& session = connected.session;
  ASSIGN_OR_RETURN(Matrices matrices, Matrices::Make(session));
  ASSIGN_OR_RETURN(const auto own, OwnWork::Make(matrices, 1));
  ASSIGN_OR_RETURN(const cudaEvent_t event, MakeEvent());
  ASSIGN_OR_RETURN(const client::ImportedEvent imported, session.ImportEvent(event));
  client::GemmSpec spec = matrices.Spec();
  spec.order.wait = {imported.Point()};
  for (std::uint64_t round = 1; round <= kEventRounds; ++round) {
    const std::string what = absl::StrCat("round ", round);
    RETURN_IF_ERROR(matrices.PoisonD());
    RETURN_IF_ERROR(own->FillA(NumberOf(round), 50 * kCyclesPerMs));
    RETURN_IF_ERROR(ToStatus(cudaEventRecord(event, own->stream()), "cudaEventRecord"));
    const Clock::time_point begin = Clock::now();
    Future product = session.GemmAsync(spec);
    CheckOk(row, what, StatusOf(product));
    row.Check(SecondsSince(begin) > kLateS, what + ": answered before the kernel was over");
    CheckRight(row, what, matrices.WrongD(NumberOf(round)));
  }
  return own->Wait();
}

// The product is launched, and its event recorded, before the copy is enqueued; it runs only when this process says so.
absl::Status SignalEvents(const ClientJob& job, Row& row) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  client::Session& session = connected.session;
  ASSIGN_OR_RETURN(Matrices matrices, Matrices::Make(session));
  ASSIGN_OR_RETURN(const auto own, OwnWork::Make(matrices, kEventRounds));
  ASSIGN_OR_RETURN(const cudaEvent_t event, MakeEvent());
  ASSIGN_OR_RETURN(const client::ImportedEvent imported, session.ImportEvent(event));
  ASSIGN_OR_RETURN(client::SharedTimeline ready, session.CreateSharedTimeline());
  ASSIGN_OR_RETURN(const client::WorkStream stream,
                   session.OpenWorkStream(v1::STREAM_PRIORITY_NORMAL, /*gpu_waits=*/true));
  const Unblocker unblocker(*own, {&ready});
  client::GemmSpec spec = matrices.Spec();
  for (std::uint64_t round = 1; round <= kEventRounds; ++round) {
    const std::string what = absl::StrCat("round ", round);
    RETURN_IF_ERROR(matrices.WriteA(NumberOf(round)));
    RETURN_IF_ERROR(matrices.PoisonD());
    spec.order = {.stream = stream.id(),
                  .wait = {ready.At(round)},
                  .signal = {imported.Point()},
                  .reply_when = v1::REPLY_WHEN_ENQUEUED};
    Future product = session.GemmAsync(spec);
    CheckOk(row, what, StatusOf(product));
    RETURN_IF_ERROR(ToStatus(cudaStreamWaitEvent(own->stream(), event), "cudaStreamWaitEvent"));
    RETURN_IF_ERROR(own->CopyD(round - 1));
    std::this_thread::sleep_for(5ms);
    row.Check(cudaStreamQuery(own->stream()) == cudaErrorNotReady, what + ": the stream did not wait for the event");
    ready.Signal(round);
    RETURN_IF_ERROR(own->Wait());
    CheckRight(row, what, own->WrongCopy(round - 1, NumberOf(round)));
  }
  return absl::OkStatus();
}

// Products of a session in a stream with gpu_waits, each behind a point that this process raises once it is on its way.
class Beside {
 public:
  static absl::StatusOr<Beside> Make(client::Session& session) {
    ASSIGN_OR_RETURN(Matrices matrices, Matrices::Make(session));
    ASSIGN_OR_RETURN(client::SharedTimeline ready, session.CreateSharedTimeline());
    ASSIGN_OR_RETURN(client::WorkStream stream, session.OpenWorkStream(v1::STREAM_PRIORITY_NORMAL, /*gpu_waits=*/true));
    return Beside(session, std::move(matrices), std::move(ready), std::move(stream));
  }

  // One more; what is wrong, or "".
  std::string Run() {
    ++count_;
    const float number = NumberOf(count_);
    const absl::Status status = Compute(number);
    return status.ok() ? matrices_.WrongD(number) : Text(status);
  }

 private:
  Beside(client::Session& session, Matrices matrices, client::SharedTimeline ready, client::WorkStream stream)
      : session_(&session), matrices_(std::move(matrices)), ready_(std::move(ready)), stream_(std::move(stream)) {}

  absl::Status Compute(float number) {
    RETURN_IF_ERROR(matrices_.WriteA(number));
    RETURN_IF_ERROR(matrices_.PoisonD());
    client::GemmSpec spec = matrices_.Spec();
    spec.order = {.stream = stream_.id(), .wait = {ready_.At(count_)}};
    Future product = session_->GemmAsync(spec);
    ready_.Signal(count_);
    return StatusOf(product);
  }

  client::Session* session_;
  Matrices matrices_;
  client::SharedTimeline ready_;
  client::WorkStream stream_;
  std::uint64_t count_ = 0;
};

// A product in a stream with gpu_waits whose wait nobody ends.
struct StuckProduct {
  Matrices matrices;
  client::SharedTimeline never;
  client::WorkStream stream;

  static absl::StatusOr<StuckProduct> Make(client::Session& session) {
    ASSIGN_OR_RETURN(Matrices matrices, Matrices::Make(session));
    ASSIGN_OR_RETURN(client::SharedTimeline never, session.CreateSharedTimeline());
    ASSIGN_OR_RETURN(client::WorkStream stream, session.OpenWorkStream(v1::STREAM_PRIORITY_NORMAL, /*gpu_waits=*/true));
    return StuckProduct{.matrices = std::move(matrices), .never = std::move(never), .stream = std::move(stream)};
  }

  client::GemmSpec Spec() const {
    client::GemmSpec spec = matrices.Spec();
    spec.order = {.stream = stream.id(), .wait = {never.At(1)}};
    return spec;
  }
};

std::optional<v1::SessionInfo> Find(const client::Client& daemon, const std::string& label) {
  const absl::StatusOr<v1::ListSessionsReply> list = daemon.ListSessions();
  if (!list.ok()) return std::nullopt;
  for (const v1::SessionInfo& session : list->sessions()) {
    if (session.label() == label) return session;
  }
  return std::nullopt;
}

bool IsGone(const client::Client& daemon, const std::string& label) {
  const absl::StatusOr<v1::ListSessionsReply> list = daemon.ListSessions();
  return list.ok() && std::none_of(list->sessions().begin(), list->sessions().end(),
                                   [&](const v1::SessionInfo& session) { return session.label() == label; });
}

void CheckNewSession(client::Client& client, Row& row) {
  absl::StatusOr<client::Session> session = client.OpenSession("after the stuck one");
  CheckOk(row, "a new session", session.status());
  if (!session.ok()) return;
  absl::StatusOr<Beside> products = Beside::Make(*session);
  CheckRight(row, "a product of a new session", products.ok() ? products->Run() : Text(products.status()));
}

absl::Status GetStuck(const ClientJob& job, Row& row) {
  constexpr double kAnsweredS = 3;
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(Beside beside, Beside::Make(connected.session));
  CheckRight(row, "before it", beside.Run());
  ASSIGN_OR_RETURN(client::Session session, connected.client.OpenSession("stuck"));
  ASSIGN_OR_RETURN(const StuckProduct stuck, StuckProduct::Make(session));
  client::GemmSpec spec = stuck.Spec();
  spec.order.launch_timeout = 500ms;

  const Clock::time_point begin = Clock::now();
  Future product = session.GemmAsync(spec);
  double products_beside = 0;
  std::string wrong;
  while (wrong.empty() && product.wait_for(0ms) != std::future_status::ready && Clock::now() - begin < kAnswerLimit) {
    wrong = beside.Run();
    ++products_beside;
  }
  CheckRight(row, "beside it", wrong);
  const absl::Status answer = StatusOf(product);
  const double seconds = SecondsSince(begin);
  row.measured["answered_ms"] = seconds * 1e3;
  row.measured["products_beside"] = products_beside;
  row.Check(seconds < kAnsweredS, absl::StrCat("answered only after ", seconds, " s"));
  CheckRefused(row, "a stuck wait", answer, absl::StatusCode::kDeadlineExceeded, {"session"});

  const bool gone = Soon([&] {
    const std::optional<v1::SessionInfo> info = Find(connected.client, "stuck");
    return info.has_value() ? info->end_reason() == "stuck_wait" : IsGone(connected.client, "stuck");
  });
  row.Check(gone, "the session of a stuck wait did not end for that");
  CheckRefused(row, "a call of that session", session.Allocate(1).status(), absl::StatusCode::kNotFound, {});
  const std::optional<absl::Status> reached = stuck.never.Reached(1);
  row.Check(reached.has_value() && !reached->ok(), "the point that never came shows no error");
  CheckRight(row, "after it", beside.Run());
  CheckNewSession(connected.client, row);
  CheckOk(row, "the daemon", connected.client.ServerInfo().status());
  return absl::OkStatus();
}

// Longer than any watchdog lets a process live.
void Forever() {
  std::this_thread::sleep_for(1h);
}

absl::Status ComputeBeside(const ClientJob& job, Board& board) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(Beside beside, Beside::Make(connected.session));
  while (board->asked != Board::kStop) {
    const std::string wrong = beside.Run();
    if (!wrong.empty()) {
      ++board->wrong;
      std::fprintf(stderr, "%s\n", wrong.c_str());
    }
    ++board->count;
    board->reached = 1;
  }
  return absl::OkStatus();
}

absl::Status WaitOnGpu(const ClientJob& job, Board& board) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(const StuckProduct stuck, StuckProduct::Make(connected.session));
  client::GemmSpec spec = stuck.Spec();
  spec.order.reply_when = v1::REPLY_WHEN_ENQUEUED;
  RETURN_IF_ERROR(connected.session.Gemm(spec).status());
  board->reached = 1;
  Forever();
  return absl::OkStatus();
}

absl::Status OwnAnEvent(const ClientJob& job, Board& board) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(const Matrices matrices, Matrices::Make(connected.session));
  ASSIGN_OR_RETURN(const auto own, OwnWork::Make(matrices, 1));
  ASSIGN_OR_RETURN(const cudaEvent_t event, MakeEvent());
  ASSIGN_OR_RETURN(const client::ImportedEvent imported, connected.session.ImportEvent(event));
  RETURN_IF_ERROR(client::CudaDriver::Get().status());
  ASSIGN_OR_RETURN(const client::ExportedEvent exported, client::ExportEvent(*client::CudaDriver::Get(), event));
  v1::ImportEventRequest request;
  request.set_handle(exported.handle);
  request.set_device_uuid(exported.device_uuid);
  request.set_exporter_pid(::getpid());
  std::ofstream file(job.board + kRequestFile, std::ios::binary);
  if (!request.SerializeToOstream(&file)) return absl::InternalError("the request for the heir cannot be written");
  file.close();

  RETURN_IF_ERROR(own->FillA(1, 3000 * kCyclesPerMs));
  RETURN_IF_ERROR(ToStatus(cudaEventRecord(event, own->stream()), "cudaEventRecord"));
  client::GemmSpec spec = matrices.Spec();
  spec.order.wait = {imported.Point()};
  const Future product = connected.session.GemmAsync(spec);
  board->reached = 1;
  Forever();
  return absl::OkStatus();
}

// Steps on the board: 1 ready, 2 the product is on its way, 3 it is answered, with the code in `wrong`.
absl::Status InheritEvent(const ClientJob& job, Board& board) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(const Matrices matrices, Matrices::Make(connected.session));
  board->count = 1;
  while (board->reached == 0) std::this_thread::sleep_for(1ms);
  v1::ImportEventRequest request;
  std::ifstream file(job.board + kRequestFile, std::ios::binary);
  if (!request.ParseFromIstream(&file)) return absl::InternalError("the owner's request cannot be read");
  const auto memory = v1::Memory::NewStub(connected.client.channel());
  grpc::ClientContext context;
  context.AddMetadata("tessera-session-bin", connected.session.token());
  v1::ImportEventReply reply;
  if (const grpc::Status status = memory->ImportEvent(&context, request, &reply); !status.ok()) {
    return absl::InternalError(absl::StrCat("ImportEvent: ", status.error_message()));
  }
  client::GemmSpec spec = matrices.Spec();
  spec.order.wait = {{.id = reply.event_id()}};
  Future product = connected.session.GemmAsync(spec);
  board->count = 2;
  board->wrong = static_cast<std::uint64_t>(product.get().status().code());
  board->count = 3;
  Forever();
  return absl::OkStatus();
}

using Job = std::function<absl::Status(const ClientJob& job, Row& row)>;
using Companion = absl::Status (*)(const ClientJob& job, Board& board);

const std::map<std::string, Job, std::less<>>& Jobs() {
  static const std::map<std::string, Job, std::less<>> jobs = {
      {"handover", [](const ClientJob& job, Row& row) { return HandOver(job, row, /*gpu_waits=*/true); }},
      {"handover_host", [](const ClientJob& job, Row& row) { return HandOver(job, row, /*gpu_waits=*/false); }},
      {"event_wait", WaitForEvents},
      {"event_signal", SignalEvents},
      {"stuck_wait", GetStuck},
  };
  return jobs;
}

const std::map<std::string, Companion, std::less<>>& Companions() {
  static const std::map<std::string, Companion, std::less<>> companions = {
      {"handover-beside", ComputeBeside},
      {"handover-waits", WaitOnGpu},
      {"handover-event", OwnAnEvent},
      {"handover-heir", InheritEvent},
  };
  return companions;
}

absl::Status RunJob(const ClientJob& job) {
  if (const auto companion = Companions().find(job.job); companion != Companions().end()) {
    ::alarm(kWatchdogS);
    ASSIGN_OR_RETURN(Board board, Board::Open(job.board));
    return companion->second(job, board);
  }
  Row row{.environment = {}, .route = job.job};
  const absl::Status status = Jobs().at(job.job)(job, row);
  if (!status.ok()) row.Check(false, Text(status));
  std::ofstream file(job.result);
  file << nlohmann::ordered_json(std::vector<Row>{row}).dump() << "\n";
  file.close();
  return file.fail() ? absl::InternalError("cannot write " + job.result) : absl::OkStatus();
}

// The starter's side: a client, and the board that tells how far it is.
struct Started {
  Board board;
  Process process;

  static absl::StatusOr<Started> Start(const LifetimeStage& stage, const std::string& job) {
    const std::string path = stage.new_path(job);
    ASSIGN_OR_RETURN(Board board, Board::Make(path));
    ASSIGN_OR_RETURN(Process process, stage.start(job, path));
    Started started{.board = std::move(board), .process = std::move(process)};
    RETURN_IF_ERROR(Await(stage, job, started.process, [&] { return started.board->reached > 0; }));
    return started;
  }

  static absl::Status Await(const LifetimeStage& stage, const std::string& job, Process& process,
                            const std::function<bool()>& at_work) {
    Eventually(stage.within(kAtWorkLimit), [&] { return at_work() || !process.running(); });
    if (at_work() && process.running()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(job, " did not get to work: ", process.LogTail()));
  }
};

// Milliseconds from the kill until the daemon has no session of the client's any more.
double KillAndAwait(const LifetimeStage& stage, Process& process, const std::string& label, Row& row) {
  row.Check(process.running(), absl::StrCat(label, " ended by itself: ", process.LogTail()));
  const Clock::time_point killed = Clock::now();
  process.Kill();
  const bool gone = Eventually(stage.within(kGonePatience), [&] { return IsGone(*stage.daemon, label); });
  const double ms = SecondsSince(killed) * 1e3;
  const bool in_time = ms <= std::chrono::duration<double, std::milli>(kGoneLimit).count();
  row.Check(gone && in_time, absl::StrCat(label, gone ? ": gone only after " : ": not gone after ", ms, " ms"));
  return ms;
}

void CheckNoSessions(const LifetimeStage& stage, Row& row) {
  std::string left = "no answer";
  const bool none = Eventually(stage.within(kGonePatience), [&] {
    const absl::StatusOr<v1::ServerInfoReply> info = stage.daemon->ServerInfo();
    if (!info.ok()) return false;
    left = absl::StrCat(info->sessions(), " sessions, ", info->sessions_ending(), " ending, ", info->quarantined(),
                        " stuck, ", info->in_flight(), " products under way");
    return info->sessions() == 0 && info->sessions_ending() == 0 && info->quarantined() == 0 && info->in_flight() == 0;
  });
  row.Check(none, absl::StrCat("the daemon is not empty in the end: ", left));
}

absl::Status KillInWait(const LifetimeStage& stage, Row& row) {
  ASSIGN_OR_RETURN(Started beside, Started::Start(stage, "handover-beside"));
  for (int i = 0; i < kKills; ++i) {
    ASSIGN_OR_RETURN(Started victim, Started::Start(stage, "handover-waits"));
    const std::optional<v1::SessionInfo> info = Find(*stage.daemon, "handover-waits");
    row.Check(info.has_value() && info->in_flight() == 1 && info->gated() == 0, "the product does not wait on the GPU");
    const double ms = KillAndAwait(stage, victim.process, "handover-waits", row);
    row.measured["killed_to_no_session_ms_max"] = std::max(row.measured["killed_to_no_session_ms_max"], ms);
    const std::uint64_t products = beside.board->count;
    const bool goes_on = Eventually(stage.within(5s), [&] {
      // The one that was under way and another.
      return beside.board->count >= products + 2 || !beside.process.running();
    });
    row.Check(goes_on && beside.process.running() && beside.board->wrong == 0,
              absl::StrCat("the client beside it: ", beside.board->wrong.load(), " wrong results of ",
                           beside.board->count.load(), ", ", beside.process.LogTail()));
  }
  row.measured["products_beside"] = static_cast<double>(beside.board->count.load());
  beside.board->asked = Board::kStop;
  row.Check(beside.process.Wait(stage.within(20s)) == 0,
            absl::StrCat("the client beside them did not end well: ", beside.process.LogTail()));
  CheckNoSessions(stage, row);
  return absl::OkStatus();
}

void TellOfHeir(const LifetimeStage& stage, Board& board, Clock::time_point killed, Process& heir, Row& row) {
  if (board->count < 2) return row.Remark("another session cannot have the event: " + heir.LogTail());
  const bool over = Eventually(stage.within(kGonePatience), [&] { return board->count == 3 || !heir.running(); });
  const double ms = SecondsSince(killed) * 1e3;
  if (!over || board->count < 3) {
    return row.Remark(absl::StrCat("another session's product still waits for the event ", ms, " ms after the kill"));
  }
  row.measured["event_over_ms"] = ms;
  row.Remark(absl::StrCat("another session's product was answered with code ", board->wrong.load(), ", ", ms,
                          " ms after the kill"));
}

absl::Status KillOwnerOfEvent(const LifetimeStage& stage, Row& row) {
  const std::string path = stage.new_path("handover-event");
  ASSIGN_OR_RETURN(Board board, Board::Make(path));
  // First, since it takes longer to start than the owner's kernel lasts.
  ASSIGN_OR_RETURN(Process heir, stage.start("handover-heir", path));
  RETURN_IF_ERROR(Started::Await(stage, "handover-heir", heir, [&] { return board->count > 0; }));
  ASSIGN_OR_RETURN(Process owner, stage.start("handover-event", path));
  RETURN_IF_ERROR(Started::Await(stage, "handover-event", owner, [&] { return board->reached > 0; }));
  const auto held_back = [&](const std::string& label) {
    const std::optional<v1::SessionInfo> info = Find(*stage.daemon, label);
    return info.has_value() && info->gated() == 1;
  };
  row.Check(Eventually(stage.within(1s), [&] { return held_back("handover-event"); }), "the product is not held back");
  Eventually(stage.within(1s), [&] { return held_back("handover-heir") || !heir.running(); });
  const Clock::time_point killed = Clock::now();
  row.measured["killed_to_no_session_ms"] = KillAndAwait(stage, owner, "handover-event", row);
  TellOfHeir(stage, board, killed, heir, row);
  heir.Kill();
  CheckNoSessions(stage, row);
  return absl::OkStatus();
}

Row RowOf(const std::string& route, const LifetimeStage& stage,
          absl::Status (*run)(const LifetimeStage& stage, Row& row)) {
  Row row{.environment = {}, .route = route};
  const absl::Status status = run(stage, row);
  if (!status.ok()) row.Check(false, MessageOf(status));
  return row;
}

}  // namespace

bool IsHandoverJob(std::string_view job) {
  return Jobs().contains(job) || Companions().contains(job);
}

int RunHandoverJob(const ClientJob& job) {
  const absl::Status status = RunJob(job);
  if (status.ok()) return EXIT_SUCCESS;
  std::fprintf(stderr, "%s\n", MessageOf(status).c_str());
  return EXIT_FAILURE;
}

Row RunKilledInWait(const LifetimeStage& stage) {
  return RowOf("killed_in_wait", stage, KillInWait);
}

Row RunEventOfTheDead(const LifetimeStage& stage) {
  return RowOf("event_of_the_dead", stage, KillOwnerOfEvent);
}

}  // namespace tessera::gpu_test
