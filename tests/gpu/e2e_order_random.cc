#include "tests/gpu/e2e_order_random.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/gemm_stream.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_product.h"
#include "tests/gpu/e2e_report.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr int kSteps = 400;
constexpr int kWritten = 8;  // matrices that are written again and again
constexpr int kInputs = 4;   // matrices that are only read: products of products alone would soon all be the same
constexpr int kMatrices = kWritten + kInputs;
// Between two times that all is waited for and compared: of operations, far fewer than queue_per_session_max.
constexpr int kRoundMin = 35;
constexpr int kRoundMax = 85;
// What the daemon launches at once in an idle stream; it keeps back what comes on top until the first are done.
constexpr int kLaunchedMax = 16;
constexpr std::int64_t kWaitsAcrossMin = 100;
constexpr auto kPatience = 20s;
constexpr std::uint64_t kEnd = std::uint64_t{1} << 62U;  // beyond all points

// The session's own stream is the first.
struct StreamKind {
  v1::StreamPriority priority = v1::STREAM_PRIORITY_NORMAL;
  bool gpu_waits = false;
  bool shared = false;  // has a timeline in shared memory, besides the one that all have
};
constexpr std::array<StreamKind, 5> kStreams = {{
    {},
    {.gpu_waits = true, .shared = true},
    {.priority = v1::STREAM_PRIORITY_HIGH, .gpu_waits = true, .shared = true},
    {.priority = v1::STREAM_PRIORITY_LOW, .shared = true},
    {},
}};
constexpr int kNumStreams = static_cast<int>(kStreams.size());
constexpr std::array<int, 2> kGpuWaitStreams = {1, 2};

const StreamKind& KindOf(int stream) {
  return kStreams[static_cast<std::size_t>(stream)];
}

// A square matrix with one element in each row and column, 1 or -1, as products of such matrices have: bf16 has all of
// them exactly.
class SignedPermutation {
 public:
  static SignedPermutation Random(int extent, std::mt19937_64& random) {
    SignedPermutation made(static_cast<std::size_t>(extent));
    std::iota(made.columns_.begin(), made.columns_.end(), std::size_t{0});
    std::shuffle(made.columns_.begin(), made.columns_.end(), random);
    for (int& sign : made.signs_) sign = random() % 2 == 0 ? 1 : -1;
    return made;
  }

  // A B^T of this A.
  SignedPermutation TimesTransposed(const SignedPermutation& b) const {
    std::vector<std::size_t> row_of_b(extent());
    for (std::size_t row = 0; row < extent(); ++row) row_of_b[b.columns_[row]] = row;
    SignedPermutation d(extent());
    for (std::size_t row = 0; row < extent(); ++row) {
      d.columns_[row] = row_of_b[columns_[row]];
      d.signs_[row] = signs_[row] * b.signs_[d.columns_[row]];
    }
    return d;
  }

  std::vector<std::uint16_t> Elements() const {
    std::vector<std::uint16_t> elements(extent() * extent(), 0);
    for (std::size_t row = 0; row < extent(); ++row) {
      elements[row * extent() + columns_[row]] = signs_[row] > 0 ? kOne : kMinusOne;
    }
    return elements;
  }

  // How many elements are others, and the first of them; "" if none.
  std::string Wrong(std::span<const std::uint16_t> elements) const {
    const std::vector<std::uint16_t> wanted = Elements();
    std::size_t wrong = 0;
    std::size_t first = 0;
    for (std::size_t at = wanted.size(); at-- > 0;) {
      if (elements[at] == wanted[at] || (wanted[at] == 0 && elements[at] == kMinusZero)) continue;
      first = at;
      ++wrong;
    }
    if (wrong == 0) return "";
    return absl::StrCat(wrong, " elements are wrong, the first: row ", first / extent(), ", column ", first % extent());
  }

 private:
  static constexpr std::uint16_t kOne = 0x3f80, kMinusOne = 0xbf80, kMinusZero = 0x8000;

  explicit SignedPermutation(std::size_t extent) : columns_(extent), signs_(extent) {}
  std::size_t extent() const { return columns_.size(); }

  std::vector<std::size_t> columns_;  // of each row's element
  std::vector<int> signs_;
};

