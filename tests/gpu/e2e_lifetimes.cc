#include "tests/gpu/e2e_lifetimes.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/e2e_board.h"
#include "tests/gpu/e2e_daemon.h"
#include "tests/oracle/test_data.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kAtWorkLimit = 30s;
constexpr auto kCleanLimit = 2s;      // what is promised
constexpr auto kCleanPatience = 10s;  // what is waited, to tell late from never
constexpr auto kBystanderLimit = 5s;  // for its next products
constexpr auto kRoundsLimit = 50s;    // of all rounds together
constexpr std::int64_t kDelayMaxUs = 150'000;
constexpr std::int64_t kMiB = std::int64_t{1} << 20;
// Every buffer of a victim is larger, so that none of them can stay unseen.
constexpr std::int64_t kMemoryTolerance = 64 * kMiB;
constexpr std::uint32_t kLaunchedAhead = 16;  // products of one session that the daemon launches at most
// Threads of gRPC come and go, two maps each and perhaps an arena of the heap. What leaks has a file or a descriptor.
constexpr Footprint kRoundsTolerance{.maps = 128, .file_maps = 8, .descriptors = 8, .resident_bytes = 32 * kMiB};

double MillisecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

std::string Text(const Footprint& footprint) {
  return absl::StrCat(footprint.maps, " maps (", footprint.file_maps, " of files), ", footprint.descriptors,
                      " descriptors, ", footprint.resident_bytes >> 10U, " KiB");
}

bool Within(const Footprint& before, const Footprint& after, const Footprint& tolerance) {
  return after.maps - before.maps <= tolerance.maps && after.file_maps - before.file_maps <= tolerance.file_maps &&
         after.descriptors - before.descriptors <= tolerance.descriptors &&
         after.resident_bytes - before.resident_bytes <= tolerance.resident_bytes;
}

// A client that goes on until it is told to stop, and what it says of itself.
struct Companion {
  std::string job;
  Board board;
  Process process;

  static absl::StatusOr<Companion> Start(const LifetimeStage& stage, const std::string& job) {
    const std::string path = stage.new_path(job);
    ASSIGN_OR_RETURN(Board board, Board::Make(path));
    ASSIGN_OR_RETURN(Process process, stage.start(job, path));
    return Companion{.job = job, .board = std::move(board), .process = std::move(process)};
  }

  absl::Status AwaitWork(const LifetimeStage& stage) {
    Eventually(stage.within(kAtWorkLimit), [&] { return board->reached > 0 || !process.running(); });
    if (board->reached > 0 && process.running()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(job, " did not get to work: ", process.LogTail()));
  }
};

class KilledRounds {
 public:
  KilledRounds(const LifetimeStage& stage, Row& row) : stage_(stage), row_(row), random_(stage.seed) {}

  absl::Status Run(int rounds) {
    ASSIGN_OR_RETURN(watch_, Companion::Start(stage_, "watch"));
    ASSIGN_OR_RETURN(bystander_, Companion::Start(stage_, "bystander"));
    RETURN_IF_ERROR(watch_->AwaitWork(stage_));
    RETURN_IF_ERROR(bystander_->AwaitWork(stage_));
    ASSIGN_OR_RETURN(calm_, stage_.daemon->ServerInfo());
    row_.Check(calm_.sessions() == 1 && calm_.buffers() == 3 && Remains().empty(),
               absl::StrCat("not calm before the first kill: ", calm_.sessions(), " sessions, ", calm_.buffers(),
                            " buffers", Remains()));
    ASSIGN_OR_RETURN(const std::int64_t free_first, FreshFreeBytes());
    const absl::Status killed = KillAll(rounds);
    row_.measured["killed_to_clean_ms_max"] = std::max(sessions_ms_, memory_ms_);
    row_.measured["killed_to_no_session_ms_max"] = sessions_ms_;
    row_.measured["killed_to_memory_back_ms_max"] = memory_ms_;
    row_.Remark(absl::StrCat("at most ", std::max(sessions_ms_, memory_ms_), " ms from a kill to all being back"));
    RETURN_IF_ERROR(killed);
    ASSIGN_OR_RETURN(const std::int64_t free_last, FreshFreeBytes());
    row_.Check(free_last >= free_first - 2 * kMemoryTolerance,
               absl::StrCat(free_first - free_last, " bytes of GPU memory are gone after all rounds"));
    row_.measured["memory_lost_mib"] = static_cast<double>(free_first - free_last) / static_cast<double>(kMiB);
    return StopBystander();
  }

