// Cases about clients that end badly. What was seen before, as an expectation: under MPS a fault of any process ends
// the contexts of all within a second, the daemon's too; without MPS it harms nobody else.
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/client.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tests/gpu/isolation_cases.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr auto kReadyLimit = 20s;
constexpr int kRepeats = 5;
constexpr double kServingLimitMs = 5000;
constexpr auto kGiveUp = 15s;         // on a daemon that does not come back
constexpr auto kCheckLimit = 8s;      // for a fresh process to get a product
constexpr auto kWorkerEndLimit = 5s;  // for those that the fault has hit
constexpr auto kUndisturbed = 2s;     // without MPS: how long the daemon is watched after the fault
constexpr auto kStopLimit = 10s;
constexpr double kCleanLimitMs = 2000;
constexpr auto kCleanGiveUp = 6s;
constexpr auto kIdleLimit = 10s;
constexpr int kVictimBuffers = 3;
constexpr std::int64_t kVictimBytesMin = std::int64_t{256} << 20;

std::int64_t Integer(const Json& json, const char* name) {
  return json.is_object() ? json.value(name, std::int64_t{0}) : 0;
}

double Milliseconds(std::int64_t from_ns, std::int64_t to_ns) {
  return static_cast<double>(to_ns - from_ns) / 1e6;
}

// What is wrong, collected.
class Wrong {
 public:
  void Check(bool ok, const std::string& what) {
    if (!ok) absl::StrAppend(&text_, text_.empty() ? "" : "; ", what);
  }
  bool none() const { return text_.empty(); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

absl::StatusOr<client::Client> ConnectTo(const std::string& socket, std::chrono::milliseconds timeout) {
  return client::Client::Connect({.socket = socket, .side_channel = {}, .timeout = timeout});
}

bool ServesCuda(const v1::ServerInfoReply& info) {
  for (const v1::BackendInfo& backend : info.backends()) {
    if (backend.name() == "cuda" && backend.available()) return info.state() == "serving";
  }
  return false;
}

// What a call with a session's token answers, on a connection of its own.
grpc::Status CallWithToken(const client::Client& client, const std::string& token) {
  const auto memory = v1::Memory::NewStub(client.channel());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + 2s);
  context.AddMetadata("tessera-session-bin", token);
  v1::AllocateBufferRequest request;
  request.set_bytes(4096);
  v1::AllocateBufferReply reply;
  return memory->AllocateBuffer(&context, request, &reply);
}

// One fault, seen from a process without CUDA.
class FaultRound {
 public:
  FaultRound(Stage& stage, TestDaemon& daemon, int number) : stage_(stage), daemon_(daemon), number_(number) {}

  absl::Status Run() {
    ASSIGN_OR_RETURN(before_, daemon_.client().ServerInfo());
    ASSIGN_OR_RETURN(Worker in_flight, stage_.Start("inflight", daemon_.socket()));
    ASSIGN_OR_RETURN(const Json ready, in_flight.Await("ready", kReadyLimit));
    ASSIGN_OR_RETURN(Worker faulty, stage_.Start("fault"));
    RETURN_IF_ERROR(faulty.Await("ready", kReadyLimit).status());
    RETURN_IF_ERROR(faulty.Tell("go"));
    return stage_.mps() ? Recover(in_flight, faulty, ready.value("token", "")) : GoOn(in_flight, faulty);
  }

 private:
  // When the fault was, in ns of NowNs; 0 if there was none.
  absl::StatusOr<std::int64_t> FaultOf(Worker& faulty) {
    ASSIGN_OR_RETURN(const Json answer, faulty.Answer(kWorkerEndLimit));
    if (!answer.value("error", "").empty()) return Integer(answer, "fault_ns");
    return absl::InternalError("the illegal read was no error: this test would see nothing");
  }

  // With MPS: the daemon's context is lost, and its supervisor starts another one.
  absl::Status Recover(Worker& in_flight, Worker& faulty, const std::string& token) {
    const absl::StatusOr<std::int64_t> serving_ns = AwaitNewDaemon();
    // In any case: a process that has lost its context is in the way of the next round.
    const absl::StatusOr<std::int64_t> fault_ns = FaultOf(faulty);
    const absl::StatusOr<Json> calls = in_flight.Answer(kWorkerEndLimit);
    faulty.Kill();
    in_flight.Kill();
    RETURN_IF_ERROR(fault_ns.status());
    AddCalls(calls, *fault_ns);
    Wrong wrong;
    wrong.Check(serving_ns.ok(), MessageOf(serving_ns.status()));
    wrong.Check(::kill(before_.pid(), 0) != 0 && errno == ESRCH, "the old daemon process is still there");
    const double ms = serving_ns.ok() ? Milliseconds(*fault_ns, *serving_ns) : -1;
    wrong.Check(ms <= kServingLimitMs, "it took too long");
    if (serving_ns.ok()) CheckNewDaemon(token, wrong);
    stage_.Add({.name = "fault_to_serving_ms",
                .value = ms,
                .unit = "ms",
                .detail = absl::StrFormat(
                    "round %d, a fresh process has a right product; new daemon answers after %.0f%s%s", number_,
                    epoch_ns_ == 0 ? -1 : Milliseconds(*fault_ns, epoch_ns_), wrong.none() ? "" : ": ", wrong.text()),
                .ok = wrong.none()});
    return serving_ns.status();
  }

