// Leases, sessions and buffers: who owns what, and what ends with whom.
//
// A lease is a side-channel connection, a call of Attach, or a time to live; a session lives on one and owns buffers.
// Ending a session refuses new work at once and drops its queued work and its references, on the reaper's thread;
// memory that running calls still use goes when the last of them has finished. Until all of it is gone the session is
// listed as ending.
//
// Thread-safe. The table's lock is not held while memory is mapped or unmapped; imports of GPU memory wait for each
// other (ImportCache).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "server/session/account.h"
#include "server/session/buffer.h"
#include "server/session/device_import.h"
#include "server/session/id.h"
#include "server/session/id_table.h"
#include "server/session/import_cache.h"
#include "server/session/peer.h"
#include "server/session/reaper.h"
#include "server/session/session.h"
#include "server/session/sync_page.h"
#include "server/session/sync_poller.h"
#include "server/session/timeline.h"

namespace tessera::server {

struct SessionLimits {
  std::uint64_t sessions_max = 0;
  std::uint64_t sessions_per_principal_max = kNoLimit;
  std::uint64_t leases_max = 0;  // connections and calls of Attach
  std::uint64_t leases_per_principal_max = kNoLimit;
  std::uint64_t buffers_max = kNoLimit;
  std::uint64_t buffers_per_principal_max = kNoLimit;
  std::uint64_t buffers_per_session_max = 0;
  std::uint64_t buffer_bytes_max = 0;            // of all sessions together
  std::uint64_t principal_buffer_bytes_max = 0;  // 0 = no limit of its own; likewise the next
  std::uint64_t session_buffer_bytes_max = 0;
  std::uint64_t streams_per_session_max = kNoLimit;
  std::uint64_t timelines_per_session_max = kNoLimit;
  std::chrono::milliseconds ttl_max = std::chrono::minutes(1);
  std::chrono::milliseconds cleanup_patience = std::chrono::seconds(10);
};

// What a principal may do with a buffer of another session.
enum class BufferAccess { kRead, kReadWrite };

struct BufferShare {
  std::string principal;
  BufferAccess access = BufferAccess::kRead;
};

struct BufferRow {
  Id id;
  BufferOrigin origin = BufferOrigin::kAllocated;
  MemorySpace space;
  std::uint64_t bytes = 0;
  std::uint32_t users = 0;
  std::chrono::steady_clock::duration age{};
  Peer owner;
  Id session;
  std::string session_label;
  std::vector<BufferShare> shares;
};

enum class SessionState { kOpen, kEnding, kQuarantined };

struct SessionRow {
  Id id;
  std::string label;
  Peer owner;
  LeaseKind lease = LeaseKind::kSideChannel;
  std::chrono::milliseconds ttl_left{0};  // of a lease that is a time to live
  SessionState state = SessionState::kOpen;
  std::optional<SessionEnd> end;  // once it is not open
  std::chrono::steady_clock::duration age{};
  std::chrono::steady_clock::duration idle{};  // since its last call began
  MemoryUse memory;                            // including released buffers that are not gone
  std::int64_t in_flight = 0;
  std::int64_t gated = 0;
  std::size_t streams = 0;
  std::size_t timelines = 0;
};

// Rows in the order of their ids, from after a given one.
template <typename Row>
struct Page {
  std::vector<Row> rows;
  bool more = false;
};

struct PageRequest {
  std::optional<Id> after;
  std::size_t limit = 1000;
};

struct SessionCounts {
  std::size_t sessions = 0;
  std::size_t ending = 0;
  std::size_t quarantined = 0;  // of those
  std::size_t buffers = 0;
  std::size_t streams = 0;
  std::size_t timelines = 0;
  std::uint64_t bytes_held = 0;  // including released buffers that are not gone
};

class SessionTable {
 public:
  using Clock = std::chrono::steady_clock;
  using MakeLane = std::function<std::shared_ptr<SessionLane>(const StreamSpec& spec)>;
  // Whom a list is about.
  using Includes = std::function<bool(const Peer& owner)>;

  static constexpr std::size_t kWaitingDescriptorsMax = 16;  // of one lease
  static constexpr std::size_t kLabelBytesMax = 64;
  static constexpr std::size_t kSharesMax = 16;  // of one buffer
  static constexpr std::chrono::milliseconds kTtlMin{100};

  // `make_lane` is called for each stream of a session. `devices` are the GPUs that hold buffers, the first of them
  // being the one that the space "cuda" means; they and the reaper outlive the table and every pin.
  SessionTable(std::uint32_t epoch, const SessionLimits& limits, Metrics& metrics, Reaper& reaper, MakeLane make_lane,
               std::vector<DeviceMemory*> devices = {});