 private:
  absl::Status KillAll(int rounds) {
    const Clock::time_point begin = Clock::now();
    // Streams, threads and memory that the daemon keeps once it had them.
    const std::size_t kinds = kVictimKinds.size() - (stage_.own_kernels ? 0 : 1);
    const int warm = static_cast<int>(kinds);
    const bool measures = stage_.same_pids && rounds > 2 * warm;
    Footprint before;
    for (int round = 0; round < rounds; ++round) {
      if (Clock::now() - begin > kRoundsLimit || stage_.within(1s) == 0s) {
        row_.Check(false, absl::StrCat("only ", round, " of ", rounds, " rounds in the time there is"));
        return absl::OkStatus();
      }
      if (measures && round == warm) {
        ASSIGN_OR_RETURN(before, FootprintOfDaemon(calm_.pid()));
      }
      const std::string kind(kVictimKinds.at(static_cast<std::size_t>(round) % kinds));
      const absl::Status status = Round(kind);
      if (!status.ok()) return InField(absl::StrCat("round ", round, ", ", kind), status);
    }
    if (!measures) return absl::OkStatus();
    absl::StatusOr<Footprint> after;
    Eventually(stage_.within(5s), [&] {
      after = FootprintOfDaemon(calm_.pid());
      return !after.ok() || Within(before, *after, kRoundsTolerance);
    });
    RETURN_IF_ERROR(after.status());
    CheckFootprint(row_, before, *after, kRoundsTolerance);
    return absl::OkStatus();
  }

  absl::Status Round(const std::string& kind) {
    ASSIGN_OR_RETURN(const std::int64_t free_before, FreshFreeBytes());
    ASSIGN_OR_RETURN(Companion victim, Companion::Start(stage_, absl::StrCat("victim-", kind)));
    RETURN_IF_ERROR(victim.AwaitWork(stage_));
    CheckHoldings(kind, victim.job, free_before);
    // A kill at any point of what the victim does: there is nothing to wait for.
    std::this_thread::sleep_for(std::chrono::microseconds(random_.Int(0, kDelayMaxUs)));
    row_.Check(victim.process.running(), absl::StrCat(kind, " ended by itself: ", victim.process.LogTail()));
    const Clock::time_point killed = Clock::now();
    victim.process.Kill();
    row_.Check(!victim.process.running(), absl::StrCat(kind, " cannot be killed"));
    AwaitClean(kind, killed, free_before);
    return AwaitBystander(kind);
  }

  // That the victim has what its kind is about, or its end would show nothing.
  void CheckHoldings(const std::string& kind, const std::string& label, std::int64_t free_before) {
    if (kind == "handles" || kind == "descriptors") return;  // one moment it has buffers, the next it has none
    std::uint32_t buffers = 0;
    std::uint32_t in_flight = 0;
    const bool seen = Eventually(stage_.within(2s), [&] {
      const absl::StatusOr<v1::ListSessionsReply> list = stage_.daemon->ListSessions(/*all_principals=*/true);
      if (!list.ok()) return false;
      for (const v1::SessionInfo& session : list->sessions()) {
        if (session.label() != label) continue;
        buffers = session.buffers();
        in_flight = session.in_flight();
      }
      return buffers == 3 && (kind != "queued" || in_flight > kLaunchedAhead);
    });
    row_.Check(seen, absl::StrCat(kind, " has ", buffers, " buffers and ", in_flight, " products under way"));
    const absl::StatusOr<std::int64_t> free_bytes = FreshFreeBytes();
    row_.Check(free_bytes.ok() && *free_bytes < free_before - kMemoryTolerance,
               absl::StrCat(kind, ": its memory does not show: this test would see no leak"));
  }

  void AwaitClean(const std::string& kind, Clock::time_point killed, std::int64_t free_before) {
    const std::uint64_t looks = watch_->board->count;
    std::optional<double> sessions_ms;
    std::optional<double> memory_ms;
    std::string remains;
    std::int64_t free_bytes = 0;
    const auto patience = stage_.within(kCleanPatience);
    while (!sessions_ms.has_value() || !memory_ms.has_value()) {
      if (!sessions_ms.has_value()) {
        remains = Remains();
        if (remains.empty()) sessions_ms = MillisecondsSince(killed);
      }
      // The look that was under way at the kill is no evidence.
      if (!memory_ms.has_value() && watch_->board->count >= looks + 2) {
        free_bytes = static_cast<std::int64_t>(watch_->board->free_bytes.load());
        if (free_bytes >= free_before - kMemoryTolerance) memory_ms = MillisecondsSince(killed);
      }
      if (Clock::now() - killed > patience) break;
      std::this_thread::sleep_for(500us);
    }
    const double never = MillisecondsSince(killed);
    sessions_ms_ = std::max(sessions_ms_, sessions_ms.value_or(never));
    memory_ms_ = std::max(memory_ms_, memory_ms.value_or(never));
    const double promised = std::chrono::duration<double, std::milli>(kCleanLimit).count();
    row_.Check(sessions_ms.has_value() && *sessions_ms <= promised,
               sessions_ms.has_value() ? absl::StrCat(kind, ": clean only after ", *sessions_ms, " ms")
                                       : absl::StrCat(kind, ": never clean:", remains));
    row_.Check(memory_ms.has_value() && *memory_ms <= promised,
               memory_ms.has_value()
                   ? absl::StrCat(kind, ": the memory was back only after ", *memory_ms, " ms")
                   : absl::StrCat(kind, ": ", free_before - free_bytes, " bytes of GPU memory did not come back"));
  }

