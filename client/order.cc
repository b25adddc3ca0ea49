// Streams, timelines and submissions of several products.

#include <unistd.h>

#include <utility>

#include "client/client.h"
#include "client/core.h"
#include "client/cuda_memory.h"
#include "client/gemm_encoding.h"
#include "common/status_macros.h"

namespace tessera::client {
namespace {

absl::StatusOr<v1::SynchronizeReply> Synchronize(const SessionCore& session, const v1::SynchronizeRequest& request,
                                                 std::chrono::milliseconds timeout) {
  grpc::ClientContext context;
  session.Prepare(context, timeout);
  v1::SynchronizeReply reply;
  RETURN_IF_ERROR(FromUnaryCall(session.client->memory->Synchronize(&context, request, &reply)));
  if (reply.code() == 0) return reply;
  return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
}

}  // namespace

// A destructor has nobody to tell: the session's end gives everything back at the latest.
void ReleaseSync(const SessionCore* session, const std::string& id) {
  if (session == nullptr) return;  // moved from
  grpc::ClientContext context;
  session->Prepare(context, session->client->options.timeout);
  v1::ReleaseSyncRequest request;
  request.set_id(id);
  v1::ReleaseSyncReply reply;
  FromUnaryCall(session->client->memory->ReleaseSync(&context, request, &reply)).IgnoreError();
}

absl::StatusOr<std::string> CreateTimelineId(const SessionCore& session, std::uint64_t initial_value,
                                             const std::vector<std::string>& shared_with, bool exported) {
  grpc::ClientContext context;
  session.Prepare(context, session.client->options.timeout);
  v1::CreateTimelineRequest request;
  request.set_initial_value(initial_value);
  request.set_exported(exported);
  for (const std::string& principal : shared_with) {
    principal.empty() ? request.set_shared_with_own(true) : request.add_shared_with(principal);
  }
  v1::CreateTimelineReply reply;
  RETURN_IF_ERROR(FromUnaryCall(session.client->memory->CreateTimeline(&context, request, &reply)));
  return reply.timeline_id();
}

Timeline& Timeline::operator=(Timeline&& other) noexcept {
  if (this != &other) {
    ReleaseSync(session_.get(), id_);
    session_ = std::move(other.session_);
    id_ = std::move(other.id_);
  }
  return *this;
}

Timeline::~Timeline() {
  ReleaseSync(session_.get(), id_);
}

absl::Status Timeline::Signal(std::uint64_t value) {
  grpc::ClientContext context;
  session_->Prepare(context, session_->client->options.timeout);
  v1::SignalTimelineRequest request;
  request.mutable_point()->set_id(id_);
  request.mutable_point()->set_value(value);
  v1::SignalTimelineReply reply;
  return FromUnaryCall(session_->client->memory->SignalTimeline(&context, request, &reply));
}

absl::StatusOr<std::uint64_t> AwaitPoint(const SessionCore& session, const SyncPoint& point,
                                         std::chrono::milliseconds timeout) {
  v1::SynchronizeRequest request;
  request.mutable_point()->set_id(point.id);
  request.mutable_point()->set_value(point.value);
  ASSIGN_OR_RETURN(const v1::SynchronizeReply reply, Synchronize(session, request, timeout));
  return reply.value();
}

absl::StatusOr<std::uint64_t> Timeline::Wait(std::uint64_t value, std::chrono::milliseconds timeout) {
  return AwaitPoint(*session_, At(value), timeout);
}

ImportedEvent& ImportedEvent::operator=(ImportedEvent&& other) noexcept {
  if (this != &other) {
    ReleaseSync(session_.get(), id_);
    session_ = std::move(other.session_);
    id_ = std::move(other.id_);
  }
  return *this;
}

ImportedEvent::~ImportedEvent() {
  ReleaseSync(session_.get(), id_);
}

WorkStream& WorkStream::operator=(WorkStream&& other) noexcept {
  if (this != &other) {
    ReleaseSync(session_.get(), id_);
    session_ = std::move(other.session_);
    id_ = std::move(other.id_);
  }
  return *this;
}

WorkStream::~WorkStream() {
  ReleaseSync(session_.get(), id_);
}

absl::Status WorkStream::Synchronize(std::chrono::milliseconds timeout) {
  v1::SynchronizeRequest request;
  request.set_stream_id(id_);
  return client::Synchronize(*session_, request, timeout).status();
}

absl::Status Session::Synchronize(std::chrono::milliseconds timeout) {
  return client::Synchronize(*core_, v1::SynchronizeRequest(), timeout).status();
}

absl::StatusOr<WorkStream> Session::OpenWorkStream(v1::StreamPriority priority, bool gpu_waits) {
  grpc::ClientContext context;
  core_->Prepare(context, core_->client->options.timeout);
  v1::OpenStreamRequest request;
  request.set_priority(priority);
  request.set_gpu_waits(gpu_waits);
  v1::OpenStreamReply reply;
  RETURN_IF_ERROR(FromUnaryCall(core_->client->memory->OpenStream(&context, request, &reply)));
  return WorkStream(core_, reply.stream_id());
}

absl::StatusOr<Timeline> Session::CreateTimeline(std::uint64_t initial_value,
                                                 const std::vector<std::string>& shared_with) {
  ASSIGN_OR_RETURN(std::string id, CreateTimelineId(*core_, initial_value, shared_with, /*exported=*/false));
  return Timeline(core_, std::move(id));
}

absl::StatusOr<ImportedEvent> Session::ImportEvent(void* cuda_event) {
  const absl::StatusOr<CudaDriver>& driver = CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  ASSIGN_OR_RETURN(const ExportedEvent exported, ExportEvent(*driver, cuda_event));
  grpc::ClientContext context;
  core_->Prepare(context, core_->client->options.timeout);
  v1::ImportEventRequest request;
  request.set_handle(exported.handle);
  request.set_device_uuid(exported.device_uuid);
  request.set_exporter_pid(::getpid());
  v1::ImportEventReply reply;
  RETURN_IF_ERROR(FromUnaryCall(core_->client->memory->ImportEvent(&context, request, &reply)));
  return ImportedEvent(core_, reply.event_id());
}

absl::StatusOr<std::vector<GemmResult>> Session::Execute(const std::vector<GemmSpec>& specs, const OrderSpec& order) {
  if (specs.empty()) return absl::InvalidArgumentError("specs: none given");
  grpc::ClientContext context;
  core_->Prepare(context, specs.front().timeout);
  v1::ExecuteRequest request;
  v1::Submission& submission = *request.mutable_submission();
  v1::SubmitOptions ignored;
  for (const GemmSpec& spec : specs) Encode(spec, *submission.add_ops()->mutable_gemm(), ignored);
  submission.mutable_options()->set_backend(specs.front().backend);
  submission.mutable_options()->set_profile(specs.front().profile);
  EncodeOrder(order, *submission.mutable_options());
  const auto start = std::chrono::steady_clock::now();
  v1::ExecuteReply reply;
  RETURN_IF_ERROR(FromUnaryCall(core_->client->compute->Execute(&context, request, &reply)));
  if (static_cast<std::size_t>(reply.results_size()) != specs.size()) {
    return absl::InternalError("the daemon answered with another number of results than there were products");
  }
  std::vector<GemmResult> results;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    v1::OpResult& result = *reply.mutable_results(static_cast<int>(i));
    ASSIGN_OR_RETURN(results.emplace_back(),
                     Decode(*result.mutable_report(), result.inline_result(), specs[i].d, start));
  }
  return results;
}

}  // namespace tessera::client