  std::uint32_t epoch() const { return epoch_; }

  // What the caller has of the daemon, for calls with and without a session.
  std::shared_ptr<Account> AccountOf(const Peer& peer) { return accounts_.Of(peer); }

  // Leases: called by the side channel, and by Attach.
  absl::StatusOr<Id> OpenLease(const Peer& peer, LeaseKind kind = LeaseKind::kSideChannel);
  void CloseLease(const Id& lease);
  absl::StatusOr<std::uint64_t> KeepDescriptor(const Id& lease, UniqueFd fd);  // a ticket for ImportBuffer
  // The buffer of the lease's session, for passing its descriptor; it stays mapped while the result lives.
  absl::StatusOr<BufferPin> ExportBuffer(const Id& lease, const Id& buffer);

  // Sessions. One of them is opened on a lease, the other lives for `ttl` after its last call.
  absl::StatusOr<Id> OpenSession(const Peer& peer, const Id& lease, std::string_view label);
  absl::StatusOr<Id> OpenSession(const Peer& peer, std::chrono::milliseconds ttl, std::string_view label);
  absl::StatusOr<std::shared_ptr<Session>> FindSession(const Peer& peer, const Id& token);
  // What is left of its time to live, which FindSession has just started anew.
  absl::StatusOr<std::chrono::milliseconds> KeepAlive(const Session& session) const;
  // The number of buffers dropped; `gone` is held until the last of them is.
  absl::StatusOr<std::size_t> EndSession(const Id& token, SessionEnd reason, GoneToken gone = nullptr);
  // By what ListSessions shows: the slot and generation of an id.
  absl::StatusOr<std::size_t> EndSession(std::uint32_t index, std::uint32_t generation, SessionEnd reason);
  void EndAllSessions(SessionEnd reason);
  Page<SessionRow> ListSessions(const Includes& include, const PageRequest& page = {});

  // Ends sessions whose time is over, and tells of those that ended and are stuck. To be called now and then.
  void Tick(Clock::time_point now = Clock::now());

  // Buffers.
  struct NewBuffer {
    Id id;
    std::uint64_t bytes = 0;
    MemorySpace space;
  };
  absl::StatusOr<NewBuffer> ImportBuffer(Session& session, std::uint64_t ticket, std::uint64_t byte_offset,
                                         std::uint64_t bytes);
  absl::StatusOr<NewBuffer> ImportLegacy(Session& session, const LegacyImport& import);
  absl::StatusOr<NewBuffer> ImportDescriptor(Session& session, const DescriptorImport& import);
  // `space`: empty or "host", "cuda" for the first GPU, or a GPU's UUID.
  absl::StatusOr<NewBuffer> AllocateBuffer(Session& session, std::uint64_t bytes, std::string_view space = {});
  // `gone` is held until the memory is.
  absl::Status ReleaseBuffer(const Session& session, const Id& buffer, GoneToken gone = nullptr);
  // Lets the sessions of `principal` use a buffer of `session`; nullopt ends that. The number of running users.
  absl::StatusOr<std::uint32_t> ShareBuffer(const Session& session, const Id& buffer, const std::string& principal,
                                            std::optional<BufferAccess> access);
  // For an operation of the session, on a buffer of its own or one shared with its principal.
  absl::StatusOr<BufferPin> PinBuffer(const Session& session, const Id& buffer, BufferAccess access);
  // `include`: owners of whom all buffers are listed; `shared_with`: a principal of whom those shared with it are, too.
  Page<BufferRow> ListBuffers(const Includes& include, const std::string& shared_with = {},
                              const PageRequest& page = {});

  // Streams, timelines and events. Errors begin with no field's name: ids of these come in several fields.
  absl::StatusOr<Id> OpenStream(Session& session, const StreamSpec& spec);
  struct TimelineSpec {
    std::uint64_t value = 0;
    std::vector<std::string> shared_with = {};  // principals whose other sessions may wait for it and signal it, too
    bool exported = false;                      // shows its value in memory: ExportTimeline
  };
  absl::StatusOr<Id> CreateTimeline(Session& session, TimelineSpec spec);
  absl::StatusOr<Id> ImportEvent(Session& session, const EventImport& import);
  absl::StatusOr<std::shared_ptr<SessionLane>> FindStream(const Session& session, const Id& stream);