struct Product {
  int a = 0;
  int b = 0;
  int d = 0;
};

struct Point {
  int stream = 0;
  std::uint64_t value = 0;
  bool shared = false;  // of the stream's shared timeline; else of the other
};

struct Step {
  int stream = 0;
  std::vector<Product> products;  // one, or a call of Session::Execute
  std::vector<Point> wait;
  std::uint64_t point = 0;  // signals this, on all timelines of its stream
  v1::ReplyWhen reply_when = v1::REPLY_WHEN_COMPLETED;
  // Gates are points that this process raises itself: on a timeline, and in shared memory. 0: none.
  std::uint64_t gate = 0;
  std::uint64_t shared_gate = 0;
  std::uint64_t opens = 0;  // raised before this step is submitted
  std::uint64_t opens_shared = 0;

  bool is_execute() const { return products.size() > 1; }
};

struct Round {
  std::vector<Step> steps;
  std::vector<SignedPermutation> after;  // the matrices, once all is done
};

// What is submitted, and what comes of it when each step runs after all before it.
//
// Streams may share a hardware queue of the GPU, two of which are all there are under MPS, and a wait in it holds up
// what is launched behind it. So a wait is left to the GPU only where its cause is certain to be launched before: else
// it might stand before its own cause, until the session ends for that. Certain is what has no wait that the daemon
// keeps, in a stream that has had none since all was idle, as one of the first kLaunchedMax since then. Gates may be
// waited for on the GPU at any time, since this process needs no queue to open them. Waits for other causes are for the
// timelines that are not in memory, which the daemon keeps always.
class Plan {
 public:
  Plan(std::uint64_t seed, int extent) : random_(seed), extent_(extent) {
    for (int i = 0; i < kMatrices; ++i) before_.push_back(SignedPermutation::Random(extent, random_));
    now_ = before_;
    while (num_steps_ < kSteps) AddRound();
  }

  int extent() const { return extent_; }
  const std::vector<SignedPermutation>& before() const { return before_; }
  const std::vector<Round>& rounds() const { return rounds_; }
  int num_steps() const { return num_steps_; }
  std::uint64_t last_point(int stream) const { return streams_[static_cast<std::size_t>(stream)].last; }
  // Of the waits that the matrices ask for, those for other streams, and those of them that are left to the GPU.
  std::int64_t waits_across() const { return waits_across_; }
  std::int64_t waits_on_gpu() const { return waits_on_gpu_; }

 private:
  using Points = std::array<std::uint64_t, kStreams.size()>;  // of each stream; 0: none

  struct StreamState {
    std::uint64_t last = 0;     // point
    std::uint64_t certain = 0;  // points up to here are of what is done, or launched before what is submitted now
    int since_idle = 0;
    bool kept_back = false;  // something in it waits, or has waited, in the daemon
  };

  // Since all was idle.
  struct Users {
    Points written = {};
    Points read = {};
  };

  // A gate that is closed is opened before step `opened_at` of the round.
  struct Gate {
    std::uint64_t last = 0;
    std::optional<int> opened_at;
  };

  int Below(int n) { return static_cast<int>(random_() % static_cast<std::uint64_t>(n)); }
  bool OneIn(int n) { return Below(n) == 0; }

  void AddRound() {
    for (StreamState& stream : streams_) stream = {.last = stream.last, .certain = stream.last};
    users_ = {};
    const int length = std::min(kRoundMin + Below(kRoundMax - kRoundMin + 1), kSteps - num_steps_);
    // First what the daemon launches at once, in the two streams that leave waits to the GPU, behind a closed gate: the
    // GPU has all of it before any of it can run.
    const int burst = 10 + Below(kLaunchedMax);
    Round& round = rounds_.emplace_back();
    for (int i = 0; i < length; ++i) {
      round.steps.push_back(i < burst ? BurstStep(i, burst) : AnyStep(i));
      ++num_steps_;
    }
    for (Gate* const gate : {&gate_, &shared_gate_}) gate->opened_at.reset();
    round.after.assign(now_.begin(), now_.begin() + kWritten);
  }

