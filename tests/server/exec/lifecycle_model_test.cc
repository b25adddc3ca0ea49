// Random lives of sessions, buffers and operations, each step compared with a model that knows what every call must
// answer and what must be held afterwards. TESSERA_TEST_SEED repeats a run.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/text.h"
#include "tests/server/exec/lifecycle_world.h"
#include "tests/server/session/posix_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using namespace std::chrono_literals;

constexpr std::size_t kPrincipals = 3;
constexpr std::size_t kSessionsMax = 5;
constexpr std::size_t kSessionsOfPrincipalMax = 3;
constexpr std::size_t kBuffersMax = 22;
constexpr std::size_t kBuffersOfPrincipalMax = 12;
constexpr std::size_t kBuffersOfSessionMax = 7;
constexpr std::uint64_t kBytesMax = 20 * kOutputBytes;
constexpr std::uint64_t kBytesOfPrincipalMax = 11 * kOutputBytes;
constexpr std::size_t kQueueMax = 12;
constexpr std::size_t kQueueOfPrincipalMax = 8;
constexpr std::size_t kQueueOfSessionMax = 5;
constexpr std::size_t kGatesMax = 5;  // operations that hold a thread of the device; it has more
// Short, long and longer than any session waits; a run takes seconds.
constexpr std::chrono::milliseconds kTtls[] = {1h, 3h};
constexpr auto kPatienceOfTable = 5h;
constexpr std::chrono::hours kJumps[] = {0h, 2h, 6h};

SessionLimits Limits() {
  return {.sessions_max = kSessionsMax,
          .sessions_per_principal_max = kSessionsOfPrincipalMax,
          .leases_max = 100,
          .buffers_max = kBuffersMax,
          .buffers_per_principal_max = kBuffersOfPrincipalMax,
          .buffers_per_session_max = kBuffersOfSessionMax,
          .buffer_bytes_max = kBytesMax,
          .principal_buffer_bytes_max = kBytesOfPrincipalMax,
          .ttl_max = 10h,
          .cleanup_patience = kPatienceOfTable};
}