  // What a SyncPoint names.
  struct FoundPoint {
    std::shared_ptr<Timeline> timeline;  // null: an event
    std::shared_ptr<DeviceEvent> event;  // null: a timeline
    bool own = false;                    // of this session
  };
  absl::StatusOr<FoundPoint> FindPoint(const Session& session, const Id& sync);
  // A timeline that is at 1 once all is over that the event was last recorded behind.
  std::shared_ptr<Timeline> Await(const std::shared_ptr<DeviceEvent>& event);
  // An exported timeline of the lease's session, for passing its page's descriptor. FAILED_PRECONDITION: not exported.
  absl::StatusOr<std::shared_ptr<Timeline>> ExportTimeline(const Id& lease, const Id& timeline);
  absl::Status ReleaseSync(Session& session, const Id& sync);
  // All streams of a session, its own first.
  std::vector<std::shared_ptr<SessionLane>> LanesOf(const Session& session);

  SessionCounts Counts();

 private:
  struct Lease {
    Peer peer;
    LeaseKind kind = LeaseKind::kSideChannel;
    std::shared_ptr<Account> account;
    Id session;                                 // all zero: none yet
    std::map<std::uint64_t, UniqueFd> waiting;  // ticket -> descriptor
  };
  struct OwnedBuffer {
    std::shared_ptr<Buffer> buffer;
    std::shared_ptr<Session> owner;
    std::vector<BufferShare> shares;  // at most kSharesMax
  };
  // A stream, a timeline or an event.
  struct OwnedSync {
    std::shared_ptr<SessionLane> lane = nullptr;
    std::shared_ptr<Timeline> timeline = nullptr;
    std::shared_ptr<DeviceEvent> event = nullptr;
    std::shared_ptr<Session> owner = nullptr;
    std::vector<std::string> shared_with = {};  // principals; at most kSharesMax
  };
  // A session that has ended. Its calls hold the session, its memory is in the budget; it is gone when neither is
  // there. How many there are is bounded by the queue and by the limits of buffers.
  struct EndedSession {
    SessionRow row;  // as it ended
    std::weak_ptr<Session> session;
    std::shared_ptr<MemoryBudget> memory;
    Clock::time_point opened;
    Clock::time_point last_call;
    Clock::time_point ended;
  };

  absl::StatusOr<DeviceMemory*> FindDevice(std::string_view field, std::string_view uuid) const;
  BufferHome HomeOf(const Session& session);
  void LetGo(std::shared_ptr<Mapping> mapping);  // on the reaper's thread: it may be the last owner
  // A buffer that shows part of `allocation`.
  absl::StatusOr<NewBuffer> Show(Session& session, std::shared_ptr<Mapping> allocation, const DeviceMemory& device,
                                 std::uint64_t byte_offset, std::uint64_t bytes);
  // Whether `fd` came from ExportBuffer of this session, so that importing it would hide that both are one memory.
  bool IsExportOf(const Session& session, const UniqueFd& fd);
  absl::StatusOr<UniqueFd> TakeDescriptor(const Session& session, std::uint64_t ticket);
  absl::Status LimitReached(Limit limit, std::uint64_t value);
  absl::StatusOr<NewBuffer> Register(Session& session, std::shared_ptr<Buffer> buffer);
  absl::StatusOr<SharedWord> TakeWord(Session& session, std::uint64_t value);
  absl::StatusOr<Id> RegisterSync(Session& session, OwnedSync sync);  // a timeline or an event
  std::shared_ptr<Session> MakeSession(const Peer& peer, std::string_view label);

  // With mutex_ held.
  absl::StatusOr<Session*> SessionOn(const Id& lease);
  absl::StatusOr<Id> Admit(const std::shared_ptr<Session>& session);
  absl::StatusOr<OwnedBuffer*> FindOwned(const Session& session, const Id& buffer);
  absl::StatusOr<OwnedSync*> FindSync(const Session& session, const Id& sync);  // of its own
  std::vector<OwnedSync> TakeSyncs(Session& session);
  void Remember(const std::shared_ptr<Session>& session, SessionEnd reason);
  void ForgetGone();
  SessionRow RowOf(const EndedSession& ended, Clock::time_point now) const;

  const std::uint32_t epoch_;
  const SessionLimits limits_;
  Metrics& metrics_;
  Reaper& reaper_;
  const MakeLane make_lane_;
  const std::vector<DeviceMemory*> devices_;
  const std::shared_ptr<MemoryBudget> memory_;
  Accounts accounts_;

  std::mutex mutex_;
  IdTable<Lease> leases_;
  IdTable<std::shared_ptr<Session>> sessions_;
  IdTable<OwnedBuffer> buffers_;
  IdTable<OwnedSync> syncs_;
  std::size_t num_streams_ = 0;  // among syncs_
  std::list<EndedSession> ended_;
  std::uint64_t next_ticket_ = 1;

  const std::shared_ptr<SyncPoller> poller_ = std::make_shared<SyncPoller>();  // last: its thread ends first
};

}  // namespace tessera::server