  Step BurstStep(int i, int burst) {
    Step step{.stream = kGpuWaitStreams[static_cast<std::size_t>(Below(2))], .products = {AnyProduct()}};
    if (i == 0) step.shared_gate = Close(shared_gate_, i, burst / 2 + Below(burst));
    Complete(step, i);
    return step;
  }

  Step AnyStep(int i) {
    Step step{.stream = Below(kNumStreams), .products = {AnyProduct()}};
    if (OneIn(20)) {
      for (int more = 1 + Below(2); more > 0; --more) step.products.push_back(AnyProduct());
    } else if (OneIn(12) && !gate_.opened_at.has_value()) {
      step.gate = Close(gate_, i, 1 + Below(12));
    } else if (OneIn(12) && !shared_gate_.opened_at.has_value()) {
      step.shared_gate = Close(shared_gate_, i, 1 + Below(12));
    }
    Complete(step, i);
    return step;
  }

  Product AnyProduct() {
    Product product{.a = Below(kMatrices), .b = Below(kMatrices), .d = Below(kWritten)};
    while (product.b == product.a) product.b = Below(kMatrices);
    while (product.d == product.a || product.d == product.b) product.d = Below(kWritten);
    return product;
  }

  static std::uint64_t Close(Gate& gate, int now, int steps) {
    gate.opened_at = now + steps;
    return ++gate.last;
  }

  static std::uint64_t Open(Gate& gate, int now, bool in_any_case) {
    if (!gate.opened_at.has_value() || (*gate.opened_at > now && !in_any_case)) return 0;
    gate.opened_at.reset();
    return gate.last;
  }

  void Complete(Step& step, int i) {
    // Execute, and the call that opens a gate, are waited for: nothing that they may stand behind waits for this
    // process meanwhile.
    step.opens = Open(gate_, i, step.is_execute());
    step.opens_shared = Open(shared_gate_, i, step.is_execute() || step.opens != 0);
    if (OneIn(3)) step.reply_when = v1::REPLY_WHEN_ENQUEUED;
    AddWaits(step);
    Submitted(step);
    for (const Product& product : step.products) Compute(step, product);
  }

  Users& users(int matrix) { return users_[static_cast<std::size_t>(matrix)]; }
  StreamState& state(int stream) { return streams_[static_cast<std::size_t>(stream)]; }

  void AddWaits(Step& step) {
    Points needed = {};
    const auto need = [&](const Points& points) {
      for (std::size_t i = 0; i < points.size(); ++i) needed[i] = std::max(needed[i], points[i]);
    };
    for (const Product& product : step.products) {
      for (const int matrix : {product.a, product.b, product.d}) need(users(matrix).written);
      need(users(product.d).read);
    }
    for (int stream = 0; stream < kNumStreams; ++stream) {
      const std::uint64_t value = needed[static_cast<std::size_t>(stream)];
      if (value == 0 || stream == step.stream) continue;
      step.wait.push_back(PointFor(step, stream, value));
      ++waits_across_;
      if (LeftToGpu(step, step.wait.back())) ++waits_on_gpu_;
    }
    // Now and then for no reason, for what may long be reached, its own stream's included.
    const int stream = Below(kNumStreams);
    const std::uint64_t last = state(stream).last;
    if (!OneIn(10) || last == 0) return;
    const std::uint64_t value = 1 + random_() % last;
    const Point point = PointFor(step, stream, value);
    // A wait that the daemon keeps would end what streams with gpu_waits are for in this round.
    if (!KindOf(step.stream).gpu_waits || LeftToGpu(step, point)) step.wait.push_back(point);
  }

  Point PointFor(const Step& step, int stream, std::uint64_t value) {
    Point point{.stream = stream, .value = value};
    if (!KindOf(stream).shared) return point;
    if (KindOf(step.stream).gpu_waits) {
      // Execute goes another way than what it waits for, and may come to the daemon before it.
      point.shared = value <= state(stream).certain && !step.is_execute();
    } else {
      point.shared = OneIn(2);
    }
    return point;
  }

  static bool LeftToGpu(const Step& step, const Point& point) { return KindOf(step.stream).gpu_waits && point.shared; }

