#include "client/gemm_stream.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "client/core.h"
#include "client/gemm_encoding.h"
#include "common/status_macros.h"

namespace tessera::client {

// The call behind a stream. It owns itself from its start to OnDone, the last that gRPC says of it.
//
// Any thread may queue a request and start its write. gRPC allows that outside its reactions while there is a hold,
// which lasts until nothing more will be written; what a reaction starts needs none.
class GemmStream::Call final : public grpc::ClientBidiReactor<v1::StreamRequest, v1::StreamReply> {
 public:
  static std::shared_ptr<Call> Start(std::shared_ptr<ClientCore> client, std::shared_ptr<SessionCore> session,
                                     std::chrono::milliseconds timeout) {
    auto call = std::make_shared<Call>(std::move(client), std::move(session), timeout);
    call->self_ = call;
    call->client_->compute->async()->Stream(&call->context_, call.get());
    call->AddHold();
    call->StartRead(&call->reply_);
    call->StartCall();
    return call;
  }

  Call(std::shared_ptr<ClientCore> client, std::shared_ptr<SessionCore> session, std::chrono::milliseconds timeout)
      : client_(std::move(client)), session_(std::move(session)) {
    PrepareCompute(session_.get(), context_, timeout);
  }

  absl::Status Gemm(const GemmSpec& spec, std::function<void(absl::StatusOr<GemmResult>)> done) {
    if (spec.timeout.count() != 0) {
      return absl::InvalidArgumentError("timeout: a stream has one for all of its products; give it to OpenStream");
    }
    v1::StreamRequest request;
    v1::Submission& submission = *request.mutable_submission();
    Encode(spec, *submission.add_ops()->mutable_gemm(), *submission.mutable_options());

    std::unique_lock<std::mutex> lock(mutex_);
    if (!OnCallbackThread()) {
      changed_.wait(lock, [this] { return finishing_ || ended_ || queue_.size() < kUnwrittenMax; });
    }
    if (finishing_) return absl::FailedPreconditionError("the stream is finished");
    if (ended_) return AwaitError(lock);
    const std::uint64_t tag = next_tag_++;
    request.set_tag(tag);
    pending_.emplace(tag, Pending{.d = spec.d, .done = std::move(done)});
    queue_.push_back(std::move(request));
    WriteNext(lock);
    return absl::OkStatus();
  }

  // Takes no more requests; the call ends when all are answered.
  void BeginFinish() {
    std::unique_lock<std::mutex> lock(mutex_);
    finishing_ = true;
    changed_.notify_all();
    WriteNext(lock);
  }

  absl::Status AwaitFinish() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return status_;
  }

  void Cancel() { context_.TryCancel(); }

  void OnWriteDone(bool ok) override {
    EnteredCallbackThread();
    std::unique_lock<std::mutex> lock(mutex_);
    writing_ = false;
    if (ok) queue_.pop_front();
    ended_ = ended_ || !ok;
    changed_.notify_all();
    WriteNext(lock);
  }

  void OnReadDone(bool ok) override {
    EnteredCallbackThread();
    if (ok) {
      Answer();
      StartRead(&reply_);
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    ended_ = true;
    changed_.notify_all();
    WriteNext(lock);
  }

  void OnDone(const grpc::Status& status) override {
    EnteredCallbackThread();
    const std::shared_ptr<Call> self = std::move(self_);  // to the end of this function at least
    std::unique_lock<std::mutex> lock(mutex_);
    status_ = violation_.ok() ? FromGrpc(status) : violation_;
    ended_ = true;
    std::map<std::uint64_t, Pending> unanswered = std::exchange(pending_, {});
    if (status_.ok() && !unanswered.empty()) status_ = NotAnswered();
    lock.unlock();
    for (auto& [tag, pending] : unanswered) pending.done(status_);
    unanswered.clear();  // what the callbacks hold goes before Finish returns
    lock.lock();
    done_ = true;
    changed_.notify_all();
  }

 private:
  struct Pending {
    TensorView d;
    std::function<void(absl::StatusOr<GemmResult>)> done;
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  };

  static absl::Status NotAnswered() { return absl::InternalError("the daemon ended the stream without an answer"); }

  // The status of a call that has ended or is about to.
  absl::Status AwaitError(std::unique_lock<std::mutex>& lock) {
    // Inside a callback of this call its end cannot be awaited: it comes after the callback.
    if (!OnCallbackThread()) changed_.wait(lock, [this] { return done_; });
    if (!done_) return absl::UnavailableError("the stream has ended");
    return status_.ok() ? NotAnswered() : status_;
  }

  // Starts what the sending half has to do next, if anything. Called with the hold or in a reaction; lets `lock` go.
  void WriteNext(std::unique_lock<std::mutex>& lock) {
    if (!writing_ && !ended_ && !half_closed_) {
      if (!queue_.empty()) {
        writing_ = true;
        StartWrite(&queue_.front());  // stays there until written: pushing to a deque moves nothing
      } else if (finishing_) {
        half_closed_ = true;
        StartWritesDone();
      }
    }
    const bool drop_hold = held_ && (ended_ || half_closed_);
    held_ = held_ && !drop_hold;
    lock.unlock();
    if (drop_hold) RemoveHold();
  }

  // Hands reply_ to the request that it answers.
  void Answer() {
    Pending pending;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = pending_.find(reply_.tag());
      if (found == pending_.end()) {
        violation_ = absl::InternalError("the daemon answered a request that it was not sent");
        context_.TryCancel();
        return;
      }
      pending = std::move(found->second);
      pending_.erase(found);
    }
    pending.done(ResultOf(pending));
  }

