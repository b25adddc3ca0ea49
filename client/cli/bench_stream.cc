#include "client/cli/bench_stream.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <vector>

#include <nlohmann/json.hpp>

#include "client/cli/bench_echo.h"
#include "client/core.h"
#include "common/status_macros.h"

namespace tessera::client::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;         // medians of these
constexpr int kMessages = 20'000;  // of one round, to each side
constexpr int kDepth = 32;         // messages on the way
constexpr int kWarmUp = 2'000;

// Sends `count` messages, never more than kDepth ahead of the answers.
class Pipeline final : public grpc::ClientBidiReactor<v1::StreamRequest, v1::StreamReply> {
 public:
  Pipeline(const ClientCore& core, v1::StreamRequest request, const std::string& token, int count)
      : request_(std::move(request)), count_(count) {
    context_.AddMetadata("tessera-session-bin", token);
    context_.set_wait_for_ready(true);
    core.compute->async()->Stream(&context_, this);
    AddHold();  // writes start in reactions to reads, too
    StartRead(&reply_);
    const std::lock_guard<std::mutex> lock(mutex_);
    WriteIfMay();
    StartCall();
  }

  absl::Status Await() {
    ended_.get_future().wait();
    return refused_.ok() ? status_ : refused_;
  }

 private:
  void OnWriteDone(bool ok) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    if (ok) WriteIfMay();
  }

  void OnReadDone(bool ok) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!ok) return LetGo();
    ++answered_;
    if (reply_.code() != 0 && refused_.ok()) {
      refused_ = absl::Status(static_cast<absl::StatusCode>(reply_.code()), reply_.message());
    }
    StartRead(&reply_);
    WriteIfMay();
  }

  void OnDone(const grpc::Status& status) override {
    EnteredCallbackThread();
    status_ = FromGrpc(status);
    ended_.set_value();
  }

  // With mutex_ held.
  void WriteIfMay() {
    if (writing_ || sent_ == count_ || sent_ - answered_ >= kDepth) {
      if (!writing_ && sent_ == count_) LetGo();
      return;
    }
    writing_ = true;
    request_.set_tag(static_cast<std::uint64_t>(sent_++));
    StartWrite(&request_);
  }

  void LetGo() {
    if (!holding_) return;
    holding_ = false;
    StartWritesDone();
    RemoveHold();
  }

  grpc::ClientContext context_;
  v1::StreamRequest request_;
  v1::StreamReply reply_;
  const int count_;
  std::mutex mutex_;
  int sent_ = 0;
  int answered_ = 0;
  bool writing_ = false;
  bool holding_ = true;
  absl::Status refused_;  // the first
  absl::Status status_;
  std::promise<void> ended_;
};

struct Side {
  std::shared_ptr<ClientCore> core;
  v1::StreamRequest request;
  std::string token;
};

// Messages a second.
absl::StatusOr<double> RateOf(const Side& side, int count) {
  const Clock::time_point start = Clock::now();
  Pipeline pipeline(*side.core, side.request, side.token, count);
  RETURN_IF_ERROR(pipeline.Await());
  return count / std::chrono::duration<double>(Clock::now() - start).count();
}

v1::StreamRequest RequestOn(const Buffer& buffer) {
  v1::StreamRequest request;
  v1::GemmOp& op = *request.mutable_submission()->add_ops()->mutable_gemm();
  SetTensor(buffer.id(), 0, *op.mutable_a());
  SetTensor(buffer.id(), 1024, *op.mutable_b());
  SetTensor(buffer.id(), 2048, *op.mutable_d());
  request.mutable_submission()->mutable_options()->set_backend(v1::BACKEND_CPU);
  return request;
}

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

absl::StatusOr<std::string> StreamBenchLines(const GlobalOptions& options, const std::string& git) {
  ASSIGN_OR_RETURN(Client client, Connect(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<EchoProcess> echo_process, EchoProcess::Start());
  ASSIGN_OR_RETURN(Session session, client.OpenSession("bench stream"));
  ASSIGN_OR_RETURN(const Buffer buffer, session.Allocate(4096));
  Side daemon{.core = nullptr, .request = RequestOn(buffer), .token = session.token()};
  ASSIGN_OR_RETURN(daemon.core, ClientCore::Make({.socket = client.socket()}));
  Side echo{.core = nullptr, .request = daemon.request, .token = daemon.token};
  ASSIGN_OR_RETURN(echo.core, ClientCore::Make({.socket = echo_process->path()}));

  RETURN_IF_ERROR(RateOf(daemon, kWarmUp).status());
  RETURN_IF_ERROR(RateOf(echo, kWarmUp).status());
  std::vector<double> rates;
  std::vector<double> echo_rates;
  for (int round = 0; round < kRounds; ++round) {
    ASSIGN_OR_RETURN(echo_rates.emplace_back(), RateOf(echo, kMessages));
    ASSIGN_OR_RETURN(rates.emplace_back(), RateOf(daemon, kMessages));
  }
  const nlohmann::json row = {{"case", "stream_pipelined"},
                              {"clients", 1},
                              {"depth", kDepth},
                              {"rate", MedianOf(rates)},
                              {"echo_rate", MedianOf(echo_rates)},
                              {"ratio", MedianOf(rates) / MedianOf(echo_rates)},
                              {"machine", Machine()},
                              {"git", git}};
  return row.dump() + "\n";
}

}  // namespace tessera::client::cli
