// Random work over the streams and timelines of several sessions, whose order among each other is told by waits and
// signals only: every result and every fate must be what running it one after the other gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/server/exec/order_world.h"

namespace tessera::server {
namespace {

using absl::StatusCode;

constexpr int kSessions = 3;
constexpr int kStreamsEach = 3;  // the session's own among them
constexpr int kInputs = 6;       // matrices of each extent that are there before
constexpr int kHot = 5;          // of each extent that are written again and again
constexpr std::array<int, 2> kExtents = {kSmallSquare, kLargeSquare};

struct Point {
  int timeline = 0;
  std::uint64_t value = 0;
};

struct Product {
  int a = 0, b = 0, d = 0;
};

struct Node {
  int stream = 0;
  std::vector<Product> products;
  std::vector<Point> wait;
  std::vector<Point> signal;
  StatusCode fate = StatusCode::kOk;
};

// The work, and what becomes of it when each node runs after all before it.
class Dag {
 public:
  Dag(std::uint64_t seed, int nodes) : random_(seed), num_timelines_(kSessions * kStreamsEach) {
    for (const int extent : kExtents) {
      for (int i = 0; i < kInputs; ++i) AddMatrix(Matrix::Random(extent, random_));
    }
    for (const int extent : kExtents) {
      for (int i = 0; i < kHot; ++i) hot_.push_back(AddMatrix(Matrix::Random(extent, random_)));
    }
    for (int i = 0; i < nodes; ++i) AddNode();
  }

  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<Matrix>& matrices() const { return matrices_; }            // as they are before
  const std::vector<std::vector<int>>& expected() const { return expected_; }  // and after
  int num_timelines() const { return num_timelines_; }
  int Count(StatusCode fate) const {
    return static_cast<int>(
        std::count_if(nodes_.begin(), nodes_.end(), [fate](const Node& node) { return node.fate == fate; }));
  }

 private:
  int Below(std::size_t n) { return static_cast<int>(random_() % n); }
  bool OneIn(std::size_t n) { return Below(n) == 0; }

  int AddMatrix(Matrix matrix) {
    expected_.push_back(matrix.Values());
    matrices_.push_back(std::move(matrix));
    written_by_.push_back(-1);
    read_by_.emplace_back();
    return static_cast<int>(matrices_.size()) - 1;
  }

  // One that has a value: an input, or what has been computed.
  int Readable(int extent) {
    while (true) {
      const int chosen = Below(matrices_.size());
      if (matrices_[chosen].extent == extent && expected_[chosen].front() != 99) return chosen;
    }
  }

  Product AnyProduct(int extent) {
    Product product{.a = Readable(extent), .b = Readable(extent), .d = -1};
    while (product.d < 0 || product.d == product.a || product.d == product.b) {
      const int hot = hot_[Below(hot_.size())];
      product.d = OneIn(2) || matrices_[hot].extent != extent ? AddMatrix(Matrix(extent)) : hot;
    }
    return product;
  }

  // Which of the points of node `of` to wait for.
  void WaitFor(Node& node, int of) {
    const std::vector<Point>& points = nodes_[of].signal;
    node.wait.push_back(points[Below(points.size())]);
  }

  void AddNode() {
    Node node{.stream = Below(kSessions * kStreamsEach)};
    const int extent = kExtents[OneIn(3) ? 1 : 0];
    const int products = OneIn(4) ? 2 + Below(2) : 1;
    for (int i = 0; i < products; ++i) node.products.push_back(AnyProduct(extent));
    std::set<int> after;
    for (const Product& product : node.products) {
      for (const int read : {product.a, product.b}) after.insert(written_by_[read]);
      after.insert(written_by_[product.d]);
      after.insert(read_by_[product.d].begin(), read_by_[product.d].end());
    }
    if (!nodes_.empty() && OneIn(4)) after.insert(Below(nodes_.size()));  // for no reason
    if (!failed_.empty() && OneIn(12)) after.insert(failed_[Below(failed_.size())]);
    ChooseFate(node, after);
    // In its own stream the order is there without a wait, and a failure is no reason to fail.
    for (const int of : after) {
      if (of >= 0 && (nodes_[of].stream != node.stream || OneIn(5))) WaitFor(node, of);
    }
    std::shuffle(node.wait.begin(), node.wait.end(), random_);
    ChooseSignals(node);
    if (node.fate == StatusCode::kOk) {
      Compute(node);
    } else {
      failed_.push_back(static_cast<int>(nodes_.size()));
    }
    nodes_.push_back(std::move(node));
  }

  // `after` keeps what has run only, but where the failure of the others is this one's fate.
  void ChooseFate(Node& node, std::set<int>& after) {
    std::optional<int> failed;
    for (auto of = after.begin(); of != after.end();) {
      const bool bad = *of >= 0 && nodes_[*of].fate != StatusCode::kOk;
      if (bad) failed = *of;
      of = bad ? after.erase(of) : std::next(of);
    }
    if (OneIn(12)) {
      node.fate = OneIn(2) ? StatusCode::kCancelled : StatusCode::kDeadlineExceeded;
    } else if (failed.has_value()) {
      node.fate = StatusCode::kAborted;
      WaitFor(node, *failed);
    }
  }

