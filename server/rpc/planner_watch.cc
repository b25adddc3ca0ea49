#include "server/rpc/planner_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/planner_encode.h"

namespace tessera::server {
namespace {

using namespace std::chrono_literals;

constexpr auto kPumpInterval = 10ms;        // how late a decision may be shown
constexpr std::size_t kDecisionsMax = 256;  // of one message

}  // namespace

WatchPump::~WatchPump() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool WatchPump::Add(const std::shared_ptr<Target>& target, std::size_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (targets_.size() >= most) return false;
  targets_.push_back(target);
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  changed_.notify_all();
  return true;
}

void WatchPump::Remove(const std::shared_ptr<Target>& target) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase(targets_, target);
}

void WatchPump::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    changed_.wait(lock, [this] { return stop_ || !targets_.empty(); });
    // Without the lock: a write may end its call, which is then removed.
    std::vector<std::shared_ptr<Target>> targets = targets_;
    lock.unlock();
    for (const std::shared_ptr<Target>& target : targets) target->Pump();
    targets.clear();
    lock.lock();
    changed_.wait_for(lock, kPumpInterval, [this] { return stop_; });
  }
}

namespace {

// Shared by gRPC, which ends its part with OnDone, and by the pump while it looks at this call.
class WatchReactor final : public grpc::ServerWriteReactor<v1::WatchDecisionsReply>,
                           public WatchPump::Target,
                           public std::enable_shared_from_this<WatchReactor> {
 public:
  WatchReactor(RpcScope& scope, WatchPump& pump) : scope_(scope), pump_(pump) {}

  void Begin(const grpc::CallbackServerContext& context, const v1::WatchDecisionsRequest& request,
             planner::Planner& planner) {
    self_ = shared_from_this();
    status_ = Subscribe(context, request, planner);
    std::unique_lock<std::mutex> lock(mutex_);
    if (!status_.ok()) return FinishOnce(lock);
    lock.unlock();
    StartWrite(&reply_);  // an empty one: the watch has begun
  }

  void Pump() override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (subscription_ == nullptr || writing_ || finished_) return;
    const planner::WatchBatch batch = subscription_->Take(kDecisionsMax);
    if (batch.decisions.empty()) return;
    reply_.Clear();
    reply_.set_lost(batch.lost);
    for (const planner::Decision& decision : batch.decisions) Encode(decision, *reply_.add_decisions());
    writing_ = true;
    lock.unlock();
    StartWrite(&reply_);
  }

  void OnWriteDone(bool ok) override {
    std::unique_lock<std::mutex> lock(mutex_);
    writing_ = false;
    if (!ok) cancelled_ = true;
    if (cancelled_) FinishOnce(lock);
  }

  // The client has left, or the daemon is going.
  void OnCancel() override {
    std::unique_lock<std::mutex> lock(mutex_);
    cancelled_ = true;
    if (!writing_) FinishOnce(lock);  // else when the write is over
  }

  void OnDone() override {
    scope_.Finished(RpcMethod::kPlannerWatchDecisions, status_, start_);
    pump_.Remove(self_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      subscription_.reset();
    }
    const std::shared_ptr<WatchReactor> last = std::move(self_);
  }

 private:
  absl::Status Subscribe(const grpc::CallbackServerContext& context, const v1::WatchDecisionsRequest& request,
                         planner::Planner& planner) {
    RETURN_IF_ERROR(scope_.Admit(context, RpcMethod::kPlannerWatchDecisions).status());
    if (request.buffer() > planner::kWatchBufferMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("buffer: ", request.buffer(), "; takes up to ", planner::kWatchBufferMax, " entries"));
    }
    const auto most = static_cast<std::size_t>(scope_.settings.planner_watchers_max);
    if (!pump_.Add(self_, most)) {
      scope_.metrics.Refused(Limit::kPlannerWatchers);
      return absl::ResourceExhaustedError(
          absl::StrCat(Av(LabelText(Limit::kPlannerWatchers)), ": ", most, " calls watch already"));
    }
    auto subscription =
        planner.Watch({.class_prefix = request.class_prefix(),
                       .cached = request.cached(),
                       .buffer = request.buffer() == 0 ? planner::kWatchBuffer : std::size_t{request.buffer()},
                       .ready = {}});
    const std::lock_guard<std::mutex> lock(mutex_);
    subscription_ = std::move(subscription);
    return absl::OkStatus();
  }

  void FinishOnce(std::unique_lock<std::mutex>& lock) {
    if (std::exchange(finished_, true)) return;
    lock.unlock();
    Finish(ToGrpc(status_));
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  RpcScope& scope_;
  WatchPump& pump_;
  absl::Status status_;                 // set before the first reaction
  std::shared_ptr<WatchReactor> self_;  // until OnDone
  v1::WatchDecisionsReply reply_;       // of the write that is under way

  std::mutex mutex_;
  std::unique_ptr<planner::WatchSubscription> subscription_;
  bool writing_ = true;  // from the beginning: the pump may look before the first, empty one has begun
  bool cancelled_ = false;
  bool finished_ = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::WatchDecisionsReply>* ServeWatch(grpc::CallbackServerContext& context,
                                                              const v1::WatchDecisionsRequest& request, RpcScope& scope,
                                                              planner::Planner& planner, WatchPump& pump) {
  const auto reactor = std::make_shared<WatchReactor>(scope, pump);
  reactor->Begin(context, request, planner);
  return reactor.get();  // which keeps itself
}

}  // namespace tessera::server
