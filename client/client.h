// The C++ client of a node's tesserad.
//
//   ASSIGN_OR_RETURN(Client client, Client::Connect());
//   ASSIGN_OR_RETURN(Session session, client.OpenSession("my-job"));
//   ASSIGN_OR_RETURN(Buffer memory, session.Allocate(bytes));
//   TensorView a = memory.Tensor(DType::kBf16, {m, k});           // fill a.data: the daemon sees the same memory
//   ASSIGN_OR_RETURN(GemmResult result, session.Gemm({.a = a, .b = b, .d = d}));
//
// Everything is RAII and move-only, nothing throws, and all methods are thread-safe unless they say otherwise. Objects
// keep what they need alive: a Buffer its session's connection, a Session its client's.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tensor.h"
#include "tessera/v1/admin.pb.h"
#include "tessera/v1/memory.pb.h"
#include "tessera/v1/types.pb.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace tessera::client {

// Who the daemon and this client are to each other over TCP. All PEM files.
struct TlsOptions {
  std::string ca;           // authorities that the daemon's certificate must come from
  std::string certificate;  // this client's: its subject is who the daemon takes it for
  std::string key;
  std::string server_name;  // in the daemon's certificate; empty = the host of the address
};

struct ConnectOptions {
  std::string socket = {};                                      // empty = the node's default (see DefaultSocketPath)
  std::string side_channel = {};                                // empty = beside the socket
  std::chrono::milliseconds timeout = std::chrono::seconds(5);  // for connecting and for calls that do not compute
  // "host:port" of a daemon's tcp_address, instead of a socket: no sessions and buffers then, only inline tensors.
  std::string address = {};
  std::optional<TlsOptions> tls = {};  // nullopt: plain TCP, which daemons offer on loopback only
};

// Multiplier on an operand: one number, or a float32 tensor ([1], [M] for A, [N] for B).
using Scale = std::variant<float, TensorView>;

// A point in the order of work: Timeline::At, SharedTimeline::At, ImportedEvent::Point.
struct SyncPoint {
  std::string id;
  std::uint64_t value = 0;
};

// Where a submission stands in the order of work, and when it is answered; SubmitOptions in types.proto says it in
// full.
struct OrderSpec {
  std::string stream = {};  // WorkStream::id(); empty: the session's own
  std::vector<SyncPoint> wait = {};
  std::vector<SyncPoint> signal = {};
  v1::ReplyWhen reply_when = v1::REPLY_WHEN_UNSPECIFIED;
  std::chrono::milliseconds launch_timeout{0};  // until the launch, kept by the daemon; 0 = none
};

// D[.., m, n] = (sum_k A[.., m, k] * B[.., n, k]) * a_scale * b_scale + bias; see GemmOp in types.proto.
struct GemmSpec {
  // The initialisers let a caller name only what it sets, without -Wextra's complaint.
  TensorView a = {};  // [.., M, K]
  TensorView b = {};  // [.., N, K]; use Transposed() on a [K, N] tensor
  TensorView d = {};  // [.., M, N]
  std::optional<Scale> a_scale = {};
  std::optional<Scale> b_scale = {};
  std::optional<TensorView> bias = {};  // [N]
  v1::Accumulation accumulation = v1::ACCUMULATION_UNSPECIFIED;
  v1::Backend backend = v1::BACKEND_UNSPECIFIED;
  bool profile = false;                  // fill report.timing
  std::chrono::milliseconds timeout{0};  // of the call; honoured until the launch; 0 = none
  OrderSpec order = {};
};

struct GemmResult {
  v1::OpReport report;                     // variant, backend, source, ...
  std::chrono::nanoseconds round_trip{0};  // call to answer, as this process saw it
};

class SessionCore;
class ClientCore;
class GemmStream;  // client/gemm_stream.h

