#include "server/rpc/compute_stream.h"

#include <google/protobuf/arena.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "server/rpc/submission_binding.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::server {
namespace {

// One submission. Its messages are made in the arena, whose first block is part of the item: those of a small operation
// cost few allocations.
class Item {
 public:
  Item() : arena_(block_, sizeof(block_)) { Make(); }

  // As new, with the memory that it has.
  void Clear() {
    arena_.Reset();
    Make();
  }

  // The request outlives its operation, whose tensors may lie in it.
  v1::StreamRequest& request() { return *request_; }
  v1::StreamReply& reply() { return *reply_; }

  std::size_t bytes = 0;  // of both messages
  bool profile = false;

 private:
  void Make() {
    request_ = google::protobuf::Arena::CreateMessage<v1::StreamRequest>(&arena_);
    reply_ = google::protobuf::Arena::CreateMessage<v1::StreamReply>(&arena_);
    bytes = 0;
    profile = false;
  }

  alignas(std::max_align_t) char block_[2048];
  google::protobuf::Arena arena_;
  v1::StreamRequest* request_ = nullptr;
  v1::StreamReply* reply_ = nullptr;
};

// What a call keeps for its next messages: items whose messages were small.
constexpr std::size_t kSpareItemsMax = 4;
constexpr std::size_t kSpareBytesMax = 4096;

// gRPC calls one kind of reaction at a time, and each from a thread of its own choosing; operations finish on yet
// others. All state but the constants is guarded by mutex_. Nothing of gRPC's runs under it: what a reaction may do
// next is decided with the lock, and done without it, because gRPC writes to the socket inside StartWrite.
class ComputeStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ComputeStream(grpc::CallbackServerContext& context, RpcScope& scope, Executor& executor)
      : context_(context), scope_(scope), executor_(executor) {
    status_ = Begin();
    std::unique_lock<std::mutex> lock(mutex_);
    reads_ended_ = !status_.ok();
    Continue(lock);
  }

  // Takes the message up before it asks for the next: their order is that of the session's stream.
  void OnReadDone(bool ok) override {
    const bool readable = !ok || TakeUp();
    std::unique_lock<std::mutex> lock(mutex_);
    reading_ = false;
    taker_ = std::thread::id();
    if (!ok || !readable) reads_ended_ = true;
    if (!readable) {
      --in_flight_;
      status_ = absl::InvalidArgumentError("request: not a readable message of Compute.Stream");
    }
    Continue(lock);
  }

  void OnWriteDone(bool ok) override {
    std::unique_lock<std::mutex> lock(mutex_);
    reply_bytes_ -= replies_.front().Length();
    replies_.pop_front();
    writing_ = false;
    --in_flight_;
    if (!ok) broken_ = true;
    Continue(lock);
  }

  void OnCancel() override {
    cancelled_.store(true, std::memory_order_release);
    DropUnwanted(scope_, session_.lock());
  }

  void OnDone() override {
    {
      // Whoever decided the last with the lock has let it go, and holds nothing else of this object.
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    const bool cancelled = cancelled_.load(std::memory_order_acquire);
    scope_.Finished(RpcMethod::kComputeStream,
                    status_.ok() && cancelled ? absl::CancelledError("the client ended the call") : status_, start_);
    delete this;
  }

 private:
  absl::Status Begin() {
    ASSIGN_OR_RETURN(const Peer peer, scope_.Admit(context_, RpcMethod::kComputeStream));
    ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, scope_.SessionOf(context_, peer));
    has_session_ = session != nullptr;
    session_ = session;
    account_ = scope_.sessions.AccountOf(peer);
    deadline_ = context_.deadline();
    return absl::OkStatus();
  }

  // False if the message cannot be read.
  bool TakeUp() {
    std::unique_ptr<Item> item = NewItem();
    item->bytes = message_.Length();
    if (!grpc::SerializationTraits<v1::StreamRequest>::Deserialize(&message_, &item->request()).ok()) return false;
    item->reply().set_tag(item->request().tag());
    Submission submission;
    if (const absl::Status status = Bind(*item, submission); !status.ok()) {
      Answer(std::move(item), status);
      return true;
    }
    submission.still_wanted = [this] { return StillWanted(deadline_, cancelled_); };
    // Called exactly once, so that it can own the item; a pointer that is only copied needs no memory of its own.
    submission.done = [this, owned = item.release()](const absl::Status& status,
                                                     std::span<const OperationReport> reports) {
      if (status.ok()) FillReports(reports, owned->profile, *owned->reply().mutable_results());
      Answer(std::unique_ptr<Item>(owned), InSubmission(status));
    };
    executor_.Submit(std::move(submission));
    return true;
  }