  void Submitted(Step& step) {
    StreamState& stream = state(step.stream);
    step.point = ++stream.last;
    const bool gpu_waits = KindOf(step.stream).gpu_waits;
    stream.kept_back =
        stream.kept_back || step.gate != 0 || (step.shared_gate != 0 && !gpu_waits) ||
        std::any_of(step.wait.begin(), step.wait.end(), [&](const Point& point) { return !LeftToGpu(step, point); });
    if (!stream.kept_back && ++stream.since_idle <= kLaunchedMax) stream.certain = stream.last;
  }

  void Compute(const Step& step, const Product& product) {
    const auto at = [this](int matrix) -> SignedPermutation& { return now_[static_cast<std::size_t>(matrix)]; };
    at(product.d) = at(product.a).TimesTransposed(at(product.b));
    const auto stream = static_cast<std::size_t>(step.stream);
    for (const int matrix : {product.a, product.b}) users(matrix).read[stream] = step.point;
    users(product.d) = {};
    users(product.d).written[stream] = step.point;
  }

  std::mt19937_64 random_;
  const int extent_;
  std::vector<SignedPermutation> before_;
  std::vector<SignedPermutation> now_;
  std::vector<Round> rounds_;
  int num_steps_ = 0;
  std::array<StreamState, kStreams.size()> streams_ = {};
  std::array<Users, kMatrices> users_ = {};
  Gate gate_;
  Gate shared_gate_;
  std::int64_t waits_across_ = 0;
  std::int64_t waits_on_gpu_ = 0;
};

// A control goes without the waits for other streams, but for the gates, and is not expected to be right.
enum class Waits { kAll, kControl };

// Runs a Plan. Steps of one product go over one GemmStream, so that they come to the daemon as they are submitted.
class Player {
 public:
  static absl::StatusOr<std::unique_ptr<Player>> Make(Connected& connected, const Plan& plan, Waits waits, Row& row) {
    std::unique_ptr<Player> player(new Player(connected, plan, waits, row));
    RETURN_IF_ERROR(player->OpenAll());
    return player;
  }

  Player(const Player&) = delete;
  Player& operator=(const Player&) = delete;
  // Whatever ended the run, nothing stays behind a gate, and nothing is waited for that nobody brings.
  ~Player() {
    if (shared_gate_.has_value()) shared_gate_->Signal(kEnd);
    if (gate_.has_value()) gate_->Signal(kEnd).IgnoreError();  // of no use where the daemon is gone
    if (!finished_) products_.Cancel();
  }

  absl::Status Play() {
    const absl::Status status = PlayRounds();
    if (!status.ok()) TellOfFailure();
    RETURN_IF_ERROR(status);
    finished_ = true;
    CheckOk(row_, "the end of the stream", products_.Finish());
    CheckEnd();
    return absl::OkStatus();
  }

  // Of the matrices that were compared.
  std::int64_t wrong() const { return wrong_; }

 private:
  struct Answer {
    absl::Status status;     // written before `calls` says so
    bool too_early = false;  // came before its point was to be seen in memory
    std::atomic<int> calls{0};
  };

  Player(Connected& connected, const Plan& plan, Waits waits, Row& row)
      : client_(connected.client),
        session_(connected.session),
        plan_(plan),
        waits_(waits),
        row_(row),
        answers_(static_cast<std::size_t>(plan.num_steps())),
        products_(connected.session.OpenStream()) {}

  absl::Status PlayRounds() {
    for (const Round& round : plan_.rounds()) {
      for (const Step& step : round.steps) RETURN_IF_ERROR(Submit(step));
      RETURN_IF_ERROR(AwaitAll());
      RETURN_IF_ERROR(Compare(round));
    }
    return absl::OkStatus();
  }

  // The first, of which the others are consequences.
  void TellOfFailure() {
    for (std::size_t i = 0; i < submitted_; ++i) {
      const Answer& answer = answers_[i];
      if (answer.calls == 0 || answer.status.ok()) continue;
      return row_.Check(false, absl::StrCat(plan_.extent(), ": step ", i, ": ", Text(answer.status)));
    }
  }

