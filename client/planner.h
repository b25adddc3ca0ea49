// The planner of a daemon: what it would do, how it is set, what it decides. proto/tessera/v1/planner.proto says what
// each call means, and who may make it.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "tessera/v1/planner.pb.h"

namespace tessera::client {

// Keeps the client's connection. Thread-safe.
class Planner {
 public:
  explicit Planner(const Client& client);

  absl::StatusOr<v1::PlannerStateReply> State() const;
  absl::StatusOr<v1::PlannerFactsReply> Facts() const;
  absl::StatusOr<v1::TileVocabularyReply> TileVocabulary(const v1::TileVocabularyRequest& request = {}) const;
  absl::StatusOr<v1::ProbeReply> Probe(const v1::ProbeRequest& request) const;
  absl::StatusOr<v1::ExportRowsReply> ExportRows(const v1::ExportRowsRequest& request = {}) const;
  absl::StatusOr<v1::ListChangesReply> ListChanges(const v1::ListChangesRequest& request = {}) const;

  absl::StatusOr<v1::ChangeReply> SetPlanner(const v1::SetPlannerRequest& request) const;
  absl::StatusOr<v1::ChangeReply> SetTable(const v1::SetTableRequest& request) const;
  absl::StatusOr<v1::ChangeReply> InjectRows(const v1::InjectRowsRequest& request) const;
  absl::StatusOr<v1::ChangeReply> SetLog(const v1::SetLogRequest& request) const;
  absl::StatusOr<v1::ChangeReply> SetStaging(const v1::SetStagingRequest& request) const;
  absl::StatusOr<v1::ChangeReply> Rollback(const v1::RollbackRequest& request) const;
  absl::StatusOr<v1::ChangeReply> ImportRows(const v1::ImportRowsRequest& request) const;

  // Calls back with each message, the first of which has no decisions, until `on_reply` answers false (OK) or the call
  // ends by itself (its status).
  absl::Status WatchDecisions(const v1::WatchDecisionsRequest& request,
                              const std::function<bool(const v1::WatchDecisionsReply&)>& on_reply) const;

 private:
  std::shared_ptr<ClientCore> core_;
};

}  // namespace tessera::client
