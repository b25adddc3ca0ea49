#include "server/rpc/planner_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "planner/known_devices.h"
#include "server/rpc/planner_decode.h"
#include "server/rpc/planner_encode.h"

namespace tessera::server {
namespace {

constexpr int kProbesMax = 64;  // of one change
constexpr std::uint32_t kChangesDefault = 100;
constexpr std::uint32_t kChangesMax = 1000;

absl::StatusOr<planner::InjectMode> DecodeMode(v1::InjectMode mode, const std::string& text) {
  switch (mode) {
    case v1::INJECT_MODE_UNSPECIFIED:
    case v1::INJECT_MODE_APPEND:
      return planner::InjectMode::kAppend;
    case v1::INJECT_MODE_REPLACE:
      return planner::InjectMode::kReplace;
    case v1::INJECT_MODE_CLEAR:
      if (!text.empty()) return absl::InvalidArgumentError("text: must be empty where mode is CLEAR");
      return planner::InjectMode::kClear;
    default:
      return absl::InvalidArgumentError(absl::StrCat("mode: unknown value ", static_cast<int>(mode)));
  }
}

absl::StatusOr<std::optional<planner::Tier>> DecodeTier(v1::RowTier tier) {
  switch (tier) {
    case v1::ROW_TIER_UNSPECIFIED:
      return std::optional<planner::Tier>();
    case v1::ROW_TIER_OVERRIDE:
      return planner::Tier::kOverride;
    case v1::ROW_TIER_INJECTED:
      return planner::Tier::kInjected;
    case v1::ROW_TIER_BUILTIN:
      return planner::Tier::kBuiltin;
    default:
      return absl::InvalidArgumentError(absl::StrCat("tier: unknown value ", static_cast<int>(tier)));
  }
}

std::string DeviceNames() {
  return absl::StrJoin(planner::KnownDevices(), ", ",
                       [](std::string* out, const planner::KnownDevice& device) { out->append(device.name); });
}

}  // namespace

absl::StatusOr<planner::Question> PlannerService::QuestionOf(const v1::Problem& problem, std::string_view field) const {
  ASSIGN_OR_RETURN(const ProbedProblem decoded, DecodeProblem(problem, field));
  planner::Question question{.gemm = decoded.gemm, .facts = {}};
  if (!decoded.device.empty()) {
    const planner::KnownDevice* device = planner::FindDevice(decoded.device);
    if (device == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(Av(field), ".device: no such device; takes ", DeviceNames()));
    }
    if (decoded.backend.has_value() && *decoded.backend != device->facts.backend) {
      return absl::InvalidArgumentError(absl::StrCat(Av(field), ".backend: ", decoded.device, " is known as ",
                                                     Av(kernels::BackendName(device->facts.backend))));
    }
    question.facts = device->facts;
    return question;
  }
  if (decoded.backend.has_value()) {
    ASSIGN_OR_RETURN(question.facts, executor_.FactsOf(*decoded.backend));
    return question;
  }
  // As a call that names no backend: the first that can, in order of preference.
  const std::vector<planner::DeviceFacts> facts = executor_.Facts();
  for (const planner::DeviceFacts& each : facts) {
    question.facts = each;
    if (planner_.ProbePlan(question, 0).plan.ok()) return question;
  }
  question.facts = facts.front();
  return question;
}

absl::Status PlannerService::Apply(const Peer& peer, const v1::ChangeOptions& options, const Change& change,
                                   v1::ChangeReply& reply) {
  if (options.probes_size() > kProbesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("options.probes: ", options.probes_size(), " problems; takes up to ", kProbesMax));
  }
  std::vector<planner::Question> probes;
  for (int i = 0; i < options.probes_size(); ++i) {
    ASSIGN_OR_RETURN(planner::Question question,
                     QuestionOf(options.probes(i), absl::StrCat("options.probes[", i, "]")));
    probes.push_back(question);
  }
  planner::ChangeOptions decoded{.who = peer.Principal(), .dry_run = options.dry_run(), .probes = probes};
  if (options.has_expected_revision()) decoded.expected_revision = options.expected_revision();
  ASSIGN_OR_RETURN(const planner::ChangeResult result, change(decoded));
  Encode(result, reply);
  return absl::OkStatus();
}

void PlannerService::Persist(bool clear, v1::ChangeReply& reply, const GoneToken& gone) {
  if (!file_.persist) {
    reply.set_persist_error(RowsFileError());
    return;
  }
  file_.persist(clear, [&reply, gone](const KeptRows& kept) {
    reply.set_rows_persisted(static_cast<std::uint32_t>(kept.rows));
    if (!kept.status.ok()) reply.set_persist_error(MessageOf(kept.status));
  });
}