  // Each stream has a timeline that counts what runs in it. What fails would be the end of that one: it has its own, as
  // others have now and then.
  void ChooseSignals(Node& node) {
    if (node.fate == StatusCode::kOk) node.signal.push_back({node.stream, ++last_value_[node.stream]});
    if (node.fate != StatusCode::kOk || OneIn(3)) {
      const auto value = 1 + static_cast<std::uint64_t>(Below(1'000));
      node.signal.push_back({num_timelines_++, value});
      if (OneIn(2)) node.signal.push_back({num_timelines_++, value});
    }
  }

  void Compute(const Node& node) {
    const int number = static_cast<int>(nodes_.size());
    for (const Product& product : node.products) {
      expected_[product.d] = TrueProduct(expected_[product.a], expected_[product.b], matrices_[product.d].extent);
      written_by_[product.d] = number;
      read_by_[product.d].clear();
    }
    for (const Product& product : node.products) {
      for (const int read : {product.a, product.b}) read_by_[read].insert(number);
    }
  }

  std::mt19937_64 random_;
  int num_timelines_;
  std::vector<Matrix> matrices_;
  std::vector<std::vector<int>> expected_;
  std::vector<int> hot_;
  std::vector<int> written_by_;         // the last node; -1: none
  std::vector<std::set<int>> read_by_;  // nodes since then
  std::map<int, std::uint64_t> last_value_;
  std::vector<int> failed_;
  std::vector<Node> nodes_;
};

// Runs a Dag: a thread for each session submits its nodes in order, and another drops what is not wanted.
class DagRun {
 public:
  explicit DagRun(const Dag& dag) : dag_(dag), matrices_(dag.matrices()), fates_(dag.nodes().size()) {
    for (int i = 0; i < kSessions; ++i) {
      sessions_.push_back(world_.Open());
      lanes_.push_back(sessions_.back()->lane());
      for (int stream = 1; stream < kStreamsEach; ++stream) lanes_.push_back(world_.OpenStream(*sessions_.back()));
    }
    for (int i = 0; i < dag.num_timelines(); ++i) {
      timelines_.push_back(world_.MakeTimeline(*sessions_[i % kSessions]));
    }
  }

  void Go() {
    std::atomic<bool> stop{false};
    std::jthread ticker([&] {
      while (!stop) {
        world_.executor->Tick();
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    {
      std::vector<std::jthread> submitters;
      for (int session = 0; session < kSessions; ++session) {
        submitters.emplace_back([this, session] {
          for (std::size_t i = 0; i < fates_.size(); ++i) {
            if (dag_.nodes()[i].stream / kStreamsEach == session) Submit(i);
          }
        });
      }
    }
    const bool all = Eventually([this] { return answered_ == fates_.size(); });
    stop = true;
    EXPECT_TRUE(all) << answered_ << " of " << fates_.size() << " answered";
  }

  void Check() {
    for (std::size_t i = 0; i < fates_.size(); ++i) {
      ASSERT_EQ(fates_[i].calls, 1) << "node " << i;
      ASSERT_EQ(fates_[i].code, dag_.nodes()[i].fate) << "node " << i;
    }
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      ASSERT_EQ(matrices_[i].Values(), dag_.expected()[i]) << "matrix " << i;
    }
  }

 private:
  struct Fate {
    std::atomic<int> calls{0};
    std::atomic<StatusCode> code{StatusCode::kUnknown};
  };

  void Submit(std::size_t number) {
    const Node& node = dag_.nodes()[number];
    Submission made{.session = sessions_[static_cast<std::size_t>(node.stream / kStreamsEach)],
                    .lane = lanes_[static_cast<std::size_t>(node.stream)]};
    for (const Product& product : node.products) {
      made.ops.push_back(BindProduct(matrices_[product.a], matrices_[product.b], matrices_[product.d]));
    }
    for (const Point& point : node.wait) made.wait.push_back({timelines_[point.timeline], point.value});
    for (const Point& point : node.signal) made.signal.push_back({timelines_[point.timeline], point.value});
    if (node.fate == StatusCode::kDeadlineExceeded) made.launch_by = std::chrono::steady_clock::now();
    made.still_wanted = [cancelled = node.fate == StatusCode::kCancelled] {
      return cancelled ? absl::CancelledError("by its client") : absl::OkStatus();
    };
    made.done = [this, number](const absl::Status& status, std::span<const OperationReport>) {
      fates_[number].code = status.code();
      ++fates_[number].calls;
      ++answered_;
    };
    world_.Submit(std::move(made));
  }

  const Dag& dag_;
  std::vector<Matrix> matrices_;
  std::vector<Fate> fates_;
  std::atomic<std::size_t> answered_{0};
  OrderWorld world_;
  std::vector<std::shared_ptr<Session>> sessions_;
  std::vector<std::shared_ptr<SessionLane>> lanes_;
  std::vector<std::shared_ptr<Timeline>> timelines_;
};

TEST(OrderModelTest, RandomWorkComputesWhatItDoesInOrder) {
  const std::uint64_t seed = TestSeed();
  for (std::uint64_t round = 0; round < 8; ++round) {
    SCOPED_TRACE(testing::Message() << "TESSERA_TEST_SEED=" << seed << " round " << round);
    const Dag dag(seed + round, /*nodes=*/1'000);
    // What the test is worth.
    ASSERT_GT(dag.Count(StatusCode::kOk), 500);
    ASSERT_GT(dag.Count(StatusCode::kAborted), 20);
    ASSERT_GT(dag.Count(StatusCode::kCancelled), 10);
    ASSERT_GT(dag.Count(StatusCode::kDeadlineExceeded), 10);
    DagRun run(dag);
    run.Go();
    if (HasFatalFailure()) return;
    run.Check();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::server
