#include "server/rpc/attach.h"

#include <spdlog/fmt/fmt.h>

#include <atomic>

#include "common/status_macros.h"

namespace tessera::server {
namespace {

class AttachReactor final : public grpc::ServerWriteReactor<v1::AttachReply> {
 public:
  AttachReactor(grpc::CallbackServerContext& context, RpcScope& scope) : scope_(scope) {
    status_ = Open(context);
    if (!status_.ok()) {
      Finish(ToGrpc(status_));
      return;
    }
    reply_.set_lease(lease_.Bytes());
    reply_.set_epoch(fmt::format("{:08x}", scope_.sessions.epoch()));
    StartWrite(&reply_);
  }

  void OnWriteDone(bool /*ok*/) override { FinishAfterBoth(); }

  // The client has left, or the daemon is going.
  void OnCancel() override {
    scope_.sessions.CloseLease(lease_);
    if (status_.ok()) FinishAfterBoth();
  }

  void OnDone() override {
    scope_.Finished(RpcMethod::kMemoryAttach, status_, start_);
    delete this;
  }

 private:
  absl::Status Open(grpc::CallbackServerContext& context) {
    ASSIGN_OR_RETURN(const Peer peer, scope_.Admit(context, RpcMethod::kMemoryAttach));
    ASSIGN_OR_RETURN(lease_, scope_.sessions.OpenLease(peer, LeaseKind::kAttach));
    return absl::OkStatus();
  }

  // Of the write and the end of the call, whichever comes last.
  void FinishAfterBoth() {
    if (to_come_.fetch_sub(1) == 1) Finish(grpc::Status::OK);
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  RpcScope& scope_;
  absl::Status status_;
  Id lease_;  // all zero: refused
  v1::AttachReply reply_;
  std::atomic<int> to_come_{2};
};

}  // namespace

grpc::ServerWriteReactor<v1::AttachReply>* ServeAttach(grpc::CallbackServerContext& context, RpcScope& scope) {
  return new AttachReactor(context, scope);
}

}  // namespace tessera::server
