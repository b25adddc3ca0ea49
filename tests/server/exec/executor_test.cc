// The executor over the real CPU device: right results, bounded queues, order, ends of sessions, and draining. Launches
// are held back by a gate in `still_wanted`, which a device thread asks right before the launch.
#include "server/exec/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "server/exec/cpu_device.h"
#include "tests/oracle/gemm_oracle.h"
#include "tests/oracle/test_data.h"
#include "tests/server/exec/bound_memory.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

constexpr auto kPatience = 30s;  // only a broken executor makes a test wait so long

class Gate {
 public:
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // Called by the device thread.
  absl::Status Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    return changed_.wait_for(lock, kPatience, [this] { return open_; }) ? absl::OkStatus()
                                                                        : absl::InternalError("the gate stayed shut");
  }
  bool AwaitArrival() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kPatience, [this] { return arrived_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrived_ = 0;
};

// One product and what became of it.
class Product {
 public:
  explicit Product(const oracle::GemmCase& gemm_case, std::uint64_t seed = 1)
      : case_(gemm_case), problem_(gemm_case, seed) {}

  Submission Make(std::shared_ptr<Session> session) {
    Submission operation;
    operation.ops.resize(1);
    const kernels::GemmParams& params = problem_.params();
    operation.ops[0].params = params;
    operation.ops[0].problem = {
        .gemm_class = {.a = case_.a,
                       .b = case_.b,
                       .out = case_.d,
                       .layout = kernels::GemmLayoutOf(case_.layout[0] == 'N', case_.layout[1] == 'T')},
        .batch = oracle::BatchCount(params),
        .m = params.m,
        .n = params.n,
        .k = params.k};
    operation.session = std::move(session);
    operation.still_wanted = [] { return absl::OkStatus(); };
    operation.done = [this](const absl::Status& status, std::span<const OperationReport> reports) {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++calls_;
      status_ = status;
      report_ = reports.front();
      finished_.notify_all();
    };
    return operation;
  }

  absl::Status Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!finished_.wait_for(lock, kPatience, [this] { return calls_ > 0; })) return absl::InternalError("no answer");
    return status_;
  }

  int calls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }
  OperationReport report() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return report_;
  }

  void ExpectRight() {
    const oracle::GemmTruth truth = oracle::ComputeGemm(problem_.params(), problem_.types());
    const oracle::Verdict verdict = oracle::CheckGemm(problem_.params(), problem_.types(), truth);
    EXPECT_TRUE(verdict.ok) << case_.Describe() << ": " << verdict.wrong << " wrong, first " << verdict.first;
    std::string where;
    EXPECT_TRUE(problem_.GuardsIntact(&where)) << case_.Describe() << ": " << where;
  }

  // D still holds what construction put there.
  void ExpectUntouched() {
    const oracle::GemmTruth truth = oracle::ComputeGemm(problem_.params(), problem_.types());
    const oracle::Verdict verdict = oracle::CheckGemm(problem_.params(), problem_.types(), truth);
    EXPECT_EQ(verdict.wrong, static_cast<std::int64_t>(truth.value.size())) << "part of the output was written";
  }

 private:
  const oracle::GemmCase case_;
  oracle::GemmProblem problem_;
  std::mutex mutex_;
  std::condition_variable finished_;
  int calls_ = 0;
  absl::Status status_;
  OperationReport report_;
};

// Enough work that the device takes it to its own threads.
oracle::GemmCase Queued() {
  return {.m = 33, .n = 31, .k = 40};
}

// So little that the device does it on the thread that submits it, if the stream is idle.
oracle::GemmCase Small() {
  return {.m = 5, .n = 7, .k = 9};
}

std::vector<std::string> CatalogueIds() {
  std::vector<std::string> ids;
  for (const kernels::GemmVariant& variant : kernels::GemmVariants()) ids.emplace_back(variant.info.id);
  return ids;
}

