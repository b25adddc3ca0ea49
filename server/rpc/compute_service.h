// tessera.v1.Compute over the executor.
#pragma once

#include "server/exec/executor.h"
#include "server/rpc/rpc.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::server {

class ComputeService final
    : public v1::Compute::WithCallbackMethod_Gemm<
          v1::Compute::WithCallbackMethod_Execute<v1::Compute::WithRawCallbackMethod_Stream<v1::Compute::Service>>> {
 public:
  ComputeService(RpcScope& scope, Executor& executor) : scope_(scope), executor_(executor) {}

  grpc::ServerUnaryReactor* Gemm(grpc::CallbackServerContext* context, const v1::GemmRequest* request,
                                 v1::GemmReply* reply) override;
  grpc::ServerUnaryReactor* Execute(grpc::CallbackServerContext* context, const v1::ExecuteRequest* request,
                                    v1::ExecuteReply* reply) override;
  // Raw messages: gRPC would not tell a message that cannot be parsed from the end of the stream.
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context) override;

 private:
  RpcScope& scope_;
  Executor& executor_;
};

}  // namespace tessera::server