  // Until another daemon process serves the GPU and a fresh client gets a right product of it.
  absl::StatusOr<std::int64_t> AwaitNewDaemon() {
    absl::StatusOr<std::int64_t> serving_ns = absl::DeadlineExceededError("no new daemon serves on the GPU");
    const bool back = Eventually(stage_.Within(kGiveUp), [&] {
      const absl::StatusOr<client::Client> client = ConnectTo(daemon_.socket(), 500ms);
      if (!client.ok()) return false;
      const absl::StatusOr<v1::ServerInfoReply> info = client->ServerInfo();
      if (!info.ok() || info->epoch() == before_.epoch() || !ServesCuda(*info)) return false;
      if (epoch_ns_ == 0) epoch_ns_ = NowNs();
      serving_ns = stage_.CheckProduct(daemon_.socket(), kCheckLimit);
      return serving_ns.ok();
    });
    if (back) return serving_ns;
    return absl::DeadlineExceededError(
        absl::StrCat(MessageOf(serving_ns.status()), "; the daemon's log ends: ", daemon_.LogTail()));
  }

  void CheckNewDaemon(const std::string& token, Wrong& wrong) {
    const absl::Status connected = daemon_.Reconnect(stage_.Within(kWorkerEndLimit));
    wrong.Check(connected.ok(), MessageOf(connected));
    if (!connected.ok()) return;
    const grpc::Status old = CallWithToken(daemon_.client(), absl::HexStringToBytes(token));
    wrong.Check(
        old.error_code() == grpc::StatusCode::FAILED_PRECONDITION &&
            absl::StrContains(old.error_message(), "former daemon process"),
        absl::StrCat("the old session's token answers ", static_cast<int>(old.error_code()), " ", old.error_message()));
    const absl::StatusOr<v1::ServerInfoReply> info = daemon_.client().ServerInfo();
    wrong.Check(info.ok() && info->pid() != before_.pid() && info->restarts() > before_.restarts(),
                info.ok() ? absl::StrCat(info->restarts(), " restarts, ", before_.restarts(), " before")
                          : MessageOf(info.status()));
  }

  // Calls under way: answered UNAVAILABLE, or finished before.
  void AddCalls(const absl::StatusOr<Json>& calls, std::int64_t fault_ns) {
    const bool failed = calls.ok() && Integer(*calls, "first_failure_ns") != 0;
    const bool right = failed && Integer(*calls, "other") == 0 && Integer(*calls, "unanswered") == 0;
    stage_.Add(
        {.name = "fault_to_first_unavailable_ms",
         .value = failed ? Milliseconds(fault_ns, Integer(*calls, "first_failure_ns")) : -1,
         .unit = "ms",
         .detail = absl::StrFormat("round %d; %s", number_, calls.ok() ? calls->dump() : MessageOf(calls.status())),
         .ok = right});
  }

  // Without MPS: nothing happens to the daemon.
  absl::Status GoOn(Worker& in_flight, Worker& faulty) {
    RETURN_IF_ERROR(FaultOf(faulty).status());
    Wrong wrong;
    // Ends before, if a product fails.
    in_flight.Await("failed", kUndisturbed).status().IgnoreError();
    RETURN_IF_ERROR(in_flight.Tell("stop"));
    ASSIGN_OR_RETURN(const Json calls, in_flight.Answer(kWorkerEndLimit));
    wrong.Check(Integer(calls, "first_failure_ns") == 0, calls.dump());
    const absl::StatusOr<v1::ServerInfoReply> info = daemon_.client().ServerInfo();
    wrong.Check(info.ok() && info->epoch() == before_.epoch(),
                info.ok() ? "the daemon is another one" : MessageOf(info.status()));
    const absl::Status product = stage_.CheckProduct(daemon_.socket(), kCheckLimit).status();
    wrong.Check(product.ok(), MessageOf(product));
    const double restarts = info.ok() ? static_cast<double>(info->restarts()) : -1;
    wrong.Check(restarts == 0, "restarts");
    stage_.Add({.name = "fault_restarts",
                .value = restarts,
                .unit = "count",
                .detail = wrong.none() ? absl::StrFormat("%d products right on after the fault, none failed",
                                                         Integer(calls, "ok"))
                                       : wrong.text(),
                .ok = wrong.none()});
    return absl::OkStatus();
  }

