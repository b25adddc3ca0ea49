#include "server/rpc/reflection_service.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>

#include "absl/strings/str_cat.h"

namespace tessera::server {
namespace {

namespace reflection = grpc::reflection::v1alpha;
using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;
using reflection::ServerReflectionRequest;
using reflection::ServerReflectionResponse;

void AddWithImports(const FileDescriptor& file, std::set<const FileDescriptor*>& seen,
                    reflection::FileDescriptorResponse& files) {
  if (!seen.insert(&file).second) return;
  google::protobuf::FileDescriptorProto description;
  file.CopyTo(&description);
  files.add_file_descriptor_proto(description.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) AddWithImports(*file.dependency(i), seen, files);
}

void AnswerWithFile(const FileDescriptor* file, const std::string& what, ServerReflectionResponse& response) {
  if (file == nullptr) {
    response.mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
    response.mutable_error_response()->set_error_message(absl::StrCat("no such file or symbol here: ", what));
    return;
  }
  std::set<const FileDescriptor*> seen;
  AddWithImports(*file, seen, *response.mutable_file_descriptor_response());
}

void AnswerExtensionNumbers(const std::string& type, ServerReflectionResponse& response) {
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  const Descriptor* message = pool.FindMessageTypeByName(type);
  if (message == nullptr) return AnswerWithFile(nullptr, type, response);
  std::vector<const google::protobuf::FieldDescriptor*> extensions;
  pool.FindAllExtensions(message, &extensions);
  reflection::ExtensionNumberResponse& numbers = *response.mutable_all_extension_numbers_response();
  numbers.set_base_type_name(type);
  for (const auto* extension : extensions) numbers.add_extension_number(extension->number());
}

void AnswerExtension(const reflection::ExtensionRequest& request, ServerReflectionResponse& response) {
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  const Descriptor* message = pool.FindMessageTypeByName(request.containing_type());
  const auto* extension =
      message == nullptr ? nullptr : pool.FindExtensionByNumber(message, request.extension_number());
  AnswerWithFile(extension == nullptr ? nullptr : extension->file(),
                 absl::StrCat("extension ", request.extension_number(), " of ", request.containing_type()), response);
}

// One stream: read, answer, read again. gRPC calls one reaction at a time.
class Reactor final : public grpc::ServerBidiReactor<ServerReflectionRequest, ServerReflectionResponse> {
 public:
  explicit Reactor(const std::vector<std::string>& services) : services_(services) { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    response_.Clear();
    response_.set_valid_host(request_.host());
    *response_.mutable_original_request() = request_;
    Answer();
    StartWrite(&response_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartRead(&request_);
  }

  void OnDone() override { delete this; }

 private:
  void Answer() {
    const DescriptorPool& pool = *DescriptorPool::generated_pool();
    switch (request_.message_request_case()) {
      case ServerReflectionRequest::kFileByFilename:
        return AnswerWithFile(pool.FindFileByName(request_.file_by_filename()), request_.file_by_filename(), response_);
      case ServerReflectionRequest::kFileContainingSymbol:
        return AnswerWithFile(pool.FindFileContainingSymbol(request_.file_containing_symbol()),
                              request_.file_containing_symbol(), response_);
      case ServerReflectionRequest::kFileContainingExtension:
        return AnswerExtension(request_.file_containing_extension(), response_);
      case ServerReflectionRequest::kAllExtensionNumbersOfType:
        return AnswerExtensionNumbers(request_.all_extension_numbers_of_type(), response_);
      case ServerReflectionRequest::kListServices:
        for (const std::string& name : services_) {
          response_.mutable_list_services_response()->add_service()->set_name(name);
        }
        return;
      case ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
        break;
    }
    response_.mutable_error_response()->set_error_code(grpc::StatusCode::INVALID_ARGUMENT);
    response_.mutable_error_response()->set_error_message("message_request: none of its fields is set");
  }

  const std::vector<std::string>& services_;
  ServerReflectionRequest request_;
  ServerReflectionResponse response_;
};

}  // namespace

grpc::ServerBidiReactor<ServerReflectionRequest, ServerReflectionResponse>* ReflectionService::ServerReflectionInfo(
    grpc::CallbackServerContext* /*context*/) {
  return new Reactor(services_);
}

}  // namespace tessera::server
