// SharedTimeline: a value in memory that is the daemon's and the GPU's, too.

#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/core.h"
#include "client/cuda_memory.h"
#include "client/host_mapping.h"
#include "common/status_macros.h"
#include "common/sync_slot.h"

namespace tessera::client {
namespace {

absl::StatusOr<HostMapping> MapSlot(SessionCore& session, const std::string& id, std::uint64_t& byte_offset) {
  v1::SideRequest fetch;
  fetch.mutable_fetch_timeline()->set_timeline_id(id);
  ASSIGN_OR_RETURN(const SideChannel::Reply fetched, session.CallSideChannel(fetch));
  if (!fetched.fd) return absl::InternalError("side channel: the daemon sent no descriptor");
  const auto& passed = fetched.message.descriptor_passed();
  byte_offset = passed.byte_offset();
  if (passed.bytes() < sizeof(SyncSlot) || byte_offset % sizeof(SyncSlot) != 0 ||
      byte_offset > passed.allocation_bytes() - sizeof(SyncSlot)) {
    return absl::InternalError("side channel: the daemon sent no timeline's memory");
  }
  return HostMapping::Map(fetched.fd.get(), 0, passed.allocation_bytes());  // whole pages: what a GPU is given
}

}  // namespace

struct SharedTimeline::State {
  State(std::shared_ptr<SessionCore> of_session, std::string of_id, HostMapping mapped, std::uint64_t offset)
      : session(std::move(of_session)), id(std::move(of_id)), mapping(std::move(mapped)), byte_offset(offset) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { ReleaseSync(session.get(), id); }

  SyncSlot& slot() const { return *reinterpret_cast<SyncSlot*>(mapping.data() + byte_offset); }

  const std::shared_ptr<SessionCore> session;
  const std::string id;
  const HostMapping mapping;
  const std::uint64_t byte_offset;
  std::mutex mutex;
  std::optional<RegisteredMemory> registered;  // from the first DevicePointer on
};

SharedTimeline::SharedTimeline(std::unique_ptr<State> state) : state_(std::move(state)) {}
SharedTimeline::SharedTimeline(SharedTimeline&&) noexcept = default;
SharedTimeline& SharedTimeline::operator=(SharedTimeline&&) noexcept = default;
SharedTimeline::~SharedTimeline() = default;

const std::string& SharedTimeline::id() const {
  return state_->id;
}

SyncPoint SharedTimeline::At(std::uint64_t value) const {
  return {state_->id, value};
}

std::uint64_t SharedTimeline::value() const {
  return state_->slot().value.load(std::memory_order_acquire);
}

void SharedTimeline::Signal(std::uint64_t value) {
  RaiseTo(state_->slot().value, value);
}

std::optional<absl::Status> SharedTimeline::Reached(std::uint64_t value) const {
  const SyncSlot& slot = state_->slot();
  if (slot.value.load(std::memory_order_acquire) < value) return std::nullopt;
  const auto code = static_cast<absl::StatusCode>(slot.error_code.load(std::memory_order_acquire));
  const std::uint64_t at = slot.error_value.load(std::memory_order_relaxed);
  if (code == absl::StatusCode::kOk || at > value) return absl::OkStatus();
  return absl::Status(code, absl::StrCat("the timeline was signalled with an error at ", at));
}

absl::StatusOr<std::uint64_t> SharedTimeline::Wait(std::uint64_t value, std::chrono::milliseconds timeout) {
  return AwaitPoint(*state_->session, At(value), timeout);
}

absl::StatusOr<std::uint64_t> SharedTimeline::DevicePointer() {
  const absl::StatusOr<CudaDriver>& driver = CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->registered.has_value()) {
    ASSIGN_OR_RETURN(RegisteredMemory registered,
                     RegisteredMemory::Register(*driver, state_->mapping.data(), state_->mapping.bytes()));
    state_->registered.emplace(std::move(registered));
  }
  return state_->registered->address() + state_->byte_offset;
}

absl::StatusOr<SharedTimeline> Session::CreateSharedTimeline(std::uint64_t initial_value,
                                                             const std::vector<std::string>& shared_with) {
  RETURN_IF_ERROR(core_->CheckSideChannel());
  ASSIGN_OR_RETURN(std::string id, CreateTimelineId(*core_, initial_value, shared_with, /*exported=*/true));
  std::uint64_t byte_offset = 0;
  absl::StatusOr<HostMapping> mapping = MapSlot(*core_, id, byte_offset);
  if (!mapping.ok()) {
    ReleaseSync(core_.get(), id);
    return mapping.status();
  }
  return SharedTimeline(
      std::make_unique<SharedTimeline::State>(core_, std::move(id), *std::move(mapping), byte_offset));
}

}  // namespace tessera::client
