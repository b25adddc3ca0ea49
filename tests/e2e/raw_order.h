// Streams, timelines and submissions by the bare stubs, and calls that can be given up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core.h"
#include "client/gemm_encoding.h"
#include "tests/e2e/raw_client.h"

namespace tessera::e2e {

// The order of one submission, as OrderSpec says it.
inline v1::GemmRequest Ordered(v1::GemmRequest request, const client::OrderSpec& order) {
  client::EncodeOrder(order, *request.mutable_options());
  return request;
}

inline v1::GemmRequest RequestOf(const client::GemmSpec& spec, const client::OrderSpec& order = {}) {
  v1::GemmRequest request;
  client::Encode(spec, *request.mutable_op(), *request.mutable_options());
  return Ordered(std::move(request), order);
}

inline v1::ExecuteRequest ExecuteOf(const std::vector<v1::GemmRequest>& gemms, const client::OrderSpec& order = {}) {
  v1::ExecuteRequest request;
  for (const v1::GemmRequest& gemm : gemms) *request.mutable_submission()->add_ops()->mutable_gemm() = gemm.op();
  client::EncodeOrder(order, *request.mutable_submission()->mutable_options());
  return request;
}

inline v1::StreamRequest StreamRequestOf(std::uint64_t tag, const v1::GemmRequest& gemm) {
  v1::StreamRequest request;
  request.set_tag(tag);
  *request.mutable_submission()->add_ops()->mutable_gemm() = gemm.op();
  *request.mutable_submission()->mutable_options() = gemm.options();
  return request;
}

// One session over the bare stubs.
class RawOrder {
 public:
  RawOrder(const RawClient& client, std::string token) : client_(client), token_(std::move(token)) {}

  const std::string& token() const { return token_; }

  absl::StatusOr<std::string> OpenStream(v1::StreamPriority priority = v1::STREAM_PRIORITY_UNSPECIFIED) const {
    v1::OpenStreamRequest request;
    request.set_priority(priority);
    const auto reply = RawClient::Call(client_.memory(), &v1::Memory::Stub::OpenStream, request, token_);
    if (!reply.ok()) return reply.status();
    return reply->stream_id();
  }
  absl::StatusOr<std::string> CreateTimeline(const std::vector<std::string>& shared_with = {}, bool with_own = false,
                                             std::uint64_t initial = 0) const {
    v1::CreateTimelineRequest request;
    request.set_initial_value(initial);
    for (const std::string& principal : shared_with) request.add_shared_with(principal);
    request.set_shared_with_own(with_own);
    const auto reply = RawClient::Call(client_.memory(), &v1::Memory::Stub::CreateTimeline, request, token_);
    if (!reply.ok()) return reply.status();
    return reply->timeline_id();
  }
  absl::Status Signal(const std::string& timeline, std::uint64_t value) const {
    v1::SignalTimelineRequest request;
    request.mutable_point()->set_id(timeline);
    request.mutable_point()->set_value(value);
    return RawClient::Call(client_.memory(), &v1::Memory::Stub::SignalTimeline, request, token_).status();
  }
  absl::Status Release(const std::string& id) const {
    v1::ReleaseSyncRequest request;
    request.set_id(id);
    return RawClient::Call(client_.memory(), &v1::Memory::Stub::ReleaseSync, request, token_).status();
  }

  static v1::SynchronizeRequest OfStream(const std::string& stream) {
    v1::SynchronizeRequest request;
    request.set_stream_id(stream);
    return request;
  }
  static v1::SynchronizeRequest OfPoint(const std::string& timeline, std::uint64_t value) {
    v1::SynchronizeRequest request;
    request.mutable_point()->set_id(timeline);
    request.mutable_point()->set_value(value);
    return request;
  }
  absl::StatusOr<v1::SynchronizeReply> Synchronize(const v1::SynchronizeRequest& request = {},
                                                   std::chrono::milliseconds timeout = std::chrono::seconds(60)) const {
    return RawClient::Call(client_.memory(), &v1::Memory::Stub::Synchronize, request, token_, timeout);
  }

  absl::Status Gemm(const v1::GemmRequest& request) const { return client_.Gemm(token_, request); }
  absl::StatusOr<v1::ExecuteReply> Execute(const v1::ExecuteRequest& request) const {
    return RawClient::Call(client_.compute(), &v1::Compute::Stub::Execute, request, token_);
  }

 private:
  const RawClient& client_;
  const std::string token_;
};

// The asynchronous half of a stub: its class has the name of the function that gives it.
template <typename Stub>
using AsyncOf = std::remove_pointer_t<decltype(std::declval<Stub&>().async())>;

// A unary call that is on its way: it can be cancelled, and its answer counted.
template <typename Stub, typename Request, typename Reply>
class CallUnderWay {
 public:
  using Method = void (AsyncOf<Stub>::*)(grpc::ClientContext*, const Request*, Reply*,
                                         std::function<void(grpc::Status)>);

  CallUnderWay(Stub& stub, Method method, const std::string& token, Request request,
               std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : state_(std::make_shared<State>()), answer_(state_->answer.get_future()) {
    state_->request = std::move(request);
    state_->context = RawClient::Context(token, timeout);
    (stub.async()->*method)(state_->context.get(), &state_->request, &state_->reply,
                            [state = state_](const grpc::Status& status) {
                              if (state->answers.fetch_add(1) == 0) state->answer.set_value(client::FromGrpc(status));
                            });
  }

  void Cancel() { state_->context->TryCancel(); }
  bool Answered() const { return answer_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  bool AnsweredWithin(std::chrono::milliseconds time) const {
    return answer_.wait_for(time) == std::future_status::ready;
  }
  // Once. Waits.
  absl::Status Await() { return answer_.get(); }
  // After Await.
  const Reply& reply() const { return state_->reply; }
  int answers() const { return state_->answers; }

 private:
  struct State {
    Request request;
    Reply reply;
    std::unique_ptr<grpc::ClientContext> context;
    std::promise<absl::Status> answer;
    std::atomic<int> answers{0};
  };
  const std::shared_ptr<State> state_;  // the callback's too
  std::future<absl::Status> answer_;
};

class GemmUnderWay : public CallUnderWay<v1::Compute::Stub, v1::GemmRequest, v1::GemmReply> {
 public:
  GemmUnderWay(const RawClient& client, const std::string& token, v1::GemmRequest request,
               std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : CallUnderWay(client.compute(), &AsyncOf<v1::Compute::Stub>::Gemm, token, std::move(request), timeout) {}
};

class SynchronizeUnderWay : public CallUnderWay<v1::Memory::Stub, v1::SynchronizeRequest, v1::SynchronizeReply> {
 public:
  SynchronizeUnderWay(const RawClient& client, const std::string& token, v1::SynchronizeRequest request,
                      std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : CallUnderWay(client.memory(), &AsyncOf<v1::Memory::Stub>::Synchronize, token, std::move(request), timeout) {}
};

}  // namespace tessera::e2e
