#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "common/status_macros.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_lifetimes.h"
#include "tests/gpu/e2e_memory.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct CycleRun {
  int done = 0;
  double seconds = 0;
  absl::Status status;
};

CycleRun ImportAndRelease(client::Session& session, const DeviceAllocation& memory, int cycles) {
  constexpr auto kLimit = 75s;
  CycleRun run;
  const Clock::time_point begin = Clock::now();
  while (run.done < cycles && run.status.ok()) {
    if (Clock::now() - begin > kLimit) run.status = absl::DeadlineExceededError("too slow");
    absl::StatusOr<client::Buffer> buffer = session.ImportDevice(memory.data());
    run.status = buffer.ok() ? buffer->Release() : buffer.status();
    if (run.status.ok()) ++run.done;
  }
  run.seconds = SecondsSince(begin);
  return run;
}

CycleRun AllocateAndRelease(client::Session& session, int cycles) {
  CycleRun run;
  const Clock::time_point begin = Clock::now();
  while (run.done < cycles && run.status.ok()) {
    absl::StatusOr<client::Buffer> buffer = session.AllocateOnDevice(2 * kMiB);
    run.status = buffer.ok() ? buffer->Release() : buffer.status();
    if (run.status.ok()) ++run.done;
  }
  run.seconds = SecondsSince(begin);
  return run;
}

// One allocation of each kind, each with a connection of its own.
class ImportCycles {
 public:
  explicit ImportCycles(Row& row) : row_(row) {}

  absl::Status Run(const ClientJob& job) {
    ASSIGN_OR_RETURN(handles_, Connect(job));
    ASSIGN_OR_RETURN(descriptors_, Connect(job));
    ASSIGN_OR_RETURN(plain_, AllocatePlain(8 * kMiB));
    ASSIGN_OR_RETURN(vmm_, AllocateVmm(8 * kMiB));
    // What stays for good comes with the first ones, and how long one takes.
    Both(kWarm, kWarm, "the first cycles");
    Count(AllocateAndRelease(handles_->session, kWarm / 10), kWarm / 10, "the first allocations");
    ASSIGN_OR_RETURN(const v1::ServerInfoReply info, handles_->client.ServerInfo());
    ASSIGN_OR_RETURN(const Footprint before, FootprintOfDaemon(info.pid()));
    ASSIGN_OR_RETURN(const std::uint64_t free_before, FreeDeviceBytes());

    RunAll(job.cycles);

    ASSIGN_OR_RETURN(const std::uint64_t free_after, FreeDeviceBytes());
    const auto lost = static_cast<std::int64_t>(free_before) - static_cast<std::int64_t>(free_after);
    row_.Check(lost <= kLostMax, absl::StrCat(lost, " bytes of GPU memory are gone"));
    row_.measured["memory_lost_bytes"] = static_cast<double>(lost);
    return CheckDaemon(before);
  }

 private:
  static constexpr int kWarm = 200;
  static constexpr double kSecondsMax = 40;
  static constexpr std::int64_t kLostMax = std::int64_t{2} << 20;
  static constexpr Footprint kTolerance{
      .maps = 32, .file_maps = 2, .descriptors = 4, .resident_bytes = std::int64_t{8} << 20};

  void RunAll(int cycles) {
    int handles = cycles;
    int descriptors = cycles;
    if (std::max(handles_seconds_, descriptors_seconds_) * cycles / kWarm > kSecondsMax) {
      (handles_seconds_ > descriptors_seconds_ ? handles : descriptors) = cycles / 5;
    }
    Both(handles, descriptors, "cycles");
    row_.Remark(absl::StrCat(handles, " by handle of ", 1e6 * handles_seconds_ / std::max(handles, 1), " us, ",
                             descriptors, " by descriptor of ", 1e6 * descriptors_seconds_ / std::max(descriptors, 1),
                             " us, side by side"));
    row_.measured["handle_cycles"] = handles;
    row_.measured["descriptor_cycles"] = descriptors;
    row_.measured["handle_cycles_s"] = handles_seconds_;
    row_.measured["descriptor_cycles_s"] = descriptors_seconds_;
    const CycleRun allocations = AllocateAndRelease(handles_->session, cycles / 10);
    Count(allocations, cycles / 10, "allocations");
    row_.measured["allocation_cycles"] = allocations.done;
    row_.measured["allocation_cycles_s"] = allocations.seconds;
  }

  // The routes side by side: more of the daemon at once, in less time.
  void Both(int handles, int descriptors, const std::string& what) {
    std::future<CycleRun> other =
        std::async(std::launch::async, [&] { return ImportAndRelease(descriptors_->session, *vmm_, descriptors); });
    const CycleRun mine = ImportAndRelease(handles_->session, *plain_, handles);
    const CycleRun others = other.get();
    Count(mine, handles, what + " by handle");
    Count(others, descriptors, what + " by descriptor");
    handles_seconds_ = mine.seconds;
    descriptors_seconds_ = others.seconds;
  }

  void Count(const CycleRun& run, int cycles, const std::string& what) {
    row_.cases += run.done;
    row_.Check(run.status.ok() && run.done == cycles,
               absl::StrCat(what, ": ", run.done, " of ", cycles, ", then ", run.status.ToString()));
  }

  absl::Status CheckDaemon(const Footprint& before) {
    ASSIGN_OR_RETURN(const v1::ServerInfoReply info, handles_->client.ServerInfo());
    row_.Check(info.buffers() == 0 && info.buffer_bytes() == 0 && info.quarantined() == 0,
               absl::StrCat(info.buffers(), " buffers of ", info.buffer_bytes(), " bytes are left in the daemon, ",
                            info.quarantined(), " are stuck"));
    ASSIGN_OR_RETURN(const Footprint after, FootprintOfDaemon(info.pid()));
    CheckFootprint(row_, before, after, kTolerance);
    row_.measured["daemon_maps_grown"] = static_cast<double>(after.maps - before.maps);
    row_.measured["daemon_descriptors_grown"] = static_cast<double>(after.descriptors - before.descriptors);
    row_.measured["daemon_resident_grown_bytes"] = static_cast<double>(after.resident_bytes - before.resident_bytes);
    return absl::OkStatus();
  }

  Row& row_;
  std::unique_ptr<DeviceAllocation> plain_;
  std::unique_ptr<DeviceAllocation> vmm_;
  std::optional<Connected> handles_;
  std::optional<Connected> descriptors_;
  double handles_seconds_ = 0;
  double descriptors_seconds_ = 0;
};

}  // namespace

absl::Status RunImportCycles(const ClientJob& job, Row& row) {
  return ImportCycles(row).Run(job);
}

}  // namespace tessera::gpu_test