std::string PlannerService::RowsFileError() const {
  return file_.error ? file_.error() : "this daemon keeps no rows";
}

grpc::ServerUnaryReactor* PlannerService::State(grpc::CallbackServerContext* context,
                                                const v1::PlannerStateRequest* /*request*/,
                                                v1::PlannerStateReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerState, [&](const Peer& /*peer*/) {
    Encode(planner_.State(), *reply);
    reply->set_rows_file(file_.name);
    reply->set_rows_file_error(RowsFileError());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PlannerService::Facts(grpc::CallbackServerContext* context,
                                                const v1::PlannerFactsRequest* /*request*/,
                                                v1::PlannerFactsReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerFacts, [&](const Peer& /*peer*/) {
    for (const planner::DeviceFacts& facts : executor_.Facts()) {
      const auto states = executor_.Backends();
      const auto state = std::find_if(states.begin(), states.end(),
                                      [&](const BackendState& each) { return each.backend == facts.backend; });
      Encode(facts, kernels::BackendName(facts.backend), state == states.end() ? "" : state->reason, true,
             *reply->add_devices());
    }
    for (const planner::KnownDevice& device : planner::KnownDevices()) {
      Encode(device.facts, device.name, device.description, false, *reply->add_devices());
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PlannerService::TileVocabulary(grpc::CallbackServerContext* context,
                                                         const v1::TileVocabularyRequest* request,
                                                         v1::TileVocabularyReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerTileVocabulary, [&](const Peer& /*peer*/) {
    const std::vector<planner::DeviceFacts> served = executor_.Facts();
    for (const planner::Recipe& recipe : planner_.TileVocabulary()) {
      if (!recipe.info.class_name.starts_with(request->class_prefix())) continue;
      const bool available = std::any_of(served.begin(), served.end(), [&](const planner::DeviceFacts& facts) {
        return facts.backend == recipe.info.backend && facts.archs.Has(recipe.info.arch);
      });
      Encode(recipe, available, *reply->add_recipes());
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PlannerService::Probe(grpc::CallbackServerContext* context, const v1::ProbeRequest* request,
                                                v1::ProbeReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerProbe, [&](const Peer& /*peer*/) -> absl::Status {
    if (request->candidates_max() > planner::kProbeCandidatesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("candidates_max: ", request->candidates_max(), "; takes up to ", planner::kProbeCandidatesMax));
    }
    ASSIGN_OR_RETURN(const planner::Question question, QuestionOf(request->problem(), "problem"));
    const std::size_t most = request->candidates_max() == 0 ? planner::kProbeCandidates : request->candidates_max();
    const planner::Probe probe = planner_.ProbePlan(question, most);
    RETURN_IF_ERROR(probe.plan.status());
    Encode(probe, *reply);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PlannerService::SetPlanner(grpc::CallbackServerContext* context,
                                                     const v1::SetPlannerRequest* request, v1::ChangeReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerSetPlanner, [&](const Peer& peer) {
    const auto change = [&](const planner::ChangeOptions& options) {
      return planner_.SetPlanner(request->mode(), options);
    };
    return Apply(peer, request->options(), change, *reply);
  });
}

grpc::ServerUnaryReactor* PlannerService::SetTable(grpc::CallbackServerContext* context,
                                                   const v1::SetTableRequest* request, v1::ChangeReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerSetTable, [&](const Peer& peer) {
    const auto change = [&](const planner::ChangeOptions& options) {
      return planner_.SetTable(request->text(), options);
    };
    return Apply(peer, request->options(), change, *reply);
  });
}

grpc::ServerUnaryReactor* PlannerService::InjectRows(grpc::CallbackServerContext* context,
                                                     const v1::InjectRowsRequest* request, v1::ChangeReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerInjectRows, [&](const Peer& peer) -> absl::Status {
    ASSIGN_OR_RETURN(const planner::InjectMode mode, DecodeMode(request->mode(), request->text()));
    const auto change = [&](const planner::ChangeOptions& options) {
      return planner_.InjectRows(request->text(), mode, options);
    };
    return Apply(peer, request->options(), change, *reply);
  });
}

grpc::ServerUnaryReactor* PlannerService::SetLog(grpc::CallbackServerContext* context, const v1::SetLogRequest* request,
                                                 v1::ChangeReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerSetLog, [&](const Peer& peer) {
    const auto change = [&](const planner::ChangeOptions& options) {
      return planner_.SetLog(request->enabled(), options);
    };
    return Apply(peer, request->options(), change, *reply);
  });
}

grpc::ServerUnaryReactor* PlannerService::SetStaging(grpc::CallbackServerContext* context,
                                                     const v1::SetStagingRequest* request, v1::ChangeReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerSetStaging, [&](const Peer& peer) -> absl::Status {
    std::optional<bool> tma;
    std::optional<bool> mx;
    if (request->has_tma()) tma = request->tma();
    if (request->has_mx()) mx = request->mx();
    if (!tma.has_value() && !mx.has_value()) return absl::InvalidArgumentError("tma: neither it nor mx is set");
    const auto change = [&](const planner::ChangeOptions& options) { return planner_.SetStaging(tma, mx, options); };
    return Apply(peer, request->options(), change, *reply);
  });
}

grpc::ServerUnaryReactor* PlannerService::Rollback(grpc::CallbackServerContext* context,
                                                   const v1::RollbackRequest* request, v1::ChangeReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerRollback, [&](const Peer& peer) {
    const auto change = [&](const planner::ChangeOptions& options) {
      return planner_.Rollback(request->revision(), options);
    };
    return Apply(peer, request->options(), change, *reply);
  });
}

grpc::ServerUnaryReactor* PlannerService::ExportRows(grpc::CallbackServerContext* context,
                                                     const v1::ExportRowsRequest* request, v1::ExportRowsReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerExportRows, [&](const Peer& /*peer*/) -> absl::Status {
    ASSIGN_OR_RETURN(const std::optional<planner::Tier> tier, DecodeTier(request->tier()));
    planner::ExportedRows rows = planner_.ExportRows(tier);
    reply->set_revision(rows.revision);
    reply->set_text(std::move(rows.text));
    reply->set_rows(static_cast<std::uint32_t>(rows.rows));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PlannerService::ImportRows(grpc::CallbackServerContext* context,
                                                     const v1::ImportRowsRequest* request, v1::ChangeReply* reply) {
  const auto handle = [&](const Peer& peer, const GoneToken& gone) -> absl::Status {
    ASSIGN_OR_RETURN(const planner::InjectMode mode, DecodeMode(request->mode(), request->text()));
    const auto change = [&](const planner::ChangeOptions& options) {
      return planner_.ImportRows(request->text(), mode, options);
    };
    RETURN_IF_ERROR(Apply(peer, request->options(), change, *reply));
    if (request->persist() && !reply->dry_run()) Persist(mode == planner::InjectMode::kClear, *reply, gone);
    return absl::OkStatus();
  };
  return AnswerWhenGone(context, scope_, RpcMethod::kPlannerImportRows, handle);
}

grpc::ServerUnaryReactor* PlannerService::ListChanges(grpc::CallbackServerContext* context,
                                                      const v1::ListChangesRequest* request,
                                                      v1::ListChangesReply* reply) {
  return Answer(context, scope_, RpcMethod::kPlannerListChanges, [&](const Peer& /*peer*/) -> absl::Status {
    if (request->limit() > kChangesMax) {
      return absl::InvalidArgumentError(absl::StrCat("limit: ", request->limit(), "; takes up to ", kChangesMax));
    }
    const std::uint32_t limit = request->limit() == 0 ? kChangesDefault : request->limit();
    const planner::AuditPage page = planner_.Changes(limit, request->before_sequence());
    // A thousand changes of whole tables would be more than a message may have: half of that, and the rest is older.
    const auto bytes_max = static_cast<std::size_t>(scope_.settings.message_bytes_max) / 2;
    std::size_t bytes = 0;
    reply->set_more(page.more);
    for (const planner::AuditEntry& entry : page.entries) {
      v1::PlannerChange& change = *reply->add_changes();
      Encode(entry, change);
      bytes += change.ByteSizeLong();
      if (bytes <= bytes_max || reply->changes_size() == 1) continue;
      reply->mutable_changes()->RemoveLast();
      reply->set_more(true);
      break;
    }
    const planner::AuditStats stats = planner_.State().audit;
    reply->set_persisted(stats.persisted);
    reply->set_persist_error(stats.error);
    reply->set_damaged_lines(stats.damaged_lines);
    reply->set_epoch(planner_.epoch());
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::WatchDecisionsReply>* PlannerService::WatchDecisions(
    grpc::CallbackServerContext* context, const v1::WatchDecisionsRequest* request) {
  return ServeWatch(*context, *request, scope_, planner_, pump_);
}

}  // namespace tessera::server