  // What the daemon has besides the bystander's; "" if nothing.
  std::string Remains() {
    const absl::StatusOr<v1::ListSessionsReply> list = stage_.daemon->ListSessions(/*all_principals=*/true);
    if (!list.ok()) return absl::StrCat(" ", list.status().message());
    std::string remains;
    for (const v1::SessionInfo& session : list->sessions()) {
      if (session.label() == bystander_->job) continue;
      absl::StrAppend(&remains, " session ", session.name(), " ", session.label(), " of ", session.buffers(),
                      " buffers with ", session.in_flight(), " products under way, ", session.end_reason(), ";");
    }
    const absl::StatusOr<v1::ServerInfoReply> now = stage_.daemon->ServerInfo();
    if (!now.ok()) return absl::StrCat(remains, " ", now.status().message());
    const bool same = now->sessions() == calm_.sessions() && now->buffers() == calm_.buffers() &&
                      now->buffer_bytes() == calm_.buffer_bytes() && now->sessions_ending() == 0 &&
                      now->quarantined() == 0 && now->in_flight() <= 1;  // the bystander's
    if (!same) {
      absl::StrAppend(&remains, " ", now->sessions(), " sessions, ", now->sessions_ending(), " ending, ",
                      now->quarantined(), " stuck, ", now->buffers(), " buffers, ", now->buffer_bytes(), " bytes, ",
                      now->in_flight(), " products under way");
    }
    return remains;
  }

  absl::Status AwaitBystander(const std::string& kind) {
    const std::uint64_t begin = bystander_->board->count;
    const bool goes_on = Eventually(stage_.within(kBystanderLimit), [&] {
      // The one that was under way and another.
      return bystander_->board->count >= begin + 2 || !bystander_->process.running();
    });
    const std::uint64_t wrong = bystander_->board->wrong;
    row_.Check(goes_on && wrong == wrong_, absl::StrCat(kind, ": the client beside it got ", wrong - wrong_,
                                                        " wrong results, ", bystander_->process.LogTail()));
    wrong_ = wrong;
    if (!bystander_->process.running()) {
      return absl::InternalError("the client beside it ended: " + bystander_->process.LogTail());
    }
    return absl::OkStatus();
  }

  absl::Status StopBystander() {
    const std::uint64_t products = bystander_->board->count;
    row_.measured["bystander_products"] = static_cast<double>(products);
    bystander_->board->asked = Board::kStop;
    const std::optional<int> code = bystander_->process.Wait(stage_.within(20s));
    row_.Check(code == 0, absl::StrCat("the client beside them did not end well: ", bystander_->process.LogTail()));
    return absl::OkStatus();
  }

  // As another process sees it, in a look that began after this call.
  absl::StatusOr<std::int64_t> FreshFreeBytes() {
    const std::uint64_t looks = watch_->board->count;
    if (!Eventually(stage_.within(5s), [&] { return watch_->board->count >= looks + 2; })) {
      return absl::InternalError("nobody watches the GPU's memory: " + watch_->process.LogTail());
    }
    return static_cast<std::int64_t>(watch_->board->free_bytes.load());
  }

  const LifetimeStage& stage_;
  Row& row_;
  oracle::Random random_;
  std::optional<Companion> watch_;
  std::optional<Companion> bystander_;
  v1::ServerInfoReply calm_;  // with the bystander alone
  std::uint64_t wrong_ = 0;
  double sessions_ms_ = 0;  // the largest so far
  double memory_ms_ = 0;
};

}  // namespace

absl::StatusOr<Footprint> FootprintOfDaemon(int pid) {
  const std::filesystem::path process = absl::StrCat("/proc/", pid);
  std::string name;
  std::getline(std::ifstream(process / "comm"), name);
  if (name != "tesserad") return absl::FailedPreconditionError(absl::StrCat("process ", pid, " is no daemon: ", name));
  Footprint footprint;
  std::ifstream maps(process / "maps");
  for (std::string line; std::getline(maps, line); ++footprint.maps) {
    if (line.find('/') != std::string::npos) ++footprint.file_maps;
  }
  std::error_code error;
  for (std::filesystem::directory_iterator entry(process / "fd", error), end; !error && entry != end;
       entry.increment(error)) {
    ++footprint.descriptors;
  }
  std::int64_t pages = 0;
  std::int64_t resident_pages = 0;
  std::ifstream(process / "statm") >> pages >> resident_pages;
  footprint.resident_bytes = resident_pages * ::sysconf(_SC_PAGESIZE);
  if (error || footprint.maps == 0 || footprint.descriptors == 0 || resident_pages == 0) {
    return absl::PermissionDeniedError(absl::StrCat(process.string(), " cannot be read"));
  }
  return footprint;
}

void CheckFootprint(Row& row, const Footprint& before, const Footprint& after, const Footprint& tolerance) {
  row.Check(Within(before, after, tolerance), "the daemon has grown");
  row.Remark(absl::StrCat("daemon: ", Text(before), " before, ", Text(after), " after"));
}

Row RunKilled(const LifetimeStage& stage, int rounds) {
  Row row{.environment = {}, .route = "killed"};
  const absl::Status status = KilledRounds(stage, row).Run(rounds);
  if (!status.ok()) row.Check(false, MessageOf(status));
  return row;
}

}  // namespace tessera::gpu_test
