#include "tests/fuzz/gemm_request.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/text.h"
#include "kernels/launch/gemm_addressable.h"
#include "planner/gemm_planner.h"
#include "server/exec/bind.h"
#include "server/rpc/decode.h"
#include "server/session/session_table.h"
#include "tests/fuzz/bound_checks.h"
#include "tests/server/exec/bound_memory.h"
#include "tests/server/session/posix_fixtures.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::fuzz {
namespace {

using absl::StatusCode;
using server::BoundGemm;
using server::Id;

constexpr std::uint64_t kImportedBytes = 8'192;
constexpr std::uint64_t kTailOffset = 1'025;

// For steps that prepare the memory: no input can make them fail.
template <typename T>
T MustHave(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::cerr << "cannot prepare the sessions: " << value.status() << "\n";
  std::abort();
}

// Whether `path` is a field (or oneof) below `message`, with an index only behind a repeated one: op.a.strides[1].
bool NamesField(const google::protobuf::Descriptor* message, std::string_view path) {
  while (true) {
    const std::size_t dot = path.find('.');
    std::string name(path.substr(0, dot));
    const std::size_t bracket = name.find('[');
    const bool indexed = bracket != std::string::npos;
    const bool digits =
        indexed && name.size() > bracket + 2 && name.back() == ']' &&
        std::all_of(name.begin() + bracket + 1, name.end() - 1, [](char c) { return c >= '0' && c <= '9'; });
    if (indexed && !digits) return false;
    name.resize(std::min(bracket, name.size()));
    const bool last = dot == std::string_view::npos;
    if (last && !indexed && message->FindOneofByName(name) != nullptr) return true;
    const google::protobuf::FieldDescriptor* field = message->FindFieldByName(name);
    if (field == nullptr || (indexed && !field->is_repeated())) return false;
    if (last) return true;
    message = field->message_type();
    if (message == nullptr) return false;
    path.remove_prefix(dot + 1);
  }
}

// Two sessions, the memory of KnownId, and a planner.
class Daemon {
 public:
  Daemon() {
    const Id lease = MustHave(table_.OpenLease(server::kTestPeer));
    const Id token = MustHave(table_.OpenSession(server::kTestPeer, lease, "fuzz"));
    session_ = MustHave(table_.FindSession(server::kTestPeer, token));
    other_session_ = server::OpenTestSession(table_);

    for (const std::uint64_t bytes : {1U, 64U, 4'096U, 65'536U, 1U << 20U}) {
      AddUsable(MustHave(table_.AllocateBuffer(*session_, bytes)).id, 0);
    }
    const UniqueFd memfd = server::MakeMemfd(kImportedBytes);
    const int shared_memory = memories_;
    for (const std::uint64_t offset : {std::uint64_t{0}, kTailOffset}) {
      const std::uint64_t ticket = MustHave(table_.KeepDescriptor(lease, server::Duplicate(memfd)));
      const Id id = MustHave(table_.ImportBuffer(*session_, ticket, offset, 0)).id;
      AddUsable(id, offset);
      usable_[id.Bytes()].memory = shared_memory;
    }
    const Id released = MustHave(table_.AllocateBuffer(*session_, 4'096)).id;
    const Id foreign = MustHave(table_.AllocateBuffer(*other_session_, 4'096)).id;
    if (!table_.ReleaseBuffer(*session_, released).ok()) std::abort();
    Id former = released;
    former.epoch += 1;
    for (const Id& id : {released, foreign, former}) known_.push_back(id.Bytes());
    buffers_ = table_.Counts().buffers;
    if (known_.size() != kKnownIds) std::abort();
  }

  Outcome Drive(std::string_view bytes, std::string& refusal) {
    v1::GemmRequest request;
    if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return Outcome::kUnparsable;
    NameBuffers(*request.mutable_op());
    const Outcome outcome = DriveParsed(request, refusal);
    CheckUnpinned(request);
    return outcome;
  }

 private:
  void AddUsable(const Id& id, std::uint64_t memory_offset) {
    const server::BufferPin pin = MustHave(table_.PinBuffer(*session_, id, server::BufferAccess::kReadWrite));
    usable_[id.Bytes()] = {
        .data = pin->data(), .bytes = pin->bytes(), .memory = memories_++, .memory_offset = memory_offset};
    known_.push_back(id.Bytes());
  }

  void NameBuffers(v1::GemmOp& op) const {
    if (op.has_a()) NameBuffer(*op.mutable_a());
    if (op.has_b()) NameBuffer(*op.mutable_b());
    if (op.has_d()) NameBuffer(*op.mutable_d());
    if (op.a_scale().has_vector()) NameBuffer(*op.mutable_a_scale()->mutable_vector());
    if (op.b_scale().has_vector()) NameBuffer(*op.mutable_b_scale()->mutable_vector());
    if (op.epilogue().has_bias()) NameBuffer(*op.mutable_epilogue()->mutable_bias());
  }

  void NameBuffer(v1::Tensor& tensor) const {
    if (!tensor.has_buffer_id() || tensor.buffer_id().size() != 1) return;
    tensor.set_buffer_id(known_[static_cast<unsigned char>(tensor.buffer_id()[0]) % known_.size()]);
  }

  Outcome DriveParsed(const v1::GemmRequest& request, std::string& refusal) {
    const auto options = server::DecodeOptions(request.options());
    const auto call = server::DecodeGemm(request.op());
    for (const absl::Status& status : {options.status(), call.status()}) {
      if (status.ok()) continue;
      refusal = MessageOf(status);
      CheckRefusal(request, status, {StatusCode::kInvalidArgument, StatusCode::kUnimplemented});
      return Outcome::kDecodeRefused;
    }
    std::string inline_result;
    const auto bound = server::BindGemm(*call, Scope(session_.get(), inline_result));
    CheckWithoutSession(request, *call, bound);
    if (!bound.ok()) {
      refusal = MessageOf(bound.status());
      CheckRefusal(request, bound.status(),
                   {StatusCode::kInvalidArgument, StatusCode::kNotFound, StatusCode::kPermissionDenied,
                    StatusCode::kFailedPrecondition, StatusCode::kResourceExhausted});
      return Outcome::kBindRefused;
    }
    CheckBound(request, *bound, usable_, inline_result, kInlineBytesMax);
    CheckPinned(request, bound->pins.size());
    planner::GemmProblem problem = bound->problem;
    problem.addressable = kernels::AddressableBy(problem.gemm_class, bound->params);
    return Plan(request, problem, options->backend, refusal);
  }

  server::BindScope Scope(const server::Session* session, std::string& inline_result) {
    return {.sessions = &table_,
            .session = session,
            .inline_result = &inline_result,
            .inline_bytes_max = kInlineBytesMax,
            .metrics = &metrics_};
  }

  // A call without a session binds exactly if it binds with one and names no buffer.
  void CheckWithoutSession(const v1::GemmRequest& request, const server::GemmCall& call,
                           const absl::StatusOr<BoundGemm>& with_session) {
    std::string inline_result;
    const auto bound = server::BindGemm(call, Scope(nullptr, inline_result));
    if (bound.ok() != (with_session.ok() && with_session->pins.empty())) {
      BrokenPromise(request, "session",
                    bound.ok() ? "binds only without one" : "needed by a call that names no buffer");
    }
    if (!bound.ok())
      CheckRefusal(request, bound.status(), {StatusCode::kInvalidArgument, StatusCode::kResourceExhausted});
  }

  // Totality: the CPU has a plan for whatever binds, however small or large it is.
  Outcome Plan(const v1::GemmRequest& request, const planner::GemmProblem& problem,
               std::optional<kernels::Backend> backend, std::string& refusal) const {
    for (const planner::DeviceFacts& facts :
         {planner::DeviceFacts{.processors = 1, .workspace_bytes_max = 0},
          planner::DeviceFacts{.processors = 64, .workspace_bytes_max = std::int64_t{256} << 20}}) {
      const auto plan = planner_.Decide(problem, facts);
      if (!plan.ok()) BrokenPromise(request, "op", "bound, but the CPU has no plan: " + MessageOf(plan.status()));
      CheckPlan(request, problem, facts, *plan);
    }
    if (!backend.has_value() || *backend == kernels::Backend::kCpu) return Outcome::kBound;
    const planner::DeviceFacts facts = {
        .backend = *backend,
        .archs = {kernels::Arch::kSm80, kernels::Arch::kSm89, kernels::Arch::kSm90a, kernels::Arch::kVendor},
        .processors = 132,
        .workspace_bytes_max = std::int64_t{256} << 20};
    const auto plan = planner_.Decide(problem, facts);
    if (plan.ok()) {
      CheckPlan(request, problem, facts, *plan);
      return Outcome::kBound;
    }
    refusal = MessageOf(plan.status());
    if (plan.status().code() != StatusCode::kUnimplemented || refusal.find("no kernel of ") != 0 ||
        refusal.find(kernels::BackendName(*backend)) == std::string::npos) {
      BrokenPromise(request, "options.backend", "no plan, and not for lack of a kernel: " + plan.status().ToString());
    }
    return Outcome::kPlanRefused;
  }

  static void CheckPlan(const v1::GemmRequest& request, const planner::GemmProblem& problem,
                        const planner::DeviceFacts& facts, const planner::Plan& plan) {
    const auto require = [&request](bool holds, std::string_view what) {
      if (!holds) BrokenPromise(request, "plan", what);
    };
    require(plan.variant < kernels::GemmVariants().size(), "beyond the catalogue");
    const kernels::GemmVariant& variant = kernels::GemmVariants()[plan.variant];
    require(variant.info.backend == facts.backend, "of another backend");
    require(variant.gemm_class == problem.gemm_class, "of another class");
    require(plan.split >= 1 && plan.split <= std::max<std::int64_t>(1, problem.k), "an empty slice of K");
    require(plan.workspace_bytes >= 0 && plan.workspace_bytes <= facts.workspace_bytes_max, "above the scratch limit");
  }

  static void CheckRefusal(const v1::GemmRequest& request, const absl::Status& status,
                           std::initializer_list<StatusCode> codes) {
    const std::string message = MessageOf(status);
    const auto require = [&](bool holds, std::string_view what) {
      if (!holds) BrokenPromise(request, "refusal", std::string(what) + ": " + status.ToString());
    };
    require(std::find(codes.begin(), codes.end(), status.code()) != codes.end(), "a code of another stage");
    const std::size_t colon = message.find(": ");
    require(colon != std::string::npos && NamesField(v1::GemmRequest::descriptor(), message.substr(0, colon)),
            "the message does not begin with a field");
    require(message.size() > colon + 2, "the message has no reason");
    require(status.code() != StatusCode::kResourceExhausted || message.find("inline_bytes_max") != std::string::npos,
            "the message does not name the limit");
  }

  void CheckPinned(const v1::GemmRequest& request, std::size_t pins) {
    std::size_t named = 0;
    const v1::GemmOp& op = request.op();
    for (const v1::Tensor* tensor :
         {&op.a(), &op.b(), &op.d(), &op.a_scale().vector(), &op.b_scale().vector(), &op.epilogue().bias()}) {
      if (tensor->has_buffer_id()) ++named;
    }
    if (pins != named || Users(request) != named) BrokenPromise(request, "buffers", "not each named one is pinned");
  }

  void CheckUnpinned(const v1::GemmRequest& request) {
    if (Users(request) != 0) BrokenPromise(request, "buffers", "pinned after the call");
  }

  // Pins of all buffers.
  std::size_t Users(const v1::GemmRequest& request) {
    std::size_t users = 0;
    const auto rows = table_.ListBuffers([](const server::Peer&) { return true; }).rows;
    for (const server::BufferRow& row : rows) users += row.users;
    if (rows.size() != buffers_) BrokenPromise(request, "buffers", "their number changed");
    return users;
  }

  server::Metrics metrics_{server::MetricsOptions{.version = "fuzz", .variants = {}}};
  server::Reaper reaper_{std::chrono::seconds(10), metrics_};
  server::SessionTable table_{1,
                              {.sessions_max = 2,
                               .leases_max = 2,
                               .buffers_per_session_max = 16,
                               .buffer_bytes_max = 1U << 24U,
                               .session_buffer_bytes_max = 1U << 24U},
                              metrics_,
                              reaper_,
                              server::MakeIdleLane};
  const planner::GemmPlanner planner_{kernels::GemmVariants()};
  std::shared_ptr<server::Session> session_, other_session_;
  KnownBuffers usable_;
  std::vector<std::string> known_;  // ids by KnownId
  int memories_ = 0;
  std::size_t buffers_ = 0;
};

}  // namespace

Outcome DriveGemmRequest(std::string_view bytes, std::string* refusal) {
  static Daemon& daemon = *new Daemon();  // never destroyed: the process may end at any point
  std::string message;
  const Outcome outcome = daemon.Drive(bytes, message);
  if (refusal != nullptr) *refusal = std::move(message);
  return outcome;
}

}  // namespace tessera::fuzz