  Stage& stage_;
  TestDaemon& daemon_;
  const int number_;
  v1::ServerInfoReply before_;
  std::int64_t epoch_ns_ = 0;  // when the new daemon was seen
};

// Buffers of all sessions; -1 if the daemon does not say.
int Buffers(TestDaemon& daemon) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + 2s);
  v1::ListBuffersRequest request;
  request.set_all_principals(true);
  v1::ListBuffersReply reply;
  const auto memory = v1::Memory::NewStub(daemon.client().channel());
  return memory->ListBuffers(&context, request, &reply).ok() ? reply.buffers_size() : -1;
}

absl::Status KillOne(Stage& stage, TestDaemon& daemon, int number) {
  if (!Eventually(stage.Within(kIdleLimit), [&] { return Buffers(daemon) == 0; })) {
    return absl::FailedPreconditionError(absl::StrCat(Buffers(daemon), " buffers before the victim"));
  }
  ASSIGN_OR_RETURN(Worker witness, stage.Start("memory"));
  RETURN_IF_ERROR(witness.Await("ready", kReadyLimit).status());
  ASSIGN_OR_RETURN(Worker victim, stage.Start("victim", daemon.socket()));
  ASSIGN_OR_RETURN(const Json ready, victim.Await("ready", kReadyLimit));
  const auto pid = static_cast<pid_t>(Integer(ready, "pid"));
  if (pid <= 1) return absl::InternalError("the victim does not say its number");
  Wrong wrong;
  wrong.Check(Buffers(daemon) == kVictimBuffers, absl::StrCat(Buffers(daemon), " buffers while the victim works"));
  RETURN_IF_ERROR(witness.Tell("go"));
  ASSIGN_OR_RETURN(const Json armed, witness.Await("armed", kReadyLimit));
  wrong.Check(Integer(armed, "used") > kVictimBytesMin, "the victim's memory does not show: a leak would not either");

  // Not Worker::Kill, which returns when all of the process has gone.
  const std::int64_t killed_ns = NowNs();
  if (::kill(pid, SIGKILL) != 0) return ErrnoStatus(absl::StatusCode::kInternal, "killing the victim");
  const bool released = Eventually(stage.Within(kCleanGiveUp), [&] { return Buffers(daemon) == 0; });
  const std::int64_t released_ns = NowNs();
  wrong.Check(released, absl::StrCat(Buffers(daemon), " buffers are left"));
  ASSIGN_OR_RETURN(const Json memory, witness.Answer(kCleanGiveUp));
  const std::int64_t back_ns = Integer(memory, "back_ns");
  wrong.Check(back_ns > 0, absl::StrCat(Integer(memory, "missing"), " bytes did not come back"));
  const double ms = released && back_ns > 0 ? Milliseconds(killed_ns, std::max(released_ns, back_ns)) : -1;
  wrong.Check(ms <= kCleanLimitMs, "it took too long");
  stage.Add({.name = "killed_to_clean_ms",
             .value = ms,
             .unit = "ms",
             .detail = absl::StrFormat("round %d; buffers gone after %.0f, memory free after %.0f%s%s", number,
                                       Milliseconds(killed_ns, released_ns),
                                       back_ns > 0 ? Milliseconds(killed_ns, back_ns) : -1.0, wrong.none() ? "" : ": ",
                                       wrong.text()),
             .ok = wrong.none()});
  return absl::OkStatus();
}

}  // namespace

absl::Status MeasureFault(Stage& stage) {
  // A supervisor of its own for each: one whose daemons keep living for seconds only waits longer from time to time.
  for (int round = 1; round <= (stage.mps() ? kRepeats : 1); ++round) {
    // With = the value is the option's for sure, whether or not it needs one.
    ASSIGN_OR_RETURN(const std::unique_ptr<TestDaemon> daemon,
                     stage.StartDaemon(absl::StrCat("supervised", round), {"--supervise"}));
    RETURN_IF_ERROR(FaultRound(stage, *daemon, round).Run());
    RETURN_IF_ERROR(daemon->Stop(stage.Within(kStopLimit)));
  }
  return absl::OkStatus();
}

absl::Status MeasureKilledClient(Stage& stage, TestDaemon& daemon) {
  ASSIGN_OR_RETURN(const v1::ServerInfoReply before, daemon.client().ServerInfo());
  for (int round = 1; round <= kRepeats; ++round) RETURN_IF_ERROR(KillOne(stage, daemon, round));
  ASSIGN_OR_RETURN(const v1::ServerInfoReply after, daemon.client().ServerInfo());
  if (after.epoch() != before.epoch()) return absl::InternalError("the daemon is another one after the kills");
  return stage.CheckProduct(daemon.socket(), kCheckLimit).status();
}

}  // namespace tessera::gpu_test