Peer PeerOf(std::size_t principal) {
  const auto uid = static_cast<uid_t>(1'000 + principal);
  return {.pid = static_cast<pid_t>(10 + principal), .uid = uid, .gid = uid};
}

// Of the model: keys are numbers of its own.
struct ModelBuffer {
  Id id;
  int session = 0;
  std::size_t principal = 0;
  std::uint64_t bytes = 0;
  bool input = false;
  std::uint32_t seed = 0;  // of an input's elements
  std::map<std::string, BufferAccess> shares;
  bool listed = true;  // neither released nor of an ended session
  std::uint32_t pins = 0;
  std::optional<Watched> released;  // whoever released it waits for this
};

struct ModelOperation {
  int number = 0;
  std::array<int, 3> buffers{};
  bool spoiled = false;  // D held no result, and nobody else writes it
  bool opened = false;   // the gate, or there is none
  StatusCode verdict = StatusCode::kOk;
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<Answer> answer = std::make_shared<Answer>();
};

struct ModelSession {
  Id token;
  std::optional<Id> lease;
  LeaseKind kind = LeaseKind::kSideChannel;
  std::chrono::milliseconds ttl{0};
  std::size_t principal = 0;
  bool open = true;
  bool quarantined = false;
  std::deque<ModelOperation> queue;  // the first one, if any, waits at its gate
};

class Model {
 public:
  explicit Model(std::uint64_t seed)
      : random_(seed),
        world_(Limits(),
               {.queue_max = kQueueMax,
                .queue_per_session_max = kQueueOfSessionMax,
                .queue_per_principal_max = kQueueOfPrincipalMax},
               /*threads=*/kGatesMax + 2) {}
  ~Model() {
    for (auto& [key, session] : sessions_) {
      for (ModelOperation& operation : session.queue) operation.gate->Open(absl::OkStatus());
    }
  }

  void Step() {
    constexpr struct {
      int weight;
      void (Model::*act)();
    } acts[] = {{5, &Model::Open},     {3, &Model::End},      {2, &Model::Tick},   {12, &Model::Make},
                {4, &Model::Import},   {4, &Model::Release},  {8, &Model::Share},  {30, &Model::Submit},
                {4, &Model::Inline},   {7, &Model::OpenGate}, {3, &Model::Cancel}, {3, &Model::UseWrongly},
                {2, &Model::KeepAlive}};
    int total = 0;
    for (const auto& act : acts) total += act.weight;
    int at = static_cast<int>(Below(static_cast<std::size_t>(total)));
    for (const auto& act : acts) {
      at -= act.weight;
      if (at >= 0) continue;
      (this->*act.act)();
      break;
    }
    Check();
  }

  void Finish() {
    while (HeldGates() > 0) OpenGate();
    std::vector<int> open;
    for (const auto& [key, session] : sessions_) {
      if (session.open) open.push_back(key);
    }
    for (const int key : open) EndOne(key);
    Check();
    EXPECT_TRUE(sessions_.empty());
    EXPECT_TRUE(buffers_.empty());
    EXPECT_EQ(world_.table.Counts().bytes_held, 0U);
    EXPECT_EQ(world_.executor->in_flight(), 0U);
    for (const char* zero :
         {"tessera_sessions", "tessera_in_flight", "tessera_queue_depth", "tessera_buffers{origin=\"allocated\"}",
          "tessera_buffers{origin=\"imported\"}", "tessera_buffer_bytes{origin=\"allocated\"}",
          "tessera_leases{kind=\"ttl\"}", "tessera_leases{kind=\"attach\"}", "tessera_leases{kind=\"side_channel\"}"}) {
      EXPECT_EQ(MetricValue(world_.metrics, zero), 0) << zero;
    }
    EXPECT_EQ(MetricValue(world_.metrics, "tessera_quarantines_total"), quarantines_);
    std::cout << opened_ << " sessions, " << made_ << " buffers, " << computed_ << " products, " << refused_
              << " refused, " << dropped_ << " dropped, " << quarantines_ << " quarantined\n";
    EXPECT_GT(opened_, 20);
    EXPECT_GT(made_, 100);
    EXPECT_GT(computed_, 100);
    EXPECT_GT(refused_, 20);
    EXPECT_GT(dropped_, 5);
    EXPECT_GT(quarantines_, 2);
  }

 private:
  std::size_t Below(std::size_t end) { return random_() % end; }
  bool OneIn(std::size_t n) { return Below(n) == 0; }

  template <typename Map>
  typename Map::iterator Any(Map& map) {
    return std::next(map.begin(), static_cast<std::ptrdiff_t>(Below(map.size())));
  }
  // A session that is open, or none.
  ModelSession* AnyOpen(int* key = nullptr) {
    std::vector<int> open;
    for (const auto& [number, session] : sessions_) {
      if (session.open) open.push_back(number);
    }
    if (open.empty()) return nullptr;
    const int chosen = open[Below(open.size())];
    if (key != nullptr) *key = chosen;
    return &sessions_.at(chosen);
  }
  std::shared_ptr<Session> Find(const ModelSession& session) {
    auto found = world_.table.FindSession(PeerOf(session.principal), session.token);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.value_or(nullptr);
  }

  // What the model knows of limits; `mine` tells which entries count.
  template <typename Mine>
  std::pair<std::size_t, std::uint64_t> Held(Mine mine) const {
    std::pair<std::size_t, std::uint64_t> held;
    for (const auto& [key, buffer] : buffers_) {
      if (!mine(buffer)) continue;
      ++held.first;
      held.second += buffer.bytes;
    }
    return held;
  }
  bool HasRoomFor(int session, std::size_t principal, std::uint64_t bytes) const {
    const auto of_session = Held([&](const ModelBuffer& b) { return b.session == session; });
    const auto of_principal = Held([&](const ModelBuffer& b) { return b.principal == principal; });
    const auto all = Held([](const ModelBuffer&) { return true; });
    return of_session.first < kBuffersOfSessionMax && of_principal.first < kBuffersOfPrincipalMax &&
           of_principal.second + bytes <= kBytesOfPrincipalMax && all.first < kBuffersMax &&
           all.second + bytes <= kBytesMax;
  }
  std::size_t InFlight(std::optional<std::size_t> principal = std::nullopt) const {
    std::size_t count = 0;
    for (const auto& [key, session] : sessions_) {
      if (!principal.has_value() || session.principal == *principal) count += session.queue.size();
    }
    return count;
  }
  std::size_t HeldGates() const {
    std::size_t count = 0;
    for (const auto& [key, session] : sessions_) {
      for (const ModelOperation& operation : session.queue) count += operation.opened ? 0 : 1;
    }
    return count;
  }

  void Open() {
    const std::size_t principal = Below(kPrincipals);
    const Peer peer = PeerOf(principal);
    ModelSession session{.kind = static_cast<LeaseKind>(Below(3)), .principal = principal};
    std::size_t open = 0, open_of_principal = 0;
    for (const auto& [key, other] : sessions_) {
      open += other.open ? 1 : 0;
      open_of_principal += other.open && other.principal == principal ? 1 : 0;
    }
    const bool fits = open < kSessionsMax && open_of_principal < kSessionsOfPrincipalMax;
    absl::StatusOr<Id> token = absl::UnknownError("");
    if (session.kind == LeaseKind::kTtl) {
      session.ttl = kTtls[Below(2)];
      token = world_.table.OpenSession(peer, session.ttl, "model");
    } else {
      session.lease = world_.table.OpenLease(peer, session.kind).value_or(Id{});
      token = world_.table.OpenSession(peer, *session.lease, "model");
    }
    ASSERT_EQ(token.status().code(), fits ? StatusCode::kOk : StatusCode::kResourceExhausted) << token.status();
    if (!fits) {
      ++refused_;
      if (session.lease.has_value()) world_.table.CloseLease(*session.lease);
      return;
    }
    ++opened_;
    session.token = *token;
    sessions_.emplace(next_++, std::move(session));
  }

  void End() {
    int key = 0;
    if (AnyOpen(&key) != nullptr) EndOne(key);
  }

  void EndOne(int key) {
    ModelSession& session = sessions_.at(key);
    const auto listed =
        static_cast<std::size_t>(std::count_if(buffers_.begin(), buffers_.end(), [&](const auto& entry) {
          return entry.second.session == key && entry.second.listed;
        }));
    const std::size_t way = Below(3);
    if (way == 0 && session.lease.has_value()) {
      world_.table.CloseLease(*session.lease);
      session.lease.reset();
    } else {
      const auto ended =
          way == 1 ? world_.table.EndSession(session.token.index, session.token.generation, SessionEnd::kEvicted)
                   : world_.table.EndSession(session.token, SessionEnd::kClosed);
      ASSERT_TRUE(ended.ok()) << ended.status();
      ASSERT_EQ(*ended, listed);
    }
    HasEnded(key);
  }

  void HasEnded(int key) {
    ModelSession& session = sessions_.at(key);
    session.open = false;
    former_.push_back(session.token);
    former_principal_.push_back(session.principal);
    for (auto& [number, buffer] : buffers_) {
      if (buffer.session == key) buffer.listed = false;
    }
    while (session.queue.size() > 1) {  // at once, though the first one is still held
      ASSERT_NO_FATAL_FAILURE(Answered(session.queue.back(), StatusCode::kCancelled));
      session.queue.pop_back();
      ++dropped_;
    }
    if (session.lease.has_value()) world_.table.CloseLease(*session.lease);
    session.lease.reset();
  }

  void Tick() {
    const auto jump = kJumps[Below(std::size(kJumps))];
    for (auto& [key, session] : sessions_) {
      if (session.open || session.quarantined || jump <= kPatienceOfTable) continue;
      session.quarantined = true;
      ++quarantines_;
    }
    world_.table.Tick(SessionTable::Clock::now() + jump);
    world_.reaper.Tick();
    std::vector<int> expired;
    for (const auto& [key, session] : sessions_) {
      if (session.open && session.kind == LeaseKind::kTtl && jump > session.ttl) expired.push_back(key);
    }
    for (const int key : expired) HasEnded(key);
  }

  void Add(const absl::StatusOr<SessionTable::NewBuffer>& made, ModelBuffer buffer, bool fits) {
    ASSERT_EQ(made.status().code(), fits ? StatusCode::kOk : StatusCode::kResourceExhausted) << made.status();
    if (!fits) {
      ++refused_;
      return;
    }
    ++made_;
    ASSERT_EQ(made->bytes, buffer.bytes);
    buffer.id = made->id;
    buffer.seed = static_cast<std::uint32_t>(Below(1'000));
    const std::shared_ptr<Session> session = Find(sessions_.at(buffer.session));
    const auto pin = world_.table.PinBuffer(*session, buffer.id, BufferAccess::kReadWrite);
    ASSERT_TRUE(pin.ok()) << pin.status();
    if (buffer.input) FillOperand(buffer.seed, (*pin)->data());
    buffers_.emplace(next_++, std::move(buffer));
  }

  ModelBuffer NewBuffer(int key) {
    ModelBuffer buffer{.session = key, .principal = sessions_.at(key).principal, .input = OneIn(2)};
    buffer.bytes = kOutputBytes + Below(kOutputBytes / 2);
    return buffer;
  }

  void Make() {
    int key = 0;
    if (AnyOpen(&key) == nullptr) return;
    ModelBuffer buffer = NewBuffer(key);
    const bool fits = HasRoomFor(key, buffer.principal, buffer.bytes);
    const auto made = world_.table.AllocateBuffer(*Find(sessions_.at(key)), buffer.bytes);
    Add(made, std::move(buffer), fits);
  }

  void Import() {
    int key = 0;
    ModelSession* const session = AnyOpen(&key);
    if (session == nullptr) return;
    const std::shared_ptr<Session> found = Find(*session);
    if (session->kind != LeaseKind::kSideChannel) {
      ASSERT_EQ(CodeOf(world_.table.ImportBuffer(*found, 1, 0, 0)), StatusCode::kFailedPrecondition);
      return;
    }
    ModelBuffer buffer = NewBuffer(key);
    const bool fits = HasRoomFor(key, buffer.principal, buffer.bytes);
    const auto ticket = world_.table.KeepDescriptor(*session->lease, MakeMemfd(buffer.bytes));
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    const auto made = world_.table.ImportBuffer(*found, *ticket, 0, 0);
    ASSERT_EQ(CodeOf(world_.table.ImportBuffer(*found, *ticket, 0, 0)), StatusCode::kNotFound);
    Add(made, std::move(buffer), fits);
  }

  void Release() {
    int key = 0;
    ModelSession* const session = AnyOpen(&key);
    if (session == nullptr || buffers_.empty()) return;
    const auto chosen = Any(buffers_);
    ModelBuffer& buffer = chosen->second;
    const StatusCode expected = !buffer.listed          ? StatusCode::kNotFound
                                : buffer.session == key ? StatusCode::kOk
                                                        : StatusCode::kPermissionDenied;
    Watched token;
    ASSERT_EQ(world_.table.ReleaseBuffer(*Find(*session), buffer.id, token.Token()).code(), expected);
    if (expected == StatusCode::kOk) {
      buffer.listed = false;
      buffer.released = token;
    } else {
      ASSERT_TRUE(token.gone()) << "a refused release holds its token";
    }
  }

  void Share() {
    int key = 0;
    ModelSession* const session = AnyOpen(&key);
    if (session == nullptr || buffers_.empty()) return;
    ModelBuffer& buffer = Any(buffers_)->second;
    const std::string principal = PeerOf(Below(kPrincipals)).Principal();
    // Inputs are read by others, outputs written: else results could not be predicted.
    std::optional<BufferAccess> access;
    if (!OneIn(3)) access = buffer.input || OneIn(3) ? BufferAccess::kRead : BufferAccess::kReadWrite;
    const auto shared = world_.table.ShareBuffer(*Find(*session), buffer.id, principal, access);
    if (!buffer.listed) {
      ASSERT_EQ(CodeOf(shared), StatusCode::kNotFound);
    } else if (buffer.session != key) {
      ASSERT_EQ(CodeOf(shared), StatusCode::kPermissionDenied);
    } else {
      ASSERT_TRUE(shared.ok()) << shared.status();
      ASSERT_EQ(*shared, buffer.pins);
      if (access.has_value()) {
        buffer.shares[principal] = *access;
      } else {
        buffer.shares.erase(principal);
      }
    }
  }

  StatusCode PinCode(int key, const ModelBuffer& buffer, BufferAccess access) const {
    if (!buffer.listed) return StatusCode::kNotFound;
    if (buffer.session == key) return StatusCode::kOk;
    const auto share = buffer.shares.find(PeerOf(sessions_.at(key).principal).Principal());
    if (share == buffer.shares.end()) return StatusCode::kPermissionDenied;
    return access == BufferAccess::kReadWrite && share->second == BufferAccess::kRead ? StatusCode::kPermissionDenied
                                                                                      : StatusCode::kOk;
  }

  // A buffer for one operand: mostly one that will do.
  int ChooseBuffer(int key, bool output) {
    std::vector<int> good;
    for (const auto& [number, buffer] : buffers_) {
      const BufferAccess access = output ? BufferAccess::kReadWrite : BufferAccess::kRead;
      if (buffer.input != output && PinCode(key, buffer, access) == StatusCode::kOk) good.push_back(number);
    }
    if (!good.empty() && !OneIn(12)) return good[Below(good.size())];
    std::vector<int> any;  // of the right kind: an output that were read, or an input written, has no known elements
    for (const auto& [number, buffer] : buffers_) {
      if (buffer.input != output) any.push_back(number);
    }
    return any.empty() ? -1 : any[Below(any.size())];
  }

  // Sessions that have an operation under way that writes it.
  bool WrittenByOthers(int key, int buffer) const {
    for (const auto& [number, session] : sessions_) {
      if (number == key) continue;
      for (const ModelOperation& operation : session.queue) {
        if (operation.buffers[2] == buffer) return true;
      }
    }
    return false;
  }
  bool WrittenBy(int key, int buffer) const {
    const auto& queue = sessions_.at(key).queue;
    return std::any_of(queue.begin(), queue.end(),
                       [&](const ModelOperation& operation) { return operation.buffers[2] == buffer; });
  }

  void Submit() {
    int key = 0;
    ModelSession* const session = AnyOpen(&key);
    if (session == nullptr) return;
    ModelOperation model{.number = next_++};
    std::array<Id, 3> ids;
    StatusCode bind = StatusCode::kOk;
    for (std::size_t i = 0; i < 3; ++i) {
      model.buffers[i] = ChooseBuffer(key, i == 2);
      if (model.buffers[i] < 0) return;
      const ModelBuffer& buffer = buffers_.at(model.buffers[i]);
      ids[i] = buffer.id;
      if (bind == StatusCode::kOk) bind = PinCode(key, buffer, i == 2 ? BufferAccess::kReadWrite : BufferAccess::kRead);
    }
    if (WrittenByOthers(key, model.buffers[2])) return;  // whose result it holds at the end is up to the machine
    const bool overlaps = OneIn(20);
    if (overlaps && bind == StatusCode::kOk) {
      ids[1] = ids[2];
      bind = StatusCode::kInvalidArgument;
    }
    const bool gated = OneIn(3) && HeldGates() < kGatesMax;
    // What is held must not be small, or it would hold this thread.
    const std::int64_t extent = gated || OneIn(2) ? kLargeExtent : kSmallExtent;
    const std::shared_ptr<Session> found = Find(*session);
    auto bound = BindGemm(ProductOf(ids, extent), world_.Scope(found.get()));
    ASSERT_EQ(bound.status().code(), bind) << bound.status();
    if (bind != StatusCode::kOk) {
      ++refused_;
      return;
    }
    auto d = std::make_shared<BufferPin>(*world_.table.PinBuffer(*found, ids[2], BufferAccess::kReadWrite));
    model.spoiled = !WrittenBy(key, model.buffers[2]);
    if (model.spoiled) SpoilOutput((*d)->data());
    Submission operation{.session = found};
    operation.ops.push_back(*std::move(bound));
    model.opened = !gated;
    operation.still_wanted = [gated, gate = model.gate, cancelled = model.cancelled] {
      if (*cancelled) return absl::CancelledError("by its client");
      return gated ? gate->Pass() : absl::OkStatus();
    };
    operation.done = [answer = model.answer, d, spoiled = model.spoiled, extent, a = buffers_.at(model.buffers[0]).seed,
                      b = buffers_.at(model.buffers[1]).seed](const absl::Status& status,
                                                              std::span<const OperationReport>) {
      const bool right = status.ok() ? IsProduct(a, b, extent, (*d)->data()) : !spoiled || IsSpoiled((*d)->data());
      *d = BufferPin();
      answer->Give(right ? status : absl::DataLossError("wrong output"));
    };
    const bool fits = InFlight() < kQueueMax && InFlight(session->principal) < kQueueOfPrincipalMax &&
                      session->queue.size() < kQueueOfSessionMax;
    world_.executor->Submit(std::move(operation));
    if (!fits) {
      ASSERT_EQ(model.answer->calls(), 1) << "a refusal answers at once";
      ASSERT_EQ(model.answer->Await().code(), StatusCode::kResourceExhausted) << model.answer->Await();
      ++refused_;
      return;
    }
    for (const int buffer : model.buffers) ++buffers_.at(buffer).pins;
    ++buffers_.at(model.buffers[2]).pins;  // the test's own, until the answer
    session->queue.push_back(std::move(model));
    Settle(*session);
  }

  // All that can run has answered, and the next one waits at its gate.
  void Settle(ModelSession& session) {
    while (!session.queue.empty()) {
      ModelOperation& first = session.queue.front();
      if (!first.opened) {
        ASSERT_TRUE(first.gate->AwaitArrival());
        ASSERT_EQ(first.answer->calls(), 0);
        return;
      }
      ASSERT_NO_FATAL_FAILURE(Answered(first, first.verdict));
      session.queue.pop_front();
    }
  }

  void Answered(const ModelOperation& operation, StatusCode expected) {
    const absl::Status status = operation.answer->Await();
    ASSERT_EQ(status.code(), expected) << status;
    ASSERT_EQ(operation.answer->calls(), 1);
    if (status.ok()) ++computed_;
    for (const int buffer : operation.buffers) --buffers_.at(buffer).pins;
    --buffers_.at(operation.buffers[2]).pins;
  }

  void OpenGate() {
    std::vector<ModelSession*> waiting;
    for (auto& [key, session] : sessions_) {
      if (!session.queue.empty()) waiting.push_back(&session);
    }
    if (waiting.empty()) return;
    ModelSession& session = *waiting[Below(waiting.size())];
    ModelOperation& first = session.queue.front();
    constexpr StatusCode kVerdicts[] = {StatusCode::kOk, StatusCode::kOk, StatusCode::kCancelled,
                                        StatusCode::kDeadlineExceeded};
    first.verdict = kVerdicts[Below(std::size(kVerdicts))];
    first.opened = true;
    first.gate->Open(first.verdict == StatusCode::kOk ? absl::OkStatus() : absl::Status(first.verdict, "verdict"));
    Settle(session);
  }

  // A call whose client gives up while it waits for its turn.
  void Cancel() {
    int key = 0;
    ModelSession* const session = AnyOpen(&key);
    if (session == nullptr || session->queue.size() < 2) return;
    ModelOperation& waiting = session->queue[1 + Below(session->queue.size() - 1)];
    *waiting.cancelled = true;
    waiting.opened = true;
    waiting.verdict = StatusCode::kCancelled;
  }

  // A product without a session: it waits for nobody, and takes a place of its principal.
  void Inline() {
    const std::size_t principal = Below(kPrincipals);
    const std::int64_t extent = OneIn(2) ? kSmallExtent : kLargeExtent;
    std::string a(kOperandBytes, '\0'), b(kOperandBytes, '\0'), d;
    FillOperand(1, reinterpret_cast<std::byte*>(a.data()));
    FillOperand(2, reinterpret_cast<std::byte*>(b.data()));
    GemmCall call = ProductOf({}, extent);
    call.a.storage = call.b.storage = TensorRef::Storage::kInlineData;
    call.d.storage = TensorRef::Storage::kInlineResult;
    call.a.inline_data = &a;
    call.b.inline_data = &b;
    auto bound = BindGemm(call, world_.Scope(nullptr, &d));
    ASSERT_TRUE(bound.ok()) << bound.status();
    Answer answer;
    Submission operation{.session = nullptr};
    operation.ops.push_back(*std::move(bound));
    operation.account = world_.table.AccountOf(PeerOf(principal));
    operation.still_wanted = [] { return absl::OkStatus(); };
    operation.done = [&answer](const absl::Status& status, std::span<const OperationReport>) { answer.Give(status); };
    const bool fits = InFlight() < kQueueMax && InFlight(principal) < kQueueOfPrincipalMax;
    world_.executor->Submit(std::move(operation));
    ASSERT_EQ(answer.Await().code(), fits ? StatusCode::kOk : StatusCode::kResourceExhausted) << answer.Await();
    if (!fits) {
      ++refused_;
      return;
    }
    ++computed_;
    ASSERT_TRUE(IsProduct(1, 2, extent, reinterpret_cast<const std::byte*>(d.data())));
  }

  // Names of what is no more, or another's.
  void UseWrongly() {
    if (!former_.empty()) {
      const std::size_t chosen = Below(former_.size());
      const Id& token = former_[chosen];
      ASSERT_EQ(CodeOf(world_.table.FindSession(PeerOf(former_principal_[chosen]), token)), StatusCode::kNotFound);
      ASSERT_EQ(CodeOf(world_.table.EndSession(token, SessionEnd::kClosed)), StatusCode::kNotFound);
      ASSERT_EQ(CodeOf(world_.table.EndSession(token.index, token.generation, SessionEnd::kEvicted)),
                StatusCode::kNotFound);
    }
    if (const ModelSession* session = AnyOpen(); session != nullptr) {
      ASSERT_EQ(CodeOf(world_.table.FindSession(PeerOf(session->principal + 1), session->token)),
                StatusCode::kPermissionDenied);
    }
  }

  void KeepAlive() {
    const ModelSession* const session = AnyOpen();
    if (session == nullptr) return;
    const auto left = world_.table.KeepAlive(*Find(*session));
    ASSERT_EQ(CodeOf(left), session->kind == LeaseKind::kTtl ? StatusCode::kOk : StatusCode::kFailedPrecondition);
    if (left.ok()) {
      ASSERT_EQ(*left, session->ttl);
    }
  }

  void Forget() {
    for (auto at = buffers_.begin(); at != buffers_.end();) {
      at = at->second.listed || at->second.pins > 0 ? std::next(at) : buffers_.erase(at);
    }
    for (auto at = sessions_.begin(); at != sessions_.end();) {
      const bool holds = at->second.open || !at->second.queue.empty() ||
                         std::any_of(buffers_.begin(), buffers_.end(),
                                     [&](const auto& entry) { return entry.second.session == at->first; });
      at = holds ? std::next(at) : sessions_.erase(at);
    }
  }

  void Check() {
    ASSERT_TRUE(AwaitIdle(world_.reaper));
    for (const auto& [key, buffer] : buffers_) {
      if (buffer.released.has_value()) {
        ASSERT_EQ(buffer.released->gone(), buffer.pins == 0);
      }
    }
    Forget();
    std::size_t open = 0, ending = 0, quarantined = 0, listed = 0;
    for (const auto& [key, session] : sessions_) {
      ++(session.open ? open : ending);
      quarantined += session.quarantined ? 1 : 0;
    }
    for (const auto& [key, buffer] : buffers_) listed += buffer.listed ? 1 : 0;
    // The device lets go of a session a moment after its answer.
    ASSERT_TRUE(Eventually([&] { return world_.table.Counts().ending == ending; }))
        << world_.table.Counts().ending << " ending, not " << ending;
    const SessionCounts counts = world_.table.Counts();
    ASSERT_EQ(counts.sessions, open);
    ASSERT_EQ(counts.quarantined, quarantined);
    ASSERT_EQ(counts.buffers, listed);
    ASSERT_EQ(counts.bytes_held, Held([](const ModelBuffer&) { return true; }).second);
    ASSERT_EQ(world_.executor->in_flight(), InFlight());
    CheckSessions();
    CheckBuffers();
  }

  void CheckSessions() {
    const auto rows = world_.table.ListSessions([](const Peer&) { return true; }).rows;
    ASSERT_EQ(rows.size(), sessions_.size());
    for (const auto& [key, session] : sessions_) {
      const auto row =
          std::find_if(rows.begin(), rows.end(), [&](const SessionRow& r) { return r.id == session.token; });
      ASSERT_NE(row, rows.end());
      ASSERT_EQ(row->state, session.open          ? SessionState::kOpen
                            : session.quarantined ? SessionState::kQuarantined
                                                  : SessionState::kEnding);
      const int number = key;
      const auto held = Held([number](const ModelBuffer& buffer) { return buffer.session == number; });
      ASSERT_EQ(row->memory.buffers, held.first);
      ASSERT_EQ(row->memory.bytes, held.second);
      ASSERT_EQ(row->in_flight, static_cast<std::int64_t>(session.queue.size()));
      ASSERT_EQ(row->lease, session.kind);
    }
  }

  void CheckBuffers() {
    const auto rows = world_.table.ListBuffers([](const Peer&) { return true; }).rows;
    for (const auto& [key, buffer] : buffers_) {
      const auto row = std::find_if(rows.begin(), rows.end(), [&](const BufferRow& r) { return r.id == buffer.id; });
      ASSERT_EQ(row != rows.end(), buffer.listed);
      if (!buffer.listed) continue;
      ASSERT_EQ(row->users, buffer.pins);
      ASSERT_EQ(row->shares.size(), buffer.shares.size());
    }
  }

  std::mt19937_64 random_;
  LifecycleWorld world_;
  std::map<int, ModelSession> sessions_;  // that are open, or hold anything
  std::map<int, ModelBuffer> buffers_;    // that are listed, or used
  std::vector<Id> former_;
  std::vector<std::size_t> former_principal_;
  int next_ = 0;
  int opened_ = 0, made_ = 0, computed_ = 0, refused_ = 0, dropped_ = 0, quarantines_ = 0;
};

TEST(LifecycleModelTest, RandomLivesMatchTheModel) {
  spdlog::set_level(spdlog::level::off);  // of sessions that are stuck, which is the point
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "TESSERA_TEST_SEED=" << seed);
  Model model(seed);
  for (int step = 0; step < 30'000; ++step) {
    SCOPED_TRACE(testing::Message() << "step " << step);
    ASSERT_NO_FATAL_FAILURE(model.Step());
    ASSERT_FALSE(testing::Test::HasFailure());
  }
  model.Finish();
}

}  // namespace
}  // namespace tessera::server