class ExecutorTest : public ::testing::Test {
 protected:
  void SetUp() override { Start({.queue_max = 1'000, .queue_per_session_max = 100}); }

  void Start(const ExecutorOptions& options, int threads = 3) {
    TearDown();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeCpuDevice({.threads = threads, .workspace_bytes_max = 1 << 24}));
    executor_ = std::make_unique<Executor>(std::move(devices), std::nullopt, options, metrics_);
  }

  void TearDown() override {
    table_.EndAllSessions(SessionEnd::kDrained);  // sessions hold streams of the executor's devices
    EXPECT_TRUE(AwaitIdle(reaper_));              // which the reaper uses until it has dropped their work
    executor_.reset();
  }

  std::shared_ptr<Session> OpenSession() { return OpenTestSession(table_); }
  std::shared_ptr<Session> OpenSessionOf(const Peer& peer) {
    const auto token = table_.OpenSession(peer, 1min, "timed");
    return token.ok() ? table_.FindSession(peer, *token).value_or(nullptr) : nullptr;
  }

  bool Shows(const std::string& line) const {
    return ("\n" + metrics_.Serialize()).find("\n" + line + "\n") != std::string::npos;
  }

  void ExpectQuiet() {
    EXPECT_TRUE(executor_->AwaitIdle(30s));
    EXPECT_EQ(executor_->in_flight(), 0U);
    EXPECT_TRUE(Shows("tessera_in_flight 0"));
    EXPECT_TRUE(Shows("tessera_queue_depth 0"));
  }

  // Submits an operation that holds its session's stream until `gate` opens, and waits until it does.
  void Block(Product& product, Gate& gate, std::shared_ptr<Session> session) {
    Submission operation = product.Make(std::move(session));
    operation.still_wanted = [&gate] { return gate.Pass(); };
    executor_->Submit(std::move(operation));
    ASSERT_TRUE(gate.AwaitArrival());
  }

  Metrics metrics_{MetricsOptions{.version = "test", .variants = CatalogueIds()}};
  Reaper reaper_{std::chrono::seconds(10), metrics_};
  std::unique_ptr<Executor> executor_;
  SessionTable table_{1,
                      {.sessions_max = 99,
                       .leases_max = 99,
                       .buffers_per_session_max = 99,
                       .buffer_bytes_max = 1U << 24U,
                       .session_buffer_bytes_max = 1U << 24U},
                      metrics_,
                      reaper_,
                      [this](const StreamSpec& spec) { return executor_->MakeLane(spec); }};
};

TEST_F(ExecutorTest, ProductsAreRightAndReported) {
  for (const char* layout : {"NT", "NN", "TN", "TT"}) {
    for (const bool with_session : {false, true}) {
      oracle::GemmCase gemm_case{.layout = layout, .m = 33, .n = 50, .k = 129, .bias = oracle::BiasMode::kF32};
      Product product(gemm_case);
      executor_->Submit(product.Make(with_session ? OpenSession() : nullptr));
      const absl::Status status = product.Await();
      ASSERT_TRUE(status.ok()) << status;
      product.ExpectRight();
      const OperationReport report = product.report();
      EXPECT_THAT(std::string(report.variant), StartsWith("gemm.cpu.bf16_bf16.f32.fast." + std::string(layout) + "/"));
      EXPECT_EQ(report.backend, kernels::Backend::kCpu);
      EXPECT_EQ(report.flops, 2U * 33 * 50 * 129);
      EXPECT_GE(report.split, 1);
    }
  }
  ExpectQuiet();
  EXPECT_TRUE(Shows("tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"ok\"} 8"));
}

TEST_F(ExecutorTest, PinsAreGoneBeforeTheAnswer) {
  const std::shared_ptr<Session> session = OpenSession();
  ASSERT_NE(session, nullptr);
  const auto buffer = table_.AllocateBuffer(*session, 64);
  ASSERT_TRUE(buffer.ok());
  const auto users = [this] { return table_.ListBuffers([](const Peer&) { return true; }).rows[0].users; };
  Gate gate;
  Product product(Queued());
  Submission operation = product.Make(session);
  operation.ops[0].pins.push_back(*table_.PinBuffer(*session, buffer->id, BufferAccess::kRead));
  operation.still_wanted = [&gate] { return gate.Pass(); };
  std::uint32_t users_at_answer = 99;
  operation.done = [&, done = operation.done](const absl::Status& status, std::span<const OperationReport> reports) {
    users_at_answer = users();
    done(status, reports);
  };
  executor_->Submit(std::move(operation));
  ASSERT_TRUE(gate.AwaitArrival());
  EXPECT_EQ(users(), 1U);
  gate.Open();
  EXPECT_TRUE(product.Await().ok());
  EXPECT_EQ(users_at_answer, 0U);
}

TEST_F(ExecutorTest, QueueOfASessionIsBounded) {
  Start({.queue_max = 10, .queue_per_session_max = 2});
  const std::shared_ptr<Session> session = OpenSession();
  Gate gate;
  Product running(Queued()), waiting(Queued()), refused(Queued()), others(Queued()), later(Queued());
  Block(running, gate, session);
  executor_->Submit(waiting.Make(session));
  executor_->Submit(refused.Make(session));
  EXPECT_EQ(refused.calls(), 1) << "a refusal answers at once";
  EXPECT_EQ(refused.Await().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(MessageOf(refused.Await()), HasSubstr("queue_per_session_max"));
  refused.ExpectUntouched();
  EXPECT_EQ(executor_->in_flight(), 2U);
  executor_->Submit(others.Make(OpenSession()));
  EXPECT_TRUE(others.Await().ok()) << "another session has room";
  EXPECT_EQ(waiting.calls(), 0);
  gate.Open();
  EXPECT_TRUE(running.Await().ok());
  EXPECT_TRUE(waiting.Await().ok());
  executor_->Submit(later.Make(session));
  EXPECT_TRUE(later.Await().ok()) << "the queue has room again as soon as the answer is there";
  EXPECT_TRUE(Shows("tessera_refused_total{limit=\"queue_per_session_max\"} 1"));
  ExpectQuiet();
}

TEST_F(ExecutorTest, QueueOfAllIsBounded) {
  Start({.queue_max = 2, .queue_per_session_max = 10});
  Gate gate;
  Product running(Queued()), waiting(Queued()), refused(Queued()), anonymous(Queued());
  const std::shared_ptr<Session> session = OpenSession();
  Block(running, gate, session);
  EXPECT_TRUE(Shows("tessera_in_flight 1"));
  executor_->Submit(waiting.Make(session));
  EXPECT_TRUE(Shows("tessera_in_flight 2"));
  executor_->Submit(refused.Make(OpenSession()));
  executor_->Submit(anonymous.Make(nullptr));
  for (Product* product : {&refused, &anonymous}) {
    EXPECT_EQ(product->Await().code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(MessageOf(product->Await()), HasSubstr("queue_max"));
  }
  gate.Open();
  EXPECT_TRUE(waiting.Await().ok());
  EXPECT_TRUE(Shows("tessera_refused_total{limit=\"queue_max\"} 2"));
  ExpectQuiet();
}

// One place in the queue for all that a principal has: its sessions and its calls without one.
TEST_F(ExecutorTest, QueueOfAPrincipalIsBounded) {
  Start({.queue_max = 10, .queue_per_session_max = 10, .queue_per_principal_max = 3});
  const std::shared_ptr<Session> first = OpenSession();
  const std::shared_ptr<Session> second = OpenSession();
  const std::shared_ptr<Session> others = OpenSessionOf({.pid = 2, .uid = 2000, .gid = 2000});
  ASSERT_TRUE(first && second && others);
  const std::shared_ptr<Account> account = first->account();
  ASSERT_EQ(second->account(), account);
  Gate gate, free_gate;
  Product running(Queued()), waiting(Queued()), free(Queued());
  Block(running, gate, first);
  executor_->Submit(waiting.Make(first));
  Submission without_session = free.Make(nullptr);
  without_session.account = account;
  without_session.still_wanted = [&free_gate] { return free_gate.Pass(); };
  executor_->Submit(std::move(without_session));
  ASSERT_TRUE(free_gate.AwaitArrival());

  Product refused(Queued()), refused_free(Small()), of_nobody(Queued()), of_other(Queued());
  executor_->Submit(refused.Make(second));
  Submission too_much = refused_free.Make(nullptr);
  too_much.account = account;
  executor_->Submit(std::move(too_much));
  for (Product* product : {&refused, &refused_free}) {
    EXPECT_EQ(product->calls(), 1) << "a refusal answers at once";
    EXPECT_EQ(product->Await().code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(MessageOf(product->Await()), StartsWith("queue_per_principal_max: "));
    product->ExpectUntouched();
  }
  EXPECT_EQ(second->lane()->in_flight(), 0);
  executor_->Submit(of_other.Make(others));
  EXPECT_TRUE(of_other.Await().ok()) << "another principal has room";
  executor_->Submit(of_nobody.Make(nullptr));
  EXPECT_TRUE(of_nobody.Await().ok());

  free_gate.Open();
  EXPECT_TRUE(free.Await().ok());
  Product later(Small());
  executor_->Submit(later.Make(second));
  EXPECT_TRUE(later.Await().ok()) << "there is room again as soon as the answer is there";
  gate.Open();
  EXPECT_TRUE(running.Await().ok());
  EXPECT_TRUE(waiting.Await().ok());
  EXPECT_TRUE(Shows("tessera_refused_total{limit=\"queue_per_principal_max\"} 2"));
  ExpectQuiet();
  EXPECT_EQ(account->in_flight, 0);
  EXPECT_EQ(others->account()->in_flight, 0);
}

TEST_F(ExecutorTest, OneSessionRunsInOrder) {
  const std::shared_ptr<Session> session = OpenSession();
  Gate gate;
  Product first(Queued());
  Block(first, gate, session);
  std::mutex mutex;
  std::vector<int> started, finished, expected;
  std::vector<std::unique_ptr<Product>> products;
  for (int i = 0; i < 50; ++i) {
    products.push_back(std::make_unique<Product>(i % 2 == 0 ? Small() : Queued()));
    Submission operation = products.back()->Make(session);
    operation.still_wanted = [&mutex, &started, i] {
      const std::lock_guard<std::mutex> lock(mutex);
      started.push_back(i);
      return absl::OkStatus();
    };
    operation.done = [&mutex, &finished, i, done = operation.done](const absl::Status& status,
                                                                   std::span<const OperationReport> reports) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        finished.push_back(i);
      }
      done(status, reports);
    };
    executor_->Submit(std::move(operation));
    expected.push_back(i);
  }
  gate.Open();
  for (const auto& product : products) EXPECT_TRUE(product->Await().ok());
  EXPECT_EQ(started, expected);
  EXPECT_EQ(finished, expected);
}

TEST_F(ExecutorTest, SmallOperationsRunOnTheCaller) {
  for (const bool with_session : {false, true}) {
    Product product(Small());
    Submission operation = product.Make(with_session ? OpenSession() : nullptr);
    std::thread::id ran_on;
    operation.still_wanted = [&ran_on] {
      ran_on = std::this_thread::get_id();
      return absl::OkStatus();
    };
    executor_->Submit(std::move(operation));
    EXPECT_EQ(product.calls(), 1) << "answered before Submit returns";
    EXPECT_EQ(ran_on, std::this_thread::get_id());
    EXPECT_TRUE(product.Await().ok());
    product.ExpectRight();
  }
  ExpectQuiet();
}

TEST_F(ExecutorTest, WorkOfAnEmptyInnerDimensionIsNotSmall) {
  Product product({.m = 200, .n = 200, .k = 0});
  Submission operation = product.Make(OpenSession());
  std::thread::id ran_on;
  operation.still_wanted = [&ran_on] {
    ran_on = std::this_thread::get_id();
    return absl::OkStatus();
  };
  executor_->Submit(std::move(operation));
  EXPECT_TRUE(product.Await().ok());
  EXPECT_NE(ran_on, std::this_thread::get_id()) << "40,000 elements are written though none is multiplied";
  product.ExpectRight();
}

// The stream is taken while its small operation runs: what `done` submits to it waits for its turn.
TEST_F(ExecutorTest, AnAnswerMaySubmitTheNextOperation) {
  const std::shared_ptr<Session> session = OpenSession();
  Product first(Small()), second(Small());
  Submission operation = first.Make(session);
  operation.done = [&, done = operation.done](const absl::Status& status, std::span<const OperationReport> reports) {
    executor_->Submit(second.Make(session));
    done(status, reports);
  };
  executor_->Submit(std::move(operation));
  EXPECT_TRUE(first.Await().ok());
  EXPECT_TRUE(second.Await().ok());
  second.ExpectRight();
  ExpectQuiet();
}

TEST_F(ExecutorTest, SessionsRunSideBySide) {
  Gate gate;
  Product held(Queued()), other(Queued()), anonymous(Queued());
  const std::shared_ptr<Session> session = OpenSession();
  Block(held, gate, session);
  executor_->Submit(other.Make(OpenSession()));
  executor_->Submit(anonymous.Make(nullptr));
  EXPECT_TRUE(other.Await().ok());
  EXPECT_TRUE(anonymous.Await().ok());
  EXPECT_EQ(held.calls(), 0);
  gate.Open();
  EXPECT_TRUE(held.Await().ok());
}

// One worker: a session with a long queue and one with a single operation take turns.
TEST_F(ExecutorTest, ALongQueueDoesNotKeepOtherSessionsWaiting) {
  Start({.queue_max = 1'000, .queue_per_session_max = 100}, /*threads=*/1);
  const std::shared_ptr<Session> busy = OpenSession();
  const std::shared_ptr<Session> other = OpenSession();
  Gate gate;
  Product first(Queued());
  Block(first, gate, busy);
  std::mutex mutex;
  std::string order;
  const auto submit = [&](Product& product, const std::shared_ptr<Session>& session, char name) {
    Submission operation = product.Make(session);
    operation.still_wanted = [&mutex, &order, name] {
      const std::lock_guard<std::mutex> lock(mutex);
      order += name;
      return absl::OkStatus();
    };
    executor_->Submit(std::move(operation));
  };
  std::vector<std::unique_ptr<Product>> queued;
  for (int i = 0; i < 20; ++i) {
    queued.push_back(std::make_unique<Product>(Queued()));
    submit(*queued.back(), busy, 'b');
  }
  Product single(Queued());
  submit(single, other, 'o');
  gate.Open();
  EXPECT_TRUE(single.Await().ok());
  for (const auto& product : queued) EXPECT_TRUE(product->Await().ok());
  EXPECT_LE(order.find('o'), 1U) << order;
  ExpectQuiet();
}

TEST_F(ExecutorTest, EndOfTheSessionDropsItsQueuedWork) {
  const std::shared_ptr<Session> session = OpenSession();
  Gate gate;
  Product running(Queued());
  Block(running, gate, session);
  std::vector<std::unique_ptr<Product>> queued;
  for (int i = 0; i < 5; ++i) {
    queued.push_back(std::make_unique<Product>(Queued()));
    executor_->Submit(queued.back()->Make(session));
  }
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kLeaseLost).ok());
  gate.Open();
  EXPECT_TRUE(running.Await().ok()) << "work that was being launched finishes";
  running.ExpectRight();
  for (const auto& product : queued) {
    EXPECT_EQ(product->Await().code(), StatusCode::kCancelled);
    product->ExpectUntouched();
  }
  ExpectQuiet();
  for (const auto& product : queued) EXPECT_EQ(product->calls(), 1);
  EXPECT_TRUE(Shows("tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"cancelled\"} 5"));
}

TEST_F(ExecutorTest, QueuedWorkOfAnEndedSessionIsAnsweredWhileItsWorkRuns) {
  std::shared_ptr<Session> session = OpenSession();
  ASSERT_NE(session, nullptr);
  Gate gate;
  Product running(Queued());
  Block(running, gate, session);
  std::vector<std::unique_ptr<Product>> queued;
  for (int i = 0; i < 5; ++i) {
    queued.push_back(std::make_unique<Product>(i % 2 == 0 ? Queued() : Small()));
    executor_->Submit(queued.back()->Make(session));
  }
  EXPECT_EQ(session->lane()->in_flight(), 6);
  ASSERT_TRUE(table_.EndSession(session->id(), SessionEnd::kClosed).ok());
  for (const auto& product : queued) {
    EXPECT_EQ(product->Await().code(), StatusCode::kCancelled) << "the gate is still shut";
    product->ExpectUntouched();
  }
  ASSERT_TRUE(AwaitIdle(reaper_));
  EXPECT_EQ(running.calls(), 0);
  EXPECT_EQ(executor_->in_flight(), 1U);
  EXPECT_EQ(session->lane()->in_flight(), 1);
  EXPECT_TRUE(Shows("tessera_in_flight 1"));
  EXPECT_TRUE(Shows("tessera_queue_depth 1"));
  session.reset();
  EXPECT_EQ(table_.Counts().ending, 1U) << "the running operation holds it";
  gate.Open();
  EXPECT_TRUE(running.Await().ok());
  running.ExpectRight();
  ExpectQuiet();
  EXPECT_TRUE(Eventually([&] { return table_.Counts().ending == 0; }));
  for (const auto& product : queued) EXPECT_EQ(product->calls(), 1);
  EXPECT_TRUE(Shows("tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"cancelled\"} 5"));
}

TEST_F(ExecutorTest, WantedWorkKeepsItsOrderWhereUnwantedIsDropped) {
  const std::shared_ptr<Session> session = OpenSession();
  ASSERT_NE(session, nullptr);
  Gate gate;
  Product first(Queued());
  Block(first, gate, session);
  std::mutex mutex;
  std::vector<int> finished;
  std::vector<std::unique_ptr<Product>> products;
  for (int i = 0; i < 20; ++i) {
    products.push_back(std::make_unique<Product>(Queued()));
    Submission operation = products.back()->Make(session);
    if (i % 2 == 1) operation.still_wanted = [] { return absl::DeadlineExceededError("too late"); };
    operation.done = [&mutex, &finished, i, done = operation.done](const absl::Status& status,
                                                                   std::span<const OperationReport> reports) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (status.ok()) finished.push_back(i);
      }
      done(status, reports);
    };
    executor_->Submit(std::move(operation));
  }
  session->lane()->DropUnwanted();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(products[i]->calls(), i % 2) << i;
  EXPECT_EQ(session->lane()->in_flight(), 11);
  session->lane()->DropUnwanted();
  EXPECT_EQ(session->lane()->in_flight(), 11) << "nothing more is unwanted";
  gate.Open();
  std::vector<int> expected;
  for (int i = 0; i < 20; ++i) {
    if (i % 2 == 0) expected.push_back(i);
    EXPECT_EQ(products[i]->Await().code(), i % 2 == 0 ? StatusCode::kOk : StatusCode::kDeadlineExceeded);
    if (i % 2 == 0) products[i]->ExpectRight();
  }
  EXPECT_EQ(finished, expected);
  ExpectQuiet();
}

// The turn of a stream comes while nothing is queued any more; the stream must take work afterwards.
TEST_F(ExecutorTest, StreamGoesOnAfterAllOfItsWorkWasDropped) {
  Start({.queue_max = 100, .queue_per_session_max = 100}, /*threads=*/1);
  const std::shared_ptr<Session> busy = OpenSession();
  const std::shared_ptr<Session> session = OpenSession();
  ASSERT_TRUE(busy && session);
  Gate gate;
  Product running(Queued());
  Block(running, gate, busy);  // the only thread
  for (int round = 0; round < 3; ++round) {
    Product dropped(Queued());
    Submission operation = dropped.Make(session);
    operation.still_wanted = [] { return absl::CancelledError("not wanted"); };
    executor_->Submit(std::move(operation));
    session->lane()->DropUnwanted();
    EXPECT_EQ(dropped.Await().code(), StatusCode::kCancelled);
  }
  gate.Open();
  EXPECT_TRUE(running.Await().ok());
  for (const oracle::GemmCase& gemm_case : {Queued(), Small()}) {
    Product later(gemm_case);
    executor_->Submit(later.Make(session));
    EXPECT_TRUE(later.Await().ok());
    later.ExpectRight();
  }
  ExpectQuiet();
}

TEST_F(ExecutorTest, DroppingWhileOthersSubmitAnswersEverybodyOnce) {
  const std::shared_ptr<Session> session = OpenSession();
  ASSERT_NE(session, nullptr);
  std::atomic<bool> stop{false};
  std::thread drops([&] {
    while (!stop) session->lane()->DropUnwanted();
  });
  std::vector<std::unique_ptr<Product>> products;
  for (int i = 0; i < 400; ++i) {
    products.push_back(std::make_unique<Product>(Queued()));
    Submission operation = products.back()->Make(session);
    if (i % 3 == 0) operation.still_wanted = [] { return absl::CancelledError("not wanted"); };
    executor_->Submit(std::move(operation));
    if (i >= 90) products[i - 90]->Await().IgnoreError();  // within the session's queue
  }
  for (int i = 0; i < 400; ++i) {
    EXPECT_EQ(products[i]->Await().code(), i % 3 == 0 ? StatusCode::kCancelled : StatusCode::kOk) << i;
  }
  stop = true;
  drops.join();
  ExpectQuiet();
  for (const auto& product : products) EXPECT_EQ(product->calls(), 1);
  EXPECT_EQ(session->lane()->in_flight(), 0);
}

TEST_F(ExecutorTest, DeadlineAndCancelAreHonouredBeforeTheLaunch) {
  const std::shared_ptr<Session> session = OpenSession();
  for (const StatusCode code : {StatusCode::kDeadlineExceeded, StatusCode::kCancelled}) {
    Product dropped(Queued()), next(Queued());
    Submission operation = dropped.Make(session);
    operation.still_wanted = [code] { return absl::Status(code, "not wanted"); };
    executor_->Submit(std::move(operation));
    executor_->Submit(next.Make(session));
    EXPECT_EQ(dropped.Await().code(), code);
    dropped.ExpectUntouched();
    EXPECT_TRUE(next.Await().ok()) << "the stream goes on";
    next.ExpectRight();
  }
  ExpectQuiet();
  EXPECT_TRUE(Shows("tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"expired\"} 1"));
  EXPECT_TRUE(Shows("tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"cancelled\"} 1"));
}

TEST_F(ExecutorTest, DrainingRefusesNewWorkAndWaitsForOld) {
  Gate gate;
  Product running(Queued()), refused(Queued());
  const std::shared_ptr<Session> session = OpenSession();
  Block(running, gate, session);
  executor_->StopAccepting();
  executor_->Submit(refused.Make(session));
  EXPECT_EQ(refused.Await().code(), StatusCode::kUnavailable);
  refused.ExpectUntouched();
  EXPECT_FALSE(executor_->AwaitIdle(20ms));
  gate.Open();
  EXPECT_TRUE(executor_->AwaitIdle(30s));
  EXPECT_TRUE(running.Await().ok());
  running.ExpectRight();
  ExpectQuiet();
}

TEST_F(ExecutorTest, NamedBackendsAreStrict) {
  for (const kernels::Backend backend : {kernels::Backend::kCuda, kernels::Backend::kVendor}) {
    Product product(Queued());
    Submission operation = product.Make(nullptr);
    operation.backend = backend;
    executor_->Submit(std::move(operation));
    EXPECT_EQ(product.calls(), 1);
    EXPECT_EQ(product.Await().code(), StatusCode::kUnimplemented);
    EXPECT_THAT(MessageOf(product.Await()), StartsWith("options.backend: "));
    product.ExpectUntouched();
  }
  Product product(Queued());
  Submission operation = product.Make(nullptr);
  operation.backend = kernels::Backend::kCpu;
  executor_->Submit(std::move(operation));
  EXPECT_TRUE(product.Await().ok());
  ExpectQuiet();
}

TEST_F(ExecutorTest, ConfiguredDefaultFallsBackToWhatThereIs) {
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(MakeCpuDevice({.threads = 1, .workspace_bytes_max = 0}));
  const Executor executor(std::move(devices), kernels::Backend::kCuda, {.queue_max = 1, .queue_per_session_max = 1},
                          metrics_);
  EXPECT_EQ(executor.default_backend(), kernels::Backend::kCpu);
  for (const BackendState& state : executor.Backends()) {
    EXPECT_EQ(state.available, state.backend == kernels::Backend::kCpu);
    EXPECT_FALSE(state.reason.empty());
  }
}

TEST_F(ExecutorTest, EmptyProductsAnswerWithoutALaunch) {
  const std::vector<oracle::GemmCase> cases = {
      {.m = 0, .n = 7, .k = 9}, {.m = 5, .n = 0, .k = 9}, {.m = 5, .n = 7, .k = 9, .batch = {1, 0, 2}}};
  for (const oracle::GemmCase& gemm_case : cases) {
    for (const bool with_session : {false, true}) {
      Product product(gemm_case);
      executor_->Submit(product.Make(with_session ? OpenSession() : nullptr));
      EXPECT_TRUE(product.Await().ok()) << gemm_case.Describe();
      EXPECT_EQ(product.calls(), 1);
      EXPECT_TRUE(product.report().variant.empty());
      EXPECT_EQ(product.report().flops, 0U);
      product.ExpectRight();
    }
  }
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("outcome=\"ok\"} 6"));
  ExpectQuiet();
}

