// Leases, sessions and buffers: who owns what, and what ends with whom.
//
// A lease is one side-channel connection. A session is opened on a lease and owns buffers. Ending a session refuses new
// work at once and drops its references; memory that running calls still use goes when the last of them has finished.
//
// Thread-safe. The table's lock is not held while memory is mapped or unmapped; a session's imports of GPU memory wait
// for each other (ImportCache).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "server/session/buffer.h"
#include "server/session/id.h"
#include "server/session/id_table.h"
#include "server/session/import_cache.h"
#include "server/session/peer.h"

namespace tessera::server {

// What the executor keeps for a session (its stream, its queue count); opaque here.
class SessionLane {
 public:
  virtual ~SessionLane() = default;
};

class Session {
 public:
  const Id& id() const { return id_; }
  const Peer& peer() const { return peer_; }
  const std::string& label() const { return label_; }
  SessionLane* lane() const { return lane_.get(); }

  // Once true it stays true: queued work must not start.
  bool ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  friend class SessionTable;
  Session() = default;

  Id id_;
  Id lease_;
  Peer peer_;
  std::string label_;
  std::shared_ptr<SessionLane> lane_;
  std::shared_ptr<ByteBudget> budget_;
  std::atomic<bool> ended_{false};
  ImportCache imports_;      // of GPU memory
  std::vector<Id> buffers_;  // guarded by SessionTable::mutex_
};

// How many of something each principal has.
class PrincipalCounts {
 public:
  std::uint64_t Of(const std::string& principal) const;
  void Add(const std::string& principal) { ++counts_[principal]; }
  void Remove(const std::string& principal);

 private:
  std::unordered_map<std::string, std::uint64_t> counts_;  // none is 0
};

struct SessionLimits {
  std::uint64_t sessions_max = 0;
  std::uint64_t sessions_per_principal_max = ~std::uint64_t{0};
  std::uint64_t leases_max = 0;
  std::uint64_t leases_per_principal_max = ~std::uint64_t{0};
  std::uint64_t buffers_per_session_max = 0;
  std::uint64_t buffer_bytes_max = 0;          // of all sessions together
  std::uint64_t session_buffer_bytes_max = 0;  // of one session; 0 = no limit of its own
};

// What a client says of GPU memory of its own. Errors name the fields as ImportBufferRequest does.
struct LegacyImport {
  std::string handle;  // of cudaIpcGetMemHandle
  std::string device_uuid;
  std::uint64_t allocation_id = 0;
  std::int64_t exporter_pid = 0;  // getpid() of the process that made the handle, as that process sees it
  std::uint64_t byte_offset = 0;
  std::uint64_t bytes = 0;  // 0 = to the end
};

struct DescriptorImport {
  std::uint64_t ticket = 0;  // of a descriptor of a VMM allocation
  std::string device_uuid;
  std::uint64_t allocation_id = 0;
  std::uint64_t allocation_bytes = 0;
  std::uint64_t byte_offset = 0;
  std::uint64_t bytes = 0;  // 0 = to the end
};

struct BufferRow {
  Id id;
  BufferOrigin origin = BufferOrigin::kAllocated;
  MemorySpace space;
  std::uint64_t bytes = 0;
  std::uint32_t users = 0;
  std::chrono::steady_clock::duration age{};
  Peer owner;
  std::string session_label;
};

struct SessionCounts {
  std::size_t sessions = 0;
  std::size_t buffers = 0;
  std::uint64_t bytes_mapped = 0;  // including released buffers that running calls still hold
};

class SessionTable {
 public:
  static constexpr std::size_t kWaitingDescriptorsMax = 16;  // of one lease
  static constexpr std::size_t kLabelBytesMax = 64;

  // `make_lane` is called once a session. `devices` are the GPUs that hold buffers, the first of them being the one
  // that the space "cuda" means; they outlive the table and every pin.
  SessionTable(std::uint32_t epoch, const SessionLimits& limits, Metrics& metrics,
               std::function<std::shared_ptr<SessionLane>()> make_lane, std::vector<DeviceMemory*> devices = {});

  std::uint32_t epoch() const { return epoch_; }

  // Leases: called by the side channel.
  absl::StatusOr<Id> OpenLease(const Peer& peer);
  void CloseLease(const Id& lease);
  absl::StatusOr<std::uint64_t> KeepDescriptor(const Id& lease, UniqueFd fd);  // a ticket for ImportBuffer
  // The buffer of the lease's session, for passing its descriptor; it stays mapped while the result lives.
  absl::StatusOr<BufferPin> ExportBuffer(const Id& lease, const Id& buffer);

  // Sessions.
  absl::StatusOr<Id> OpenSession(const Peer& peer, const Id& lease, std::string_view label);
  absl::StatusOr<std::shared_ptr<Session>> FindSession(const Peer& peer, const Id& token);
  absl::StatusOr<std::size_t> EndSession(const Id& token, SessionEnd reason);  // number of buffers dropped
  void EndAllSessions(SessionEnd reason);

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
  absl::Status ReleaseBuffer(const Session& session, const Id& buffer);
  absl::StatusOr<BufferPin> PinBuffer(const Session& session, const Id& buffer);
  std::vector<BufferRow> ListBuffers(const std::function<bool(const Peer& owner)>& include);

  SessionCounts Counts();

 private:
  struct Lease {
    Peer peer;
    Id session;                                 // all zero: none yet
    std::map<std::uint64_t, UniqueFd> waiting;  // ticket -> descriptor
  };
  struct OwnedBuffer {
    std::shared_ptr<Buffer> buffer;
    std::shared_ptr<Session> owner;
  };

  absl::StatusOr<DeviceMemory*> FindDevice(std::string_view field, std::string_view uuid) const;
  // Whether `fd` came from ExportBuffer of this session, so that importing it would hide that both are one memory.
  bool IsExportOf(const Session& session, const UniqueFd& fd);
  absl::StatusOr<UniqueFd> TakeDescriptor(const Session& session, std::uint64_t ticket);
  absl::Status CheckRoomForBuffer(const Session& session);
  absl::Status LimitReached(Limit limit, std::uint64_t value);
  absl::StatusOr<NewBuffer> Register(Session& session, std::shared_ptr<Buffer> buffer);
  absl::StatusOr<OwnedBuffer*> FindOwned(const Session& session, const Id& buffer);

  const std::uint32_t epoch_;
  const SessionLimits limits_;
  Metrics& metrics_;
  const std::function<std::shared_ptr<SessionLane>()> make_lane_;
  const std::vector<DeviceMemory*> devices_;
  const std::shared_ptr<ByteBudget> budget_;

  std::mutex mutex_;
  PrincipalCounts leases_of_;
  PrincipalCounts sessions_of_;
  IdTable<Lease> leases_;
  IdTable<std::shared_ptr<Session>> sessions_;
  IdTable<OwnedBuffer> buffers_;
  std::uint64_t next_ticket_ = 1;
};

}  // namespace tessera::server
