// tessera.v1.Planner: what the planner would do, and how that is changed while the daemon serves.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "planner/planner.h"
#include "server/exec/executor.h"
#include "server/rpc/planner_watch.h"
#include "server/rpc/rpc.h"
#include "tessera/v1/planner.grpc.pb.h"

namespace tessera::server {

struct KeptRows {
  std::size_t rows = 0;  // that are kept now
  absl::Status status;   // why some are not
};

// Where injected rows are kept over restarts; without functions nowhere.
struct RowsFile {
  std::string name;                    // for operators; empty: there is none
  std::function<std::string()> error;  // what went wrong last; empty if nothing did. Thread-safe
  // Keeps the injected rows that are in force at some moment after the call; `clear`: and no others, whoever has kept
  // them. Returns at once and calls `done` later, on a thread that may wait for disks. Thread-safe.
  std::function<void(bool clear, std::function<void(const KeptRows&)> done)> persist;
};

class PlannerService final : public v1::Planner::CallbackService {
 public:
  // All outlive the gRPC server.
  PlannerService(RpcScope& scope, const Executor& executor, planner::Planner& planner, WatchPump& pump, RowsFile file)
      : scope_(scope), executor_(executor), planner_(planner), pump_(pump), file_(std::move(file)) {}

  grpc::ServerUnaryReactor* State(grpc::CallbackServerContext* context, const v1::PlannerStateRequest* request,
                                  v1::PlannerStateReply* reply) override;
  grpc::ServerUnaryReactor* Facts(grpc::CallbackServerContext* context, const v1::PlannerFactsRequest* request,
                                  v1::PlannerFactsReply* reply) override;
  grpc::ServerUnaryReactor* TileVocabulary(grpc::CallbackServerContext* context,
                                           const v1::TileVocabularyRequest* request,
                                           v1::TileVocabularyReply* reply) override;
  grpc::ServerUnaryReactor* Probe(grpc::CallbackServerContext* context, const v1::ProbeRequest* request,
                                  v1::ProbeReply* reply) override;
  grpc::ServerUnaryReactor* SetPlanner(grpc::CallbackServerContext* context, const v1::SetPlannerRequest* request,
                                       v1::ChangeReply* reply) override;
  grpc::ServerUnaryReactor* SetTable(grpc::CallbackServerContext* context, const v1::SetTableRequest* request,
                                     v1::ChangeReply* reply) override;
  grpc::ServerUnaryReactor* InjectRows(grpc::CallbackServerContext* context, const v1::InjectRowsRequest* request,
                                       v1::ChangeReply* reply) override;
  grpc::ServerUnaryReactor* SetLog(grpc::CallbackServerContext* context, const v1::SetLogRequest* request,
                                   v1::ChangeReply* reply) override;
  grpc::ServerUnaryReactor* SetStaging(grpc::CallbackServerContext* context, const v1::SetStagingRequest* request,
                                       v1::ChangeReply* reply) override;
  grpc::ServerUnaryReactor* Rollback(grpc::CallbackServerContext* context, const v1::RollbackRequest* request,
                                     v1::ChangeReply* reply) override;
  grpc::ServerUnaryReactor* ExportRows(grpc::CallbackServerContext* context, const v1::ExportRowsRequest* request,
                                       v1::ExportRowsReply* reply) override;
  grpc::ServerUnaryReactor* ImportRows(grpc::CallbackServerContext* context, const v1::ImportRowsRequest* request,
                                       v1::ChangeReply* reply) override;
  grpc::ServerUnaryReactor* ListChanges(grpc::CallbackServerContext* context, const v1::ListChangesRequest* request,
                                        v1::ListChangesReply* reply) override;
  grpc::ServerWriteReactor<v1::WatchDecisionsReply>* WatchDecisions(grpc::CallbackServerContext* context,
                                                                    const v1::WatchDecisionsRequest* request) override;

 private:
  using Change = std::function<absl::StatusOr<planner::ChangeResult>(const planner::ChangeOptions& options)>;

  // Decodes the options that every change takes, makes the change, fills the reply.
  absl::Status Apply(const Peer& peer, const v1::ChangeOptions& options, const Change& change, v1::ChangeReply& reply);
  absl::StatusOr<planner::Question> QuestionOf(const v1::Problem& problem, std::string_view field) const;
  // `reply` is complete once `gone` is.
  void Persist(bool clear, v1::ChangeReply& reply, const GoneToken& gone);

  std::string RowsFileError() const;

  RpcScope& scope_;
  const Executor& executor_;
  planner::Planner& planner_;
  WatchPump& pump_;
  const RowsFile file_;
};

}  // namespace tessera::server
