#include "server/rpc/compute_stream.h"

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/submission_binding.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::server {
namespace {

// gRPC calls one kind of reaction at a time, and each from a thread of its own choosing; operations finish on yet
// others. All state but the constants is guarded by mutex_; nothing of ours or gRPC's runs under it that could come
// back here.
class ComputeStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ComputeStream(grpc::CallbackServerContext& context, RpcScope& scope, Executor& executor)
      : context_(context), scope_(scope), executor_(executor) {
    status_ = Begin();
    const std::lock_guard<std::mutex> lock(mutex_);
    reads_ended_ = !status_.ok();
    Continue();
  }

  // Takes the message up before it asks for the next: their order is that of the session's stream.
  void OnReadDone(bool ok) override {
    bool readable = true;
    if (ok) readable = TakeUp();
    const std::lock_guard<std::mutex> lock(mutex_);
    reading_ = false;
    if (!ok || !readable) reads_ended_ = true;
    if (!readable) status_ = absl::InvalidArgumentError("request: not a readable message of Compute.Stream");
    Continue();
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    reply_bytes_ -= replies_.front().Length();
    replies_.pop_front();
    writing_ = false;
    --in_flight_;
    if (!ok) broken_ = true;
    Continue();
  }

  void OnCancel() override {
    cancelled_.store(true, std::memory_order_release);
    DropUnwanted(scope_, session_.lock());
  }

  void OnDone() override {
    {
      // Whoever called Finish has left its critical section: an operation's thread holds nothing else of this object.
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    const bool cancelled = cancelled_.load(std::memory_order_acquire);
    scope_.Finished(RpcMethod::kComputeStream,
                    status_.ok() && cancelled ? absl::CancelledError("the client ended the call") : status_, start_);
    delete this;
  }

 private:
  // One submission. The request outlives its operation, whose tensors may lie in it.
  struct Item {
    v1::StreamRequest request;
    v1::StreamReply reply;
  };

  absl::Status Begin() {
    ASSIGN_OR_RETURN(const Peer peer, scope_.Admit(context_, RpcMethod::kComputeStream));
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.SessionOf(context_, peer));
    has_session_ = session != nullptr;
    session_ = session;
    account_ = scope_.sessions.AccountOf(peer);
    return absl::OkStatus();
  }

  // False if the message cannot be read.
  bool TakeUp() {
    auto item = std::make_shared<Item>();
    if (!grpc::SerializationTraits<v1::StreamRequest>::Deserialize(&message_, &item->request).ok()) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++in_flight_;
    }
    item->reply.set_tag(item->request.tag());
    if (const absl::Status status = Submit(item); !status.ok()) Answer(*item, status);
    return true;
  }

  // Decode, bind, hand over. An error means that nothing was handed over.
  absl::Status Submit(const std::shared_ptr<Item>& item) {
    Submission submission{.session = session_.lock(), .account = account_};
    if (has_session_ && (submission.session == nullptr || submission.session->ended())) {
      return absl::NotFoundError(absl::StrCat("metadata ", kSessionMetadata, ": the session has ended"));
    }
    if (has_session_) submission.session->Touch();
    ASSIGN_OR_RETURN(const bool profile,
                     BindSubmission(scope_, item->request.submission(), *item->reply.mutable_results(), submission));
    submission.still_wanted = [this] { return StillWanted(context_, cancelled_); };
    submission.done = [this, item, profile](const absl::Status& status, std::span<const OperationReport> reports) {
      if (status.ok()) FillReports(reports, profile, *item->reply.mutable_results());
      Answer(*item, InSubmission(status));
    };
    executor_.Submit(std::move(submission));
    return absl::OkStatus();
  }

  // The stream may be gone when this returns.
  void Answer(Item& item, const absl::Status& status) {
    if (!status.ok()) {
      item.reply.set_code(static_cast<int>(status.code()));
      item.reply.set_message(MessageOf(status));
      item.reply.clear_results();
    }
    bool own_buffer = false;
    grpc::ByteBuffer message;
    const grpc::Status serialized =
        grpc::SerializationTraits<v1::StreamReply>::Serialize(item.reply, &message, &own_buffer);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!serialized.ok()) broken_ = true;
    reply_bytes_ += message.Length();
    replies_.push_back(std::move(message));
    Continue();
  }

  // With mutex_ held: starts whatever can go on, or ends the call once nothing can. Last thing that its caller does.
  void Continue() {
    if (broken_) {
      // Nobody reads any more. A reply that is being written counts itself out in OnWriteDone.
      const std::size_t kept = writing_ ? 1 : 0;
      in_flight_ -= static_cast<int>(replies_.size() - kept);
      replies_.resize(kept);
      reply_bytes_ = kept == 0 ? 0 : replies_.front().Length();
    } else if (!writing_ && !replies_.empty()) {
      writing_ = true;
      StartWrite(&replies_.front());
    }
    const bool room =
        in_flight_ < kStreamInFlightMax && reply_bytes_ < static_cast<std::size_t>(scope_.settings.message_bytes_max);
    if (!reading_ && !reads_ended_ && room) {
      reading_ = true;
      StartRead(&message_);
    }
    if (reads_ended_ && !reading_ && in_flight_ == 0 && !finished_) {
      finished_ = true;
      Finish(ToGrpc(status_));
    }
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  grpc::CallbackServerContext& context_;
  RpcScope& scope_;
  Executor& executor_;
  bool has_session_ = false;
  std::weak_ptr<Session> session_;  // a call that idles keeps no session from ending
  std::shared_ptr<Account> account_;
  std::atomic<bool> cancelled_{false};
  grpc::ByteBuffer message_;  // of the read under way, or the one that OnReadDone takes up

  std::mutex mutex_;
  absl::Status status_;                   // of the call
  std::deque<grpc::ByteBuffer> replies_;  // the first is the one being written
  std::size_t reply_bytes_ = 0;           // of replies_
  int in_flight_ = 0;                     // read, and not yet written
  bool reading_ = false;
  bool writing_ = false;
  bool reads_ended_ = false;
  bool broken_ = false;  // the transport takes no more
  bool finished_ = false;
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServeComputeStream(grpc::CallbackServerContext& context,
                                                                                RpcScope& scope, Executor& executor) {
  return new ComputeStream(context, scope, executor);
}

}  // namespace tessera::server