// What keeps a session alive.
enum class Lease {
  kSideChannel,  // a connection to the side channel, which passes descriptors, too
  kAttach,       // a gRPC call that lasts as long as the session: without the side channel, so no descriptors
  kTtl,          // calls, at least one in each `ttl`; likewise. Ends by itself in a process that hangs
};

struct SessionOptions {
  std::string label = {};  // shown to operators
  Lease lease = Lease::kSideChannel;
  std::chrono::milliseconds ttl{0};  // of kTtl
};

// A value that only grows, which submissions of sessions wait for and signal. Goes with the object, or with its
// session; whoever waits for it then gets ABORTED.
class Timeline {
 public:
  Timeline(Timeline&&) noexcept = default;
  Timeline& operator=(Timeline&& other) noexcept;
  ~Timeline();

  const std::string& id() const { return id_; }
  SyncPoint At(std::uint64_t value) const { return {id_, value}; }
  absl::Status Signal(std::uint64_t value);
  // Waits for `value`: the value that there is, or the error that the timeline was signalled with up to it.
  // DEADLINE_EXCEEDED after `timeout`.
  absl::StatusOr<std::uint64_t> Wait(std::uint64_t value, std::chrono::milliseconds timeout);

 private:
  friend class Session;
  Timeline(std::shared_ptr<SessionCore> session, std::string id) : session_(std::move(session)), id_(std::move(id)) {}
  std::shared_ptr<SessionCore> session_;
  std::string id_;
};

// A timeline whose value is in memory that this process, its GPU and the daemon share: whoever signals it there needs
// no call, and work on a GPU waits for it without the host. Goes as Timeline does.
class SharedTimeline {
 public:
  SharedTimeline(SharedTimeline&&) noexcept;
  SharedTimeline& operator=(SharedTimeline&&) noexcept;
  ~SharedTimeline();

  const std::string& id() const;
  SyncPoint At(std::uint64_t value) const;  // below 2^63 - 1
  std::uint64_t value() const;
  void Signal(std::uint64_t value);
  // nullopt: not reached. Else OK, or CANCELLED, ABORTED or what else the work that was to signal it has come to; only
  // the code is known here. To be asked, too, after a GPU has waited, which sees no errors.
  std::optional<absl::Status> Reached(std::uint64_t value) const;
  // As Timeline::Wait.
  absl::StatusOr<std::uint64_t> Wait(std::uint64_t value, std::chrono::milliseconds timeout);

  // Where kernels and cuStreamWaitValue64 (GEQ) and cuStreamWriteValue64 of this process's GPU find the value: for the
  // context that is current, or the primary one of the daemon's GPU. Work that uses it is over before the object goes.
  // UNIMPLEMENTED without a GPU driver here.
  absl::StatusOr<std::uint64_t> DevicePointer();