TEST_F(ExecutorTest, NoTermsGiveTheBias) {
  Product product({.m = 5, .n = 7, .k = 0, .bias = oracle::BiasMode::kBf16});
  executor_->Submit(product.Make(nullptr));
  ASSERT_TRUE(product.Await().ok()) << product.Await();
  product.ExpectRight();
}

oracle::GemmCase RandomSmallCase(oracle::Random& random) {
  constexpr struct {
    DType a, b;
  } kPairs[] = {{DType::kBf16, DType::kBf16}, {DType::kE4m3, DType::kE5m2}, {DType::kE4m3, DType::kE4m3},
                {DType::kS8, DType::kS8},     {DType::kBf16, DType::kS8},   {DType::kS8, DType::kBf16}};
  constexpr const char* kLayouts[] = {"NT", "NN", "TN", "TT"};
  const auto& pair = kPairs[random.Int(0, 5)];
  const DType out = random.Int(0, 1) == 0 ? DType::kBf16 : DType::kF32;
  oracle::GemmCase gemm_case = oracle::RandomCase(random, pair.a, pair.b, out, kLayouts[random.Int(0, 3)]);
  gemm_case.m = std::min<std::int64_t>(gemm_case.m, 24);
  gemm_case.n = std::min<std::int64_t>(gemm_case.n, 24);
  gemm_case.k = std::min<std::int64_t>(gemm_case.k, 200);
  return gemm_case;
}

