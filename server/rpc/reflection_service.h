// grpc.reflection.v1alpha on gRPC's callback threads. The service that gRPC ships is a synchronous one: it brings
// polling threads of its own, which every other call then has to share the connections with, and each open stream holds
// one.
#pragma once

#include <string>
#include <vector>

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"

namespace tessera::server {

class ReflectionService final : public grpc::reflection::v1alpha::ServerReflection::CallbackService {
 public:
  // `services`: fully qualified names, as they are listed.
  explicit ReflectionService(std::vector<std::string> services) : services_(std::move(services)) {}

  grpc::ServerBidiReactor<grpc::reflection::v1alpha::ServerReflectionRequest,
                          grpc::reflection::v1alpha::ServerReflectionResponse>*
  ServerReflectionInfo(grpc::CallbackServerContext* context) override;

 private:
  const std::vector<std::string> services_;
};

}  // namespace tessera::server
