// Cases about sharing in good order. What was seen before, as an expectation: a handover costs some 290 us without MPS
// and 20 to 39 with it; under MPS a second user waits until the first one's processes have gone, and a stream that
// waits for ever stops about half of the others of its process. Without MPS neither happens.
#include "tests/gpu/isolation_cases.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr auto kReadyLimit = 20s;
constexpr auto kHandoverLimit = 30s;
constexpr auto kBusyLimit = 10s;
constexpr auto kStuckLimit = 10s;
constexpr auto kLatencyLimit = 15s;
constexpr auto kGuestBesideLimit = 3s;
constexpr auto kGuestAfterLimit = 10s;
constexpr int kGuest = 65534;  // nobody

double Number(const Json& json, const char* name) {
  return json.is_object() ? json.value(name, 0.0) : 0.0;
}

void AddHandover(Stage& stage, const std::string& name, const Json& times) {
  const double us = Number(times, "us");
  stage.Add(
      {.name = name,
       .value = us,
       .unit = "us",
       .detail = absl::StrFormat("a change of process; p90 %.1f; own kernels and product %.1f, product alone %.1f, "
                                 "kernels alone %.1f",
                                 Number(times, "p90_us"), Number(times, "full_us"), Number(times, "gemm_us"),
                                 Number(times, "kernels_us"))});
}

absl::StatusOr<double> BusyPhase(Worker& worker, const std::string& phase) {
  ASSIGN_OR_RETURN(const Json done, worker.Await("done" + phase, kBusyLimit));
  return Number(done, "products_per_s");
}

}  // namespace

absl::Status MeasureHandover(Stage& stage, TestDaemon& daemon) {
  ASSIGN_OR_RETURN(Worker worker, stage.Start("handover", daemon.socket()));
  ASSIGN_OR_RETURN(const Json answer, worker.Answer(kHandoverLimit));
  AddHandover(stage, "handover_stream", answer.value("stream", Json()));
  AddHandover(stage, "handover_unary", answer.value("unary", Json()));
  return absl::OkStatus();
}

absl::Status MeasureTwoClients(Stage& stage, TestDaemon& daemon) {
  ASSIGN_OR_RETURN(Worker first, stage.Start("busy", daemon.socket()));
  ASSIGN_OR_RETURN(Worker second, stage.Start("busy", daemon.socket()));
  RETURN_IF_ERROR(first.Await("ready", kReadyLimit).status());
  RETURN_IF_ERROR(second.Await("ready", kReadyLimit).status());
  RETURN_IF_ERROR(first.Tell("go1"));
  ASSIGN_OR_RETURN(const double first_alone, BusyPhase(first, "1"));
  RETURN_IF_ERROR(second.Tell("go1"));
  ASSIGN_OR_RETURN(const double second_alone, BusyPhase(second, "1"));
  RETURN_IF_ERROR(first.Tell("go2"));
  RETURN_IF_ERROR(second.Tell("go2"));
  ASSIGN_OR_RETURN(const double first_beside, BusyPhase(first, "2"));
  ASSIGN_OR_RETURN(const double second_beside, BusyPhase(second, "2"));
  const auto add = [&](const char* name, double alone, double beside) {
    stage.Add({.name = name,
               .value = alone > 0 ? beside / alone : 0,
               .unit = "ratio",
               .detail = absl::StrFormat("of its speed alone; %.0f products/s, alone %.0f", beside, alone),
               .ok = alone > 0 && beside > 0});
  };
  add("two_clients_first", first_alone, first_beside);
  add("two_clients_second", second_alone, second_beside);
  RETURN_IF_ERROR(first.Answer(kBusyLimit).status());
  return second.Answer(kBusyLimit).status();
}

absl::Status MeasureStuckWait(Stage& stage, TestDaemon& daemon) {
  ASSIGN_OR_RETURN(Worker stuck, stage.Start("stuck"));
  RETURN_IF_ERROR(stuck.Await("ready", kReadyLimit).status());
  ASSIGN_OR_RETURN(Worker other, stage.Start("latency", daemon.socket()));
  ASSIGN_OR_RETURN(const Json before, other.Await("ready", kReadyLimit));
  RETURN_IF_ERROR(stuck.Tell("go"));
  ASSIGN_OR_RETURN(const Json says, stuck.Await("stuck", kStuckLimit));
  stage.Add({.name = "stuck_wait_streams",
             .value = Number(says, "moved"),
             .unit = "count",
             .detail = absl::StrFormat("of %.0f other streams of the process end a kernel within 1 s",
                                       Number(says, "streams")),
             .ok = says.value("waits", false)});
  RETURN_IF_ERROR(other.Tell("go"));
  const absl::StatusOr<Json> during = other.Answer(kLatencyLimit);
  RETURN_IF_ERROR(stuck.Tell("release"));
  const double before_us = Number(before, "us");
  const double during_us = during.ok() ? Number(*during, "us") : -1;
  const bool answered = during_us > 0 && before_us > 0;
  stage.Add({.name = "stuck_wait_other_process",
             .value = answered ? during_us / before_us : -1,
             .unit = "ratio",
             .detail = absl::StrFormat(
                 "of a product's time for another process; before %.1f us, beside the wait %.1f us%s", before_us,
                 during_us, during.ok() ? "" : absl::StrCat(": ", MessageOf(during.status()))),
             .ok = answered || (stage.mps() && during.ok())});
  other.Kill();
  return stuck.Answer(kStuckLimit).status();
}

absl::Status MeasureSecondUser(Stage& stage) {
  ASSIGN_OR_RETURN(Worker holder, stage.Start("hold"));
  RETURN_IF_ERROR(holder.Await("ready", kReadyLimit).status());
  ASSIGN_OR_RETURN(Worker guest, stage.Start("context", {}, kGuest));
  RETURN_IF_ERROR(guest.Await("trying", kReadyLimit).status());
  const absl::StatusOr<Json> beside = guest.Answer(kGuestBesideLimit);
  const bool waits = beside.status().code() == absl::StatusCode::kDeadlineExceeded;
  stage.Add({.name = "second_uid_beside",
             .value = beside.ok() ? Number(*beside, "ms") : -1,
             .unit = "ms",
             .detail = beside.ok() ? "to a context, while another user's process has one"
                       : waits     ? "no context within 3 s, while another user's process has one: it waits"
                                   : "no context, while another user's process has one: " + MessageOf(beside.status()),
             .ok = beside.ok() || stage.mps()});
  RETURN_IF_ERROR(holder.Tell("stop"));
  RETURN_IF_ERROR(holder.Answer(kReadyLimit).status());
  const std::int64_t gone_ns = NowNs();
  if (beside.ok()) return absl::OkStatus();

  // One that was refused asks again.
  if (!waits) {
    ASSIGN_OR_RETURN(guest, stage.Start("context", {}, kGuest));
  }
  const absl::StatusOr<Json> after = guest.Answer(kGuestAfterLimit);
  stage.Add({.name = "second_uid_after",
             .value = after.ok() ? (Number(*after, "done_ns") - static_cast<double>(gone_ns)) / 1e6 : -1,
             .unit = "ms",
             .detail = after.ok() ? absl::StrCat("from the end of the other user's process to a context of one that ",
                                                 waits ? "waited" : "asked again")
                                  : MessageOf(after.status()),
             .ok = after.ok()});
  return absl::OkStatus();
}

}  // namespace tessera::gpu_test