 private:
  friend class Session;
  struct State;
  explicit SharedTimeline(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// An event of this process's that submissions wait for and signal. Goes with the object.
class ImportedEvent {
 public:
  ImportedEvent(ImportedEvent&&) noexcept = default;
  ImportedEvent& operator=(ImportedEvent&& other) noexcept;
  ~ImportedEvent();

  SyncPoint Point() const { return {id_, 0}; }

 private:
  friend class Session;
  ImportedEvent(std::shared_ptr<SessionCore> session, std::string id)
      : session_(std::move(session)), id_(std::move(id)) {}
  std::shared_ptr<SessionCore> session_;
  std::string id_;
};

// A further in-order stream of a session. Goes with the object; its work goes on.
class WorkStream {
 public:
  WorkStream(WorkStream&&) noexcept = default;
  WorkStream& operator=(WorkStream&& other) noexcept;
  ~WorkStream();

  const std::string& id() const { return id_; }
  // Waits for all that was submitted to it before: the first error since the last time, if there was one.
  absl::Status Synchronize(std::chrono::milliseconds timeout);

 private:
  friend class Session;
  WorkStream(std::shared_ptr<SessionCore> session, std::string id) : session_(std::move(session)), id_(std::move(id)) {}
  std::shared_ptr<SessionCore> session_;
  std::string id_;
};

// Memory that this process and the daemon share, on the host or on a GPU. Released with the object, which waits for the
// daemon to let go of it, calls on it that run included, for up to the client's timeout.
class Buffer {
 public:
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  ~Buffer();

  std::byte* data() const;  // on a GPU, a device pointer: for kernels and copies, not for this process's code
  std::uint64_t bytes() const;
  const std::string& id() const;
  const std::string& space() const;  // host, or the GPU's UUID
  bool on_device() const;

  // Copies between memory of this process and the buffer, wherever that is; complete on return. Not ordered with calls
  // that are on the way. INVALID_ARGUMENT outside the buffer.
  absl::Status Upload(const void* from, std::uint64_t bytes, std::uint64_t byte_offset = 0);
  absl::Status Download(void* to, std::uint64_t bytes, std::uint64_t byte_offset = 0) const;

  // A view at `byte_offset`; packed row-major unless strides are given. The daemon checks it against the buffer.
  TensorView Tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t byte_offset = 0,
                    std::vector<std::int64_t> strides = {}) const;

  // Lets other sessions of `principal` (as ServerInfo.principal; empty: this client's own) use the buffer in their
  // calls, as a TensorView with its id and no data; `access` NONE ends that, for calls that come later.
  absl::Status Share(v1::BufferAccess access, std::string_view principal = {});

  // Gives the buffer back now. OK: the daemon has let go of its memory. DEADLINE_EXCEEDED: it will once its running
  // calls are over. The mapping here is gone in any case.
  absl::Status Release();

 private:
  friend class Session;
  struct State;
  explicit Buffer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Owns buffers and an in-order stream in the daemon. Ends with the object, with its process, or with Close: calls that
// have not been launched by then are answered CANCELLED.
class Session {
 public:
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();

  // Memory of the daemon, zeroed, mapped here.
  absl::StatusOr<Buffer> Allocate(std::uint64_t bytes);
  // New memory of this process, shared with the daemon: it survives the daemon.
  absl::StatusOr<Buffer> Share(std::uint64_t bytes);
  // A memfd of this process, sealed with F_SEAL_SHRINK; `memfd` stays the caller's. bytes 0 = to its end.
  absl::StatusOr<Buffer> Import(int memfd, std::uint64_t byte_offset = 0, std::uint64_t bytes = 0);

  // GPU memory of the daemon, zeroed, mapped here: Buffer::data() is a device pointer in the primary context. `gpu` is
  // a UUID, or "cuda" for the daemon's GPU. UNIMPLEMENTED without a GPU driver here, or without a GPU there.
  absl::StatusOr<Buffer> AllocateOnDevice(std::uint64_t bytes, std::string_view gpu = "cuda");
  // GPU memory of this process, of cudaMalloc or of cuMemCreate; bytes 0 = to the end of its allocation. It stays the
  // caller's, who keeps it until the buffer is released and its calls are answered, and waits for its own kernels that
  // write it before calls read it. FAILED_PRECONDITION, saying what to use instead, for memory that no other process
  // can open (pools, managed memory), and where this process has the daemon's PID number (both 1 in containers).
  absl::StatusOr<Buffer> ImportDevice(void* device_pointer, std::uint64_t bytes = 0);

  // Returns when d is written. Tensors may be of buffers or inline.
  absl::StatusOr<GemmResult> Gemm(const GemmSpec& spec);
  // `done` runs on a library thread, exactly once, and must not block. The views' buffers must live until then. Calls
  // that are on the way together may arrive in any order: wait for a result before sending what reads it.
  void GemmAsync(const GemmSpec& spec, std::function<void(absl::StatusOr<GemmResult>)> done);
  std::future<absl::StatusOr<GemmResult>> GemmAsync(const GemmSpec& spec);
  // Several products, one after the other, with one answer; `order`, and backend, profile and timeout of the first, are
  // those of all.
  absl::StatusOr<std::vector<GemmResult>> Execute(const std::vector<GemmSpec>& specs, const OrderSpec& order = {});

  // `gpu_waits`: waits for SharedTimelines of this session are left to the GPU; see Memory.OpenStream for what that
  // risks.
  absl::StatusOr<WorkStream> OpenWorkStream(v1::StreamPriority priority = v1::STREAM_PRIORITY_NORMAL,
                                            bool gpu_waits = false);
  // `shared_with`: principals whose sessions may use it, too; "" is this client's own.
  absl::StatusOr<Timeline> CreateTimeline(std::uint64_t initial_value = 0,
                                          const std::vector<std::string>& shared_with = {});
  // Needs the side channel.
  absl::StatusOr<SharedTimeline> CreateSharedTimeline(std::uint64_t initial_value = 0,
                                                      const std::vector<std::string>& shared_with = {});
  // A cudaEvent_t of this process's, made with cudaEventDisableTiming | cudaEventInterprocess, on the device that is
  // current. It stays the caller's. INVALID_ARGUMENT: not such an event.
  absl::StatusOr<ImportedEvent> ImportEvent(void* cuda_event);
  // Waits for all that was submitted to any stream of the session before: the first error since the last time.
  absl::Status Synchronize(std::chrono::milliseconds timeout);

  // One call that carries many products, started in the order in which they are given. `timeout` is that of all of them
  // together; 0 = none.
  GemmStream OpenStream(std::chrono::milliseconds timeout = std::chrono::milliseconds(0));

  // Starts the time to live of a kTtl session anew, as every call does, and tells how long it is.
  absl::StatusOr<std::chrono::milliseconds> KeepAlive();

  // Ends the session now. Buffers of it are invalid in the daemon afterwards; mappings here stay until released. OK:
  // the daemon has let go of all memory. DEADLINE_EXCEEDED: it will once the running calls are over.
  absl::Status Close();

  const std::string& token() const;  // for the metadata of hand-made calls

 private:
  friend class Client;
  explicit Session(std::shared_ptr<SessionCore> core);
  std::shared_ptr<SessionCore> core_;
};

// A connection to one daemon.
class Client {
 public:
  // UNAVAILABLE, saying what to do, if no daemon answers within the timeout.
  static absl::StatusOr<Client> Connect(ConnectOptions options = {});

  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  absl::StatusOr<Session> OpenSession(std::string_view label = {});
  absl::StatusOr<Session> OpenSession(const SessionOptions& options);

  // Calls without a session, on inline tensors.
  absl::StatusOr<GemmResult> Gemm(const GemmSpec& spec);
  std::future<absl::StatusOr<GemmResult>> GemmAsync(const GemmSpec& spec);
  GemmStream OpenStream(std::chrono::milliseconds timeout = std::chrono::milliseconds(0));

  absl::StatusOr<v1::ServerInfoReply> ServerInfo() const;
  // All pages in one. Of this client's principal, or of all for administrators.
  absl::StatusOr<v1::ListBuffersReply> ListBuffers(bool all_principals = false) const;
  absl::StatusOr<v1::ListSessionsReply> ListSessions(bool all_principals = false) const;
  // Administrators only.
  absl::StatusOr<v1::GetConfigReply> GetConfig() const;
  absl::StatusOr<std::string> SetLogLevel(std::string_view level) const;        // the level before
  absl::StatusOr<v1::EndSessionReply> EndSession(std::string_view name) const;  // SessionInfo.name
  absl::StatusOr<v1::DrainReply> Drain() const;

  // For calls that this class does not wrap.
  std::shared_ptr<grpc::Channel> channel() const;
  const std::string& socket() const;
  bool remote() const;  // over TCP

 private:
  friend class Planner;  // client/planner.h
  explicit Client(std::shared_ptr<ClientCore> core);
  std::shared_ptr<ClientCore> core_;
};

}  // namespace tessera::client
