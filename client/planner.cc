#include "client/planner.h"

#include "client/core.h"
#include "common/status_macros.h"

namespace tessera::client {
namespace {

using Stub = v1::Planner::Stub;

template <typename Request, typename Reply>
absl::StatusOr<Reply> Call(const ClientCore& core,
                           grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                           const Request& request) {
  grpc::ClientContext context;
  core.Prepare(context);
  Reply reply;
  RETURN_IF_ERROR(FromUnaryCall((core.planner.get()->*method)(&context, request, &reply)));
  return reply;
}

}  // namespace

Planner::Planner(const Client& client) : core_(client.core_) {}

absl::StatusOr<v1::PlannerStateReply> Planner::State() const {
  return Call(*core_, &Stub::State, v1::PlannerStateRequest());
}

absl::StatusOr<v1::PlannerFactsReply> Planner::Facts() const {
  return Call(*core_, &Stub::Facts, v1::PlannerFactsRequest());
}

absl::StatusOr<v1::TileVocabularyReply> Planner::TileVocabulary(const v1::TileVocabularyRequest& request) const {
  return Call(*core_, &Stub::TileVocabulary, request);
}

absl::StatusOr<v1::ProbeReply> Planner::Probe(const v1::ProbeRequest& request) const {
  return Call(*core_, &Stub::Probe, request);
}

absl::StatusOr<v1::ExportRowsReply> Planner::ExportRows(const v1::ExportRowsRequest& request) const {
  return Call(*core_, &Stub::ExportRows, request);
}

absl::StatusOr<v1::ListChangesReply> Planner::ListChanges(const v1::ListChangesRequest& request) const {
  return Call(*core_, &Stub::ListChanges, request);
}

absl::StatusOr<v1::ChangeReply> Planner::SetPlanner(const v1::SetPlannerRequest& request) const {
  return Call(*core_, &Stub::SetPlanner, request);
}

absl::StatusOr<v1::ChangeReply> Planner::SetTable(const v1::SetTableRequest& request) const {
  return Call(*core_, &Stub::SetTable, request);
}

absl::StatusOr<v1::ChangeReply> Planner::InjectRows(const v1::InjectRowsRequest& request) const {
  return Call(*core_, &Stub::InjectRows, request);
}

absl::StatusOr<v1::ChangeReply> Planner::SetLog(const v1::SetLogRequest& request) const {
  return Call(*core_, &Stub::SetLog, request);
}

absl::StatusOr<v1::ChangeReply> Planner::SetStaging(const v1::SetStagingRequest& request) const {
  return Call(*core_, &Stub::SetStaging, request);
}

absl::StatusOr<v1::ChangeReply> Planner::Rollback(const v1::RollbackRequest& request) const {
  return Call(*core_, &Stub::Rollback, request);
}

absl::StatusOr<v1::ChangeReply> Planner::ImportRows(const v1::ImportRowsRequest& request) const {
  return Call(*core_, &Stub::ImportRows, request);
}

absl::Status Planner::WatchDecisions(const v1::WatchDecisionsRequest& request,
                                     const std::function<bool(const v1::WatchDecisionsReply&)>& on_reply) const {
  grpc::ClientContext context;
  const std::unique_ptr<grpc::ClientReader<v1::WatchDecisionsReply>> reader =
      core_->planner->WatchDecisions(&context, request);
  v1::WatchDecisionsReply reply;
  while (reader->Read(&reply)) {
    if (on_reply(reply)) continue;
    context.TryCancel();
    while (reader->Read(&reply)) continue;
    reader->Finish();  // CANCELLED, as asked for
    return absl::OkStatus();
  }
  return FromGrpc(reader->Finish());
}

}  // namespace tessera::client