  absl::Status OpenAll() {
    for (int i = 0; i < kNumStreams; ++i) {
      const StreamKind& kind = KindOf(i);
      std::optional<client::WorkStream> stream;
      std::optional<client::SharedTimeline> in_memory;
      if (i > 0) {
        ASSIGN_OR_RETURN(stream, session_.OpenWorkStream(kind.priority, kind.gpu_waits));
      }
      if (kind.shared) {
        ASSIGN_OR_RETURN(in_memory, session_.CreateSharedTimeline());
      }
      ASSIGN_OR_RETURN(client::Timeline timeline, session_.CreateTimeline());
      streams_.push_back(std::move(stream));
      shared_timelines_.push_back(std::move(in_memory));
      timelines_.push_back(std::move(timeline));
    }
    ASSIGN_OR_RETURN(gate_, session_.CreateTimeline());
    ASSIGN_OR_RETURN(shared_gate_, session_.CreateSharedTimeline());
    for (const SignedPermutation& matrix : plan_.before()) {
      const std::vector<std::uint16_t> elements = matrix.Elements();
      ASSIGN_OR_RETURN(client::Buffer buffer, session_.AllocateOnDevice(elements.size() * kBf16Bytes));
      RETURN_IF_ERROR(buffer.Upload(elements.data(), buffer_bytes()));
      matrices_.push_back(std::move(buffer));
    }
    return absl::OkStatus();
  }

  std::uint64_t buffer_bytes() const {
    return static_cast<std::uint64_t>(plan_.extent()) * static_cast<std::uint64_t>(plan_.extent()) * kBf16Bytes;
  }
  const std::optional<client::SharedTimeline>& in_memory(int stream) const {
    return shared_timelines_[static_cast<std::size_t>(stream)];
  }

  client::SyncPoint Name(const Point& point) const {
    if (point.shared) return in_memory(point.stream)->At(point.value);
    return timelines_[static_cast<std::size_t>(point.stream)].At(point.value);
  }

  client::OrderSpec OrderOf(const Step& step) const {
    client::OrderSpec order{.reply_when = step.reply_when};
    const auto& stream = streams_[static_cast<std::size_t>(step.stream)];
    if (stream.has_value()) order.stream = stream->id();
    if (waits_ == Waits::kAll) {
      for (const Point& point : step.wait) order.wait.push_back(Name(point));
    }
    if (step.gate != 0) order.wait.push_back(gate_->At(step.gate));
    if (step.shared_gate != 0) order.wait.push_back(shared_gate_->At(step.shared_gate));
    order.signal.push_back(Name({.stream = step.stream, .value = step.point}));
    if (in_memory(step.stream).has_value()) {
      order.signal.push_back(Name({.stream = step.stream, .value = step.point, .shared = true}));
    }
    return order;
  }

  client::GemmSpec SpecOf(const Product& product) const {
    const auto view = [this](int matrix) {
      return matrices_[static_cast<std::size_t>(matrix)].Tensor(DType::kBf16, {plan_.extent(), plan_.extent()});
    };
    return {.a = view(product.a), .b = view(product.b), .d = view(product.d), .backend = v1::BACKEND_CUDA};
  }

  absl::Status Submit(const Step& step) {
    if (step.opens_shared != 0) shared_gate_->Signal(step.opens_shared);
    if (step.opens != 0) RETURN_IF_ERROR(gate_->Signal(step.opens));
    opened_ = std::max(opened_, step.gate);
    opened_shared_ = std::max(opened_shared_, step.shared_gate);
    const std::size_t number = submitted_++;
    LookAtMemory(step, number);
    if (step.is_execute()) return Execute(step, number);
    client::GemmSpec spec = SpecOf(step.products.front());
    spec.order = OrderOf(step);
    last_of_stream_[static_cast<std::size_t>(step.stream)] = number;
    return products_.Gemm(spec, [this, &step, number](const absl::StatusOr<client::GemmResult>& result) {
      Take(step, number, result.status());
    });
  }

