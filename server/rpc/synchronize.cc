#include "server/rpc/synchronize.h"

#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/sync_point.h"

namespace tessera::server {
namespace {

// What is waited for cannot be told to forget; a client that leaves answers its call itself, and what comes later finds
// nobody.
class Answerer {
 public:
  explicit Answerer(std::function<void(const absl::Status&)> answer) : answer_(std::move(answer)) {}
  // Once, whoever is first.
  void Answer(const absl::Status& status) {
    if (!answered_.exchange(true)) answer_(status);
  }
  bool Claim() { return !answered_.exchange(true); }
  void AnswerClaimed(const absl::Status& status) { answer_(status); }

 private:
  const std::function<void(const absl::Status&)> answer_;
  std::atomic<bool> answered_{false};
};

class SynchronizeReactor final : public grpc::ServerUnaryReactor {
 public:
  SynchronizeReactor(grpc::CallbackServerContext& context, RpcScope& scope, Executor& executor,
                     const v1::SynchronizeRequest& request, v1::SynchronizeReply& reply)
      : context_(context), scope_(scope), executor_(executor), request_(request), reply_(reply) {
    answerer_ = std::make_shared<Answerer>([this](const absl::Status& status) {
      scope_.Finished(RpcMethod::kMemorySynchronize, status, start_);
      Finish(ToGrpc(status));
    });
    const std::shared_ptr<Answerer> answerer = answerer_;  // the answer may end this object
    if (const absl::Status status = Begin(); !status.ok()) answerer->Answer(status);
  }

  void OnCancel() override { std::shared_ptr(answerer_)->Answer(absl::CancelledError("the client left")); }
  void OnDone() override {
    if (const std::shared_ptr<Timeline> timeline = timeline_.lock(); timeline != nullptr) timeline->Forget(ticket_);
    if (session_ != nullptr) session_->end().Forget(end_ticket_);
    executor_.Forget(wait_);
    delete this;
  }

 private:
  absl::Status Begin() {
    ASSIGN_OR_RETURN(const Peer peer, scope_.Admit(context_, RpcMethod::kMemorySynchronize));
    ASSIGN_OR_RETURN(session_, scope_.RequireSession(context_, peer));
    ASSIGN_OR_RETURN(waiting_, session_->BeginWait());
    absl::Status ended = absl::CancelledError("the session has ended");
    end_ticket_ = session_->end().WakeWhenReached(1, [answerer = answerer_, ended] { answerer->Answer(ended); });
    if (!end_ticket_) return ended;
    switch (request_.what_case()) {
      case v1::SynchronizeRequest::kPoint:
        return AwaitPoint(*session_);
      case v1::SynchronizeRequest::kStreamId: {
        Id id;
        if (!Id::Parse(request_.stream_id(), id)) return absl::InvalidArgumentError("stream_id: must be 16 bytes");
        absl::StatusOr<std::shared_ptr<SessionLane>> lane = scope_.sessions.FindStream(*session_, id);
        if (!lane.ok()) return InField("stream_id", lane.status());
        AwaitLanes({*std::move(lane)});
        return absl::OkStatus();
      }
      case v1::SynchronizeRequest::WHAT_NOT_SET:
        break;
    }
    AwaitLanes(scope_.sessions.LanesOf(*session_));
    return absl::OkStatus();
  }

  void AwaitLanes(const std::vector<std::shared_ptr<SessionLane>>& lanes) {
    wait_ = executor_.Synchronize(lanes, [this, answerer = answerer_](const absl::Status& first_error) {
      if (!answerer->Claim()) return;
      Tell(first_error);
      answerer->AnswerClaimed(absl::OkStatus());
    });
  }

  absl::Status AwaitPoint(const Session& session) {
    Id id;
    if (!Id::Parse(request_.point().id(), id)) return absl::InvalidArgumentError("point.id: must be 16 bytes");
    std::uint64_t value = request_.point().value();
    ASSIGN_OR_RETURN(SessionTable::FoundPoint found, ResolvePoint(scope_.sessions, session, id, value, "point"));
    const bool is_event = found.event != nullptr;
    if (is_event) {
      awaited_event_ = found.timeline = scope_.sessions.Await(found.event);
      value = 1;
    }
    timeline_ = found.timeline;
    const auto reached = [this, weak = timeline_, value, is_event, answerer = answerer_] {
      if (!answerer->Claim()) return;
      if (const std::shared_ptr<Timeline> timeline = weak.lock(); timeline != nullptr) {
        Tell(timeline->Reached(value).value_or(absl::OkStatus()));
        if (!is_event) reply_.set_value(timeline->value());
      }
      answerer->AnswerClaimed(absl::OkStatus());
    };
    ticket_ = found.timeline->WakeWhenReached(value, reached);
    if (!ticket_) reached();
    return absl::OkStatus();
  }

  void Tell(const absl::Status& error) {
    reply_.set_code(static_cast<int>(error.code()));
    reply_.set_message(MessageOf(error));
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  grpc::CallbackServerContext& context_;
  RpcScope& scope_;
  Executor& executor_;
  const v1::SynchronizeRequest& request_;
  v1::SynchronizeReply& reply_;
  std::shared_ptr<Answerer> answerer_;
  std::shared_ptr<Session> session_;
  Timeline::Ticket end_ticket_;
  std::shared_ptr<Executor::Wait> wait_;
  std::weak_ptr<Timeline> timeline_;  // that it waits for, if it does
  Timeline::Ticket ticket_;
  std::shared_ptr<Timeline> awaited_event_;  // null: it does not wait for one
  std::shared_ptr<const void> waiting_;      // a place among the waits that a session may have
};

}  // namespace

grpc::ServerUnaryReactor* ServeSynchronize(grpc::CallbackServerContext& context, RpcScope& scope, Executor& executor,
                                           const v1::SynchronizeRequest& request, v1::SynchronizeReply& reply) {
  return new SynchronizeReactor(context, scope, executor, request, reply);
}

}  // namespace tessera::server