  absl::StatusOr<GemmResult> ResultOf(const Pending& pending) {
    if (reply_.code() != 0) return absl::Status(static_cast<absl::StatusCode>(reply_.code()), reply_.message());
    if (reply_.results_size() != 1) return NotAnswered();
    v1::OpResult& result = *reply_.mutable_results(0);
    return Decode(*result.mutable_report(), result.inline_result(), pending.d, pending.start);
  }

  const std::shared_ptr<ClientCore> client_;
  const std::shared_ptr<SessionCore> session_;  // null: none
  grpc::ClientContext context_;
  v1::StreamReply reply_;  // of the one read that is always under way; its reaction's
  std::shared_ptr<Call> self_;

  std::mutex mutex_;  // for all below
  std::condition_variable changed_;
  std::deque<v1::StreamRequest> queue_;  // not yet written; the front one may be under way
  std::map<std::uint64_t, Pending> pending_;
  std::uint64_t next_tag_ = 1;
  bool held_ = true;          // gRPC waits for us
  bool writing_ = false;      // a write is under way
  bool finishing_ = false;    // no more requests
  bool half_closed_ = false;  // the daemon is told so
  bool ended_ = false;        // a read or write has failed: OnDone follows
  bool done_ = false;         // status_ is set and all callbacks have returned
  absl::Status status_;
  absl::Status violation_;  // of the protocol, by the daemon
};

GemmStream::GemmStream(std::shared_ptr<Call> call) : call_(std::move(call)) {}
GemmStream::GemmStream(GemmStream&&) noexcept = default;

GemmStream& GemmStream::operator=(GemmStream&& other) noexcept {
  if (this != &other) {
    GemmStream ends(std::move(*this));
    call_ = std::move(other.call_);
  }
  return *this;
}

GemmStream::~GemmStream() {
  if (call_ == nullptr) return;
  call_->BeginFinish();
  // A destructor has nobody to tell; Finish() is there for those who ask.
  if (!OnCallbackThread()) call_->AwaitFinish().IgnoreError();
}

GemmStream GemmStream::Open(std::shared_ptr<ClientCore> client, std::shared_ptr<SessionCore> session,
                            std::chrono::milliseconds timeout) {
  return GemmStream(Call::Start(std::move(client), std::move(session), timeout));
}

absl::Status GemmStream::Gemm(const GemmSpec& spec, std::function<void(absl::StatusOr<GemmResult>)> done) {
  return call_->Gemm(spec, std::move(done));
}

std::future<absl::StatusOr<GemmResult>> GemmStream::Gemm(const GemmSpec& spec) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<GemmResult>>>();
  std::future<absl::StatusOr<GemmResult>> future = promise->get_future();
  const absl::Status queued =
      Gemm(spec, [promise](absl::StatusOr<GemmResult> result) { promise->set_value(std::move(result)); });
  if (!queued.ok()) promise->set_value(queued);
  return future;
}

absl::Status GemmStream::Finish() {
  if (OnCallbackThread()) return absl::FailedPreconditionError("Finish waits for what only this thread could bring");
  call_->BeginFinish();
  return call_->AwaitFinish();
}

void GemmStream::Cancel() {
  call_->Cancel();
}

GemmStream Session::OpenStream(std::chrono::milliseconds timeout) {
  return GemmStream::Open(core_->client, core_, timeout);
}

GemmStream Client::OpenStream(std::chrono::milliseconds timeout) {
  return GemmStream::Open(core_, nullptr, timeout);
}

}  // namespace tessera::client