  // What was submitted to its stream before must have come there before: an answer says so, and answers of a stream
  // come in its order.
  absl::Status Execute(const Step& step, std::size_t number) {
    const std::optional<std::size_t> before = last_of_stream_[static_cast<std::size_t>(step.stream)];
    if (before.has_value() && !Soon([&] { return answers_[*before].calls > 0; })) {
      return absl::DeadlineExceededError(absl::StrCat("step ", *before, " is not answered"));
    }
    std::vector<client::GemmSpec> specs;
    for (const Product& product : step.products) specs.push_back(SpecOf(product));
    specs.front().timeout = kPatience;
    Take(step, number, session_.Execute(specs, OrderOf(step)).status());
    return absl::OkStatus();
  }

  // On a library's thread, or on this one.
  void Take(const Step& step, std::size_t number, const absl::Status& status) {
    Answer& answer = answers_[number];
    if (answer.calls == 0) {
      answer.status = status;
      // Whoever has the answer may count on the signals.
      if (step.reply_when == v1::REPLY_WHEN_COMPLETED && in_memory(step.stream).has_value()) {
        const std::optional<absl::Status> reached = in_memory(step.stream)->Reached(step.point);
        answer.too_early = !reached.has_value() || (status.ok() && !reached->ok());
      }
    }
    if (++answer.calls == 1) ++answered_;
  }

  // Any point of before, now and then: reached or not, but with no error, and nothing beyond what was submitted.
  void LookAtMemory(const Step& step, std::size_t number) {
    const auto& timeline = in_memory(step.stream);
    if (!timeline.has_value() || number % 4 != 0) return;
    const std::optional<absl::Status> reached = timeline->Reached(1 + number % step.point);
    if (reached.has_value()) CheckOk(row_, absl::StrCat("a point of before, at step ", number), *reached);
    const std::uint64_t value = timeline->value();
    row_.Check(value < step.point, absl::StrCat("step ", number, ", point ", step.point, ": is ", value, " already"));
  }

  // Everything is answered, and over: what is submitted now finds all streams idle.
  absl::Status AwaitAll() {
    shared_gate_->Signal(opened_shared_);
    RETURN_IF_ERROR(gate_->Signal(opened_));
    // What has not come to the daemon yet, Synchronize would not wait for.
    if (!Soon([&] { return answered_ == submitted_; })) {
      return absl::DeadlineExceededError(absl::StrCat(answered_.load(), " of ", submitted_, " steps are answered"));
    }
    RETURN_IF_ERROR(session_.Synchronize(kPatience));
    // An answer may be quicker than the thread that has opened the gate for it.
    if (!Soon([&] { return NoneHeldBack(); })) return absl::DeadlineExceededError("the daemon still holds work back");
    return absl::OkStatus();
  }

  bool NoneHeldBack() const {
    const absl::StatusOr<v1::ListSessionsReply> list = client_.ListSessions();
    return list.ok() && std::all_of(list->sessions().begin(), list->sessions().end(), [](const v1::SessionInfo& info) {
             return info.label() != kOrderRandomJob || info.gated() + info.in_flight() == 0;
           });
  }

  absl::Status Compare(const Round& round) {
    std::vector<std::uint16_t> elements(buffer_bytes() / kBf16Bytes);
    for (std::size_t i = 0; i < round.after.size(); ++i) {
      RETURN_IF_ERROR(matrices_[i].Download(elements.data(), buffer_bytes()));
      const std::string wrong = round.after[i].Wrong(elements);
      if (!wrong.empty()) ++wrong_;
      if (waits_ == Waits::kControl) continue;
      CheckRight(row_, absl::StrCat(plan_.extent(), ": matrix ", i, " after step ", submitted_), wrong);
    }
    return absl::OkStatus();
  }

  void CheckEnd() {
    for (std::size_t i = 0; i < answers_.size(); ++i) {
      const Answer& answer = answers_[i];
      row_.Check(answer.calls == 1 && answer.status.ok() && !answer.too_early,
                 absl::StrCat(plan_.extent(), ": step ", i, " was answered ", answer.calls.load(), " times: ",
                              Text(answer.status), answer.too_early ? ", before its point was in memory" : ""));
    }
    for (int stream = 0; stream < kNumStreams; ++stream) {
      const std::uint64_t last = plan_.last_point(stream);
      const std::string what = absl::StrCat("the last point of stream ", stream);
      const absl::StatusOr<std::uint64_t> value = timelines_[static_cast<std::size_t>(stream)].Wait(last, kPatience);
      row_.Check(value.ok() && *value == last, absl::StrCat(what, ": ", Text(value.status())));
      const auto& timeline = in_memory(stream);
      if (!timeline.has_value()) continue;
      row_.Check(timeline->value() == last, absl::StrCat(what, " is ", timeline->value(), " and not ", last));
      CheckOk(row_, what, timeline->Reached(last).value_or(absl::UnknownError("not reached")));
    }
  }