TEST_F(ExecutorTest, ManyThreadsGetRightResults) {
  constexpr std::uint64_t kSeed = 8'675'309;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  constexpr int kThreads = 4;
  constexpr int kEach = 500;
  constexpr int kWindow = 10;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      oracle::Random random(kSeed + static_cast<std::uint64_t>(t));
      const std::shared_ptr<Session> session = OpenSession();
      ASSERT_NE(session, nullptr);
      for (int i = 0; i < kEach; i += kWindow) {
        std::vector<std::unique_ptr<Product>> window;
        for (int w = 0; w < kWindow; ++w) {
          window.push_back(std::make_unique<Product>(RandomSmallCase(random), random.Next()));
          executor_->Submit(window.back()->Make(random.Int(0, 3) == 0 ? nullptr : session));
        }
        for (const auto& product : window) {
          const absl::Status status = product->Await();
          EXPECT_TRUE(status.ok()) << status;
          EXPECT_EQ(product->calls(), 1);
          product->ExpectRight();
        }
        if (HasFailure()) return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectQuiet();
  EXPECT_TRUE(Shows("tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"ok\"} 2000"));
  EXPECT_TRUE(Shows("tessera_operations_total{backend=\"cpu\",op=\"gemm\",outcome=\"failed\"} 0"));
}

}  // namespace
}  // namespace tessera::server