  // Decodes the request and finds what it names.
  absl::Status Bind(Item& item, Submission& submission) {
    submission.session = session_.lock();
    submission.account = account_;
    if (has_session_ && (submission.session == nullptr || submission.session->ended())) {
      return absl::NotFoundError(absl::StrCat("metadata ", kSessionMetadata, ": the session has ended"));
    }
    if (has_session_) submission.session->Touch();
    ASSIGN_OR_RETURN(item.profile,
                     BindSubmission(scope_, item.request().submission(), *item.reply().mutable_results(), submission));
    return absl::OkStatus();
  }

  // For one more in flight, which this thread takes up.
  std::unique_ptr<Item> NewItem() {
    std::unique_ptr<Item> item;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++in_flight_;
      taker_ = std::this_thread::get_id();
      if (!spare_items_.empty()) {
        item = std::move(spare_items_.back());
        spare_items_.pop_back();
      }
    }
    return item != nullptr ? std::move(item) : std::make_unique<Item>();
  }

  // The stream may be gone when this returns.
  void Answer(std::unique_ptr<Item> item, const absl::Status& status) {
    v1::StreamReply& reply = item->reply();
    if (!status.ok()) {
      reply.set_code(static_cast<int>(status.code()));
      reply.set_message(MessageOf(status));
      reply.clear_results();
    }
    bool own_buffer = false;
    grpc::ByteBuffer message;
    const grpc::Status serialized = grpc::SerializationTraits<v1::StreamReply>::Serialize(reply, &message, &own_buffer);
    item->bytes += message.Length();
    if (item->bytes <= kSpareBytesMax) {
      item->Clear();
    } else {
      item.reset();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (!serialized.ok()) broken_ = true;
    reply_bytes_ += message.Length();
    replies_.push_back(std::move(message));
    if (item != nullptr && spare_items_.size() < kSpareItemsMax) spare_items_.push_back(std::move(item));
    // OnReadDone goes on: the next read is under way before this reply is written.
    if (taker_ == std::this_thread::get_id()) return;
    Continue(lock);
  }

  // Starts whatever can go on, or ends the call once nothing can. Last thing that its caller does, as the call may be
  // over when `lock` is let go: what is started here keeps it until that is done.
  void Continue(std::unique_lock<std::mutex>& lock) {
    if (broken_) DropReplies();
    const bool room =
        in_flight_ < kStreamInFlightMax && reply_bytes_ < static_cast<std::size_t>(scope_.settings.message_bytes_max);
    const bool read = !reading_ && !reads_ended_ && room;
    const bool write = !broken_ && !writing_ && !replies_.empty();
    reading_ = reading_ || read;
    writing_ = writing_ || write;
    const bool finish = reads_ended_ && !reading_ && in_flight_ == 0 && !finished_;
    finished_ = finished_ || finish;
    const grpc::ByteBuffer* const reply = write ? &replies_.front() : nullptr;  // stays there until it is written
    grpc::WriteOptions options;
    if (replies_.size() > 1) options.set_buffer_hint();  // the next one follows, and takes this one along
    lock.unlock();
    if (read) StartRead(&message_);
    if (write) StartWrite(reply, options);
    if (finish) Finish(ToGrpc(status_));
  }

  // With mutex_ held: nobody reads any more. A reply that is being written counts itself out in OnWriteDone.
  void DropReplies() {
    const std::size_t kept = writing_ ? 1 : 0;
    in_flight_ -= static_cast<int>(replies_.size() - kept);
    replies_.resize(kept);
    reply_bytes_ = kept == 0 ? 0 : replies_.front().Length();
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  grpc::CallbackServerContext& context_;
  RpcScope& scope_;
  Executor& executor_;
  bool has_session_ = false;
  std::weak_ptr<Session> session_;  // a call that idles keeps no session from ending
  std::shared_ptr<Account> account_;
  std::chrono::system_clock::time_point deadline_;
  std::atomic<bool> cancelled_{false};
  grpc::ByteBuffer message_;  // of the read under way, or the one that OnReadDone takes up

  std::mutex mutex_;
  absl::Status status_;                   // of the call
  std::deque<grpc::ByteBuffer> replies_;  // the first is the one being written
  std::size_t reply_bytes_ = 0;           // of replies_
  std::vector<std::unique_ptr<Item>> spare_items_;
  int in_flight_ = 0;      // read, and not yet written
  std::thread::id taker_;  // of who takes up a message
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