  client::Client& client_;
  client::Session& session_;
  const Plan& plan_;
  const Waits waits_;
  Row& row_;
  std::vector<std::optional<client::WorkStream>> streams_;               // the first: the session's own
  std::vector<client::Timeline> timelines_;                              // one a stream
  std::vector<std::optional<client::SharedTimeline>> shared_timelines_;  // where it has one
  std::optional<client::Timeline> gate_;
  std::optional<client::SharedTimeline> shared_gate_;
  std::uint64_t opened_ = 0;  // once the round is submitted
  std::uint64_t opened_shared_ = 0;
  std::vector<client::Buffer> matrices_;
  std::size_t submitted_ = 0;
  std::atomic<std::size_t> answered_{0};
  std::vector<Answer> answers_;
  std::array<std::optional<std::size_t>, kStreams.size()> last_of_stream_;
  std::int64_t wrong_ = 0;
  bool finished_ = false;
  client::GemmStream products_;  // goes first, and waits for its answers
};

std::uint64_t Seed() {
  const char* const given = std::getenv("TESSERA_TEST_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
}

absl::Status Play(Connected& connected, const Plan& plan, const std::string& name, Row& row) {
  const auto begin = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const auto player, Player::Make(connected, plan, Waits::kAll, row));
  RETURN_IF_ERROR(player->Play());
  row.measured[name + "_step_us"] = SecondsSince(begin) * 1e6 / plan.num_steps();
  row.measured[name + "_waits_across"] = static_cast<double>(plan.waits_across());
  row.measured[name + "_waits_on_gpu"] = static_cast<double>(plan.waits_on_gpu());
  return absl::OkStatus();
}

// Tells what the row is worth, and fails nothing: a GPU may be in order by chance.
absl::Status TryControl(Connected& connected, const Plan& plan, Row& row) {
  if (plan.waits_across() <= kWaitsAcrossMin) {
    row.Remark(absl::StrCat("hardly tried: only ", plan.waits_across(), " waits are for other streams"));
  }
  Row unheeded;
  ASSIGN_OR_RETURN(const auto player, Player::Make(connected, plan, Waits::kControl, unheeded));
  RETURN_IF_ERROR(player->Play());
  row.measured["control_wrong_matrices"] = static_cast<double>(player->wrong());
  if (player->wrong() == 0) row.Remark("control: right without waits, too");
  return absl::OkStatus();
}

absl::Status PlayAll(const ClientJob& job, Row& row) {
  const std::uint64_t seed = Seed();
  row.Remark(absl::StrCat("TESSERA_TEST_SEED=", seed));
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  const Plan small(seed, 64);
  RETURN_IF_ERROR(Play(connected, small, "small", row));
  // Kernels that take their time.
  const Plan large(seed + 1, 256);
  RETURN_IF_ERROR(Play(connected, large, "large", row));
  return TryControl(connected, large, row);
}

absl::Status RunJob(const ClientJob& job) {
  Row row{.environment = {}, .route = job.job};
  const absl::Status status = PlayAll(job, row);
  if (!status.ok()) row.Check(false, Text(status));
  std::ofstream file(job.result);
  file << nlohmann::ordered_json(std::vector<Row>{row}).dump() << "\n";
  file.close();
  return file.fail() ? absl::InternalError("cannot write " + job.result) : absl::OkStatus();
}

}  // namespace

int RunOrderRandomJob(const ClientJob& job) {
  const absl::Status status = RunJob(job);
  if (status.ok()) return EXIT_SUCCESS;
  std::fprintf(stderr, "%s\n", MessageOf(status).c_str());
  return EXIT_FAILURE;
}

}  // namespace tessera::gpu_test
