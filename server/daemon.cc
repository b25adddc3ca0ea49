#include "server/daemon.h"

#include <netinet/tcp.h>
#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "common/paths.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "kernels/catalog/gemm_catalog.h"
#include "planner/builtin_rows.h"
#include "planner/planner.h"
#include "server/exec/devices.h"
#include "server/exec/executor.h"
#include "server/planner_setup.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/compute_service.h"
#include "server/rpc/memory_service.h"
#include "server/rpc/planner_service.h"
#include "server/rpc/planner_watch.h"
#include "server/rpc/rpc.h"
#include "server/rpc/rpc_server.h"
#include "server/rpc/tls.h"
#include "server/session/acceptor.h"
#include "server/session/session_table.h"
#include "server/session/side_channel.h"
#include "server/session/tcp_listener.h"
#include "server/session/unix_listener.h"
#include "server/telemetry/http_server.h"
#include "server/telemetry/metrics.h"
#include "server/telemetry/nvml.h"
#include "server/tuning_setup.h"

namespace tessera::server {
namespace {

namespace asio = boost::asio;
using namespace std::chrono_literals;

// How exactly a time to live and the patience with clean-ups are kept.
constexpr auto kTick = 100ms;
// What is left of a daemon whose GPU is lost has this long to finish on the CPU.
constexpr auto kLostGpuGrace = 3s;
constexpr auto kDeadlineCheck = 100ms;

std::uint64_t HalfOfMemory() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page_bytes = ::sysconf(_SC_PAGESIZE);
  return static_cast<std::uint64_t>(pages) / 2 * static_cast<std::uint64_t>(page_bytes);
}

SessionLimits LimitsOf(const Settings& settings, std::uint64_t gpu_bytes) {
  SessionLimits limits{
      .sessions_max = static_cast<std::uint64_t>(settings.sessions_max),
      .sessions_per_principal_max = static_cast<std::uint64_t>(settings.sessions_per_principal_max),
      .leases_max = static_cast<std::uint64_t>(settings.side_connections_max),
      .leases_per_principal_max = static_cast<std::uint64_t>(settings.connections_per_principal_max),
      .buffers_max = static_cast<std::uint64_t>(settings.buffers_max),
      .buffers_per_principal_max = static_cast<std::uint64_t>(settings.buffers_per_principal_max),
      .buffers_per_session_max = static_cast<std::uint64_t>(settings.buffers_per_session_max),
      .buffer_bytes_max = static_cast<std::uint64_t>(settings.buffer_bytes_max),
      .principal_buffer_bytes_max = static_cast<std::uint64_t>(settings.buffer_bytes_per_principal_max),
      .session_buffer_bytes_max = static_cast<std::uint64_t>(settings.session_buffer_bytes_max),
      .streams_per_session_max = static_cast<std::uint64_t>(settings.streams_per_session_max),
      .timelines_per_session_max = static_cast<std::uint64_t>(settings.timelines_per_session_max),
      .ttl_max = std::chrono::seconds(settings.lease_ttl_max_s),
      .cleanup_patience = std::chrono::seconds(settings.cleanup_patience_s)};
  if (limits.buffer_bytes_max == 0) limits.buffer_bytes_max = HalfOfMemory() + gpu_bytes;
  return limits;
}

ConnectionLimits ConnectionLimitsOf(const Settings& settings) {
  return {.connections_max = static_cast<std::size_t>(settings.connections_max),
          .connections_per_principal_max = static_cast<std::size_t>(settings.connections_per_principal_max)};
}

// Small answers go out at once, and a peer that is gone without a word is noticed within minutes.
void SetTcpOptions(int fd) {
  const auto set = [fd](int level, int option, int value) {
    if (::setsockopt(fd, level, option, &value, sizeof(value)) != 0) spdlog::debug("TCP option {} not set", option);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 60);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 20);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

// Null without a GPU, or without the driver's management library.
std::unique_ptr<Nvml> OpenNvml(const DeviceMemory* gpu) {
  if (gpu == nullptr) return nullptr;
  absl::StatusOr<std::unique_ptr<Nvml>> nvml = Nvml::Open(gpu->uuid());
  if (nvml.ok()) return *std::move(nvml);
  spdlog::warn("no metrics of the GPU: {}", MessageOf(nvml.status()));
  return nullptr;
}

MetricsOptions MetricsOptionsOf(const Nvml* nvml) {
  MetricsOptions options{.version = std::string(Version()), .variants = {}};
  if (nvml != nullptr) options.gpu = nvml->identity();
  for (const auto& variant : kernels::GemmVariants()) options.variants.emplace_back(variant.info.id);
  std::set<std::string> classes;
  for (const auto& variant : kernels::GemmVariants()) classes.insert(variant.gemm_class.ToString());
  options.classes.assign(classes.begin(), classes.end());
  return options;
}

// Who is told when the GPU is lost: devices are opened before the daemon that has to know.
class LossReport {
 public:
  void Tell(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (listener_) listener_(status);
  }
  void Listen(std::function<void(const absl::Status&)> listener) {
    const std::lock_guard<std::mutex> lock(mutex_);
    listener_ = std::move(listener);
  }

 private:
  std::mutex mutex_;
  std::function<void(const absl::Status&)> listener_;
};

// nullopt = the first capable.
std::optional<kernels::Backend> PreferredBackend(const Settings& settings) {
  for (std::size_t i = 0; i < std::size(kernels::kBackendNames); ++i) {
    if (settings.backend == kernels::kBackendNames[i]) return static_cast<kernels::Backend>(i);
  }
  return std::nullopt;
}

std::uint32_t NewEpoch() {
  std::uint32_t epoch = 0;
  while (epoch == 0) epoch = RandomNonce();  // zero ids mean "none"
  return epoch;
}

}  // namespace

// Members in order of construction; destruction in reverse stops the doors first, then what is behind them.
class Daemon::Parts {
 public:
  Parts(const LoadedSettings& loaded, std::uint32_t epoch, planner::PlannerOptions planner,
        std::unique_ptr<RowsKeeper> rows_keeper, OpenedDevices opened, std::unique_ptr<Nvml> nvml,
        std::shared_ptr<LossReport> loss, std::uint32_t restarts)
      : settings_(loaded.values),
        setting_report_(loaded.report),
        nvml_(std::move(nvml)),
        metrics_(MetricsOptionsOf(nvml_.get())),
        peers_(ConnectionLimitsOf(settings_), metrics_),
        isolation_(opened.isolation),
        gpu_memory_(std::move(opened.gpu_memory)),
        reaper_(std::chrono::seconds(settings_.cleanup_patience_s), metrics_),
        rows_keeper_(std::move(rows_keeper)),
        planner_(std::move(planner)),
        executor_(std::move(opened.devices), PreferredBackend(settings_),
                  {.queue_max = settings_.queue_max,
                   .queue_per_session_max = settings_.queue_per_session_max,
                   .queue_per_principal_max = settings_.queue_per_principal_max,
                   .unavailable = std::move(opened.unavailable),
                   .gpu_wait_timeout = std::chrono::milliseconds(settings_.gpu_wait_timeout_ms),
                   .end_session = [this](Session& session) { EndStuck(session); }},
                  metrics_, &planner_),
        sessions_(
            epoch, LimitsOf(settings_, opened.gpu_memory_bytes), metrics_, reaper_,
            [this](const StreamSpec& spec) { return executor_.MakeLane(spec); }, GpuMemories()),
        scope_{.settings = settings_, .metrics = metrics_, .peers = peers_, .sessions = sessions_},
        compute_(scope_, executor_),
        memory_(scope_, executor_),
        planner_service_(scope_, executor_, planner_, watch_pump_, KeptRowsFile()),
        restarts_(restarts),
        loss_(std::move(loss)) {
    metrics_.SetIsolationMode(isolation_);
    metrics_.SetRestarts(restarts_);
    loss_->Listen([this](const absl::Status& status) { GpuLost(status); });
    if (const auto preferred = PreferredBackend(settings_);
        preferred.has_value() && *preferred != executor_.default_backend()) {
      spdlog::warn("backend {} is not available; calls that name none run on {}", settings_.backend,
                   kernels::BackendName(executor_.default_backend()));
    }
  }

  ~Parts() {
    loss_->Listen(nullptr);
    Stop();
  }

  absl::Status Start() {
    socket_path_ = settings_.socket.empty() ? DefaultSocketPath() : settings_.socket;
    ASSIGN_OR_RETURN(UnixListener rpc_listener, UnixListener::Open(socket_path_, SOCK_STREAM));
    rpc_listener_.emplace(std::move(rpc_listener));
    ASSIGN_OR_RETURN(UnixListener side_listener, UnixListener::Open(SideChannelPath(socket_path_), SOCK_SEQPACKET));
    side_listener_.emplace(std::move(side_listener));
    if (!settings_.tcp_address.empty()) RETURN_IF_ERROR(OpenTcp());
    if (!settings_.http_address.empty()) RETURN_IF_ERROR(StartHttp());
    RETURN_IF_ERROR(StartRpcServer());
    StartAccepting();
    Tick();
    io_thread_ = std::thread([this] { io_.run(); });
    SetServing(true);
    if (draining_.load()) SetServing(false);  // told to drain before it served
    spdlog::info("tesserad {} serves at {} (side channel {}, tcp {}, http {}), backend {}", Version(), socket_path_,
                 side_listener_->path(), tcp_listener_.has_value() ? tcp_address() : "off",
                 http_ == nullptr ? "off" : http_->address(), kernels::BackendName(executor_.default_backend()));
    return absl::OkStatus();
  }

  void RequestDrain() { Drain(std::chrono::seconds(settings_.drain_grace_s)); }

  bool AwaitDrained() {
    std::unique_lock<std::mutex> lock(drain_mutex_);
    drain_requested_.wait(lock, [this] { return draining_.load(); });
    bool idle = false;
    while (!idle) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(drain_deadline_ - std::chrono::steady_clock::now());
      if (left <= 0ms) break;
      lock.unlock();
      idle = executor_.AwaitIdle(std::min(left, kDeadlineCheck));  // a lost GPU brings the deadline forward
      lock.lock();
    }
    idle = idle || executor_.AwaitIdle(0ms);
    if (!idle) spdlog::warn("grace is over with {} operations in flight", executor_.in_flight());
    return idle;
  }

  void RemoveSockets() {
    ::unlink(rpc_listener_->path().c_str());
    ::unlink(side_listener_->path().c_str());
  }

  bool gpu_lost() const { return gpu_lost_.load(); }
  std::string gpu_uuid() const { return gpu_memory_ == nullptr ? "" : gpu_memory_->uuid(); }

  const std::string& socket() const { return socket_path_; }
  std::string http_address() const { return http_ == nullptr ? "" : http_->address(); }
  std::string tcp_address() const { return tcp_listener_.has_value() ? tcp_listener_->address() : ""; }

 private:
  RowsFile KeptRowsFile() {
    RowsFile file{.name = rows_keeper_->file_names(), .error = [this] { return rows_keeper_->last_error(); }};
    if (!rows_keeper_->keeps_rows()) return file;
    file.persist = [this](bool clear, std::function<void(const KeptRows&)> done) {
      asio::post(rows_thread_, [this, clear, done = std::move(done)] {
        // Saves are one after the other, so that what is kept last is the newest.
        done(rows_keeper_->Keep(*planner_.config(), clear));
      });
    };
    return file;
  }

  std::vector<DeviceMemory*> GpuMemories() const {
    if (gpu_memory_ == nullptr) return {};
    return {gpu_memory_.get()};
  }

  void EndStuck(const Session& session) {
    sessions_.EndSession(session.id(), SessionEnd::kStuckWait).status().IgnoreError();  // it may be over already
  }

  // A context that is lost never comes back: the process must end, for its supervisor to start a new one.
  void GpuLost(const absl::Status& status) {
    spdlog::critical("{}", MessageOf(status));
    gpu_lost_.store(true);
    Drain(std::min<std::chrono::milliseconds>(kLostGpuGrace, std::chrono::seconds(settings_.drain_grace_s)));
  }

  void Drain(std::chrono::milliseconds grace) {
    const auto deadline = std::chrono::steady_clock::now() + grace;
    {
      const std::lock_guard<std::mutex> lock(drain_mutex_);
      const bool again = draining_.load();
      drain_deadline_ = again ? std::min(drain_deadline_, deadline) : deadline;
      draining_.store(true);
      if (again) return;
    }
    // Readiness before refusal: whoever watches it stops sending before anybody is turned away.
    SetServing(false);
    executor_.StopAccepting();
    spdlog::info("draining: {} operations in flight, {} ms grace", executor_.in_flight(), grace.count());
    drain_requested_.notify_all();
  }

  absl::Status OpenTcp() {
    if (settings_.tcp_plaintext) {
      spdlog::warn("tcp_plaintext: callers over TCP are anonymous, and any process of this machine may be one");
    } else {
      ASSIGN_OR_RETURN(tls_credentials_, MakeTlsCredentials({.certificate = settings_.tls_certificate,
                                                             .key = settings_.tls_key,
                                                             .client_ca = settings_.tls_client_ca}));
    }
    ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(settings_.tcp_address));
    ASSIGN_OR_RETURN(TcpListener listener, TcpListener::Open(address.host, address.port));
    tcp_listener_.emplace(std::move(listener));
    return absl::OkStatus();
  }

  absl::Status StartHttp() {
    ASSIGN_OR_RETURN(http_, HttpServer::Start({.address = settings_.http_address,
                                               .metrics =
                                                   [this] {
                                                     ReadGauges();
                                                     return metrics_.Serialize();
                                                   },
                                               .alive = [] { return true; },
                                               .not_ready_reason = [this]() -> std::string {
                                                 if (draining_.load()) return "draining";
                                                 if (blocked_.load()) return "clean-up of memory is stuck";
                                                 return serving_.load() ? "" : "starting";
                                               }}));
    return absl::OkStatus();
  }

  void ReadGauges() {
    metrics_.SetRpcConnections(peers_.CountOpen());
    const SessionCounts counts = sessions_.Counts();
    metrics_.SetSessionsEnding(counts.ending, counts.quarantined);
    metrics_.SetBufferHeldBytes(counts.bytes_held);
    metrics_.SetSyncs(counts.streams, counts.timelines);
    const Reaper::Counts cleanups = reaper_.counts();
    metrics_.SetCleanups(cleanups.waiting, cleanups.stuck);
    metrics_.SetPlanner(ReadingOf(planner_.State(), rows_keeper_->counters()));
    ReadGpu();
  }

  void ReadGpu() {
    if (nvml_ == nullptr) return;
    const absl::StatusOr<GpuReading> reading = nvml_->Read();
    reading.ok() ? metrics_.SetGpu(*reading) : metrics_.SetGpuUnreadable();
  }

  absl::Status StartRpcServer() {
    admin_.emplace(scope_, executor_,
                   AdminScope{.socket = socket_path_,
                              .side_channel = side_listener_->path(),
                              .http_address = http_address(),
                              .tcp_address = tcp_address(),
                              .isolation = isolation_,
                              .restarts = restarts_,
                              .setting_report = setting_report_,
                              .draining = [this] { return draining_.load(); },
                              .cleanups_stuck = [this] { return reaper_.counts().stuck; },
                              .drain = [this] { RequestDrain(); }});
    ASSIGN_OR_RETURN(rpc_server_, RpcServer::Start({.services = {&compute_, &memory_, &*admin_, &planner_service_},
                                                    .message_bytes_max = settings_.message_bytes_max,
                                                    .calls_per_connection_max = settings_.calls_per_connection_max,
                                                    .memory_bytes_max = settings_.rpc_memory_bytes_max,
                                                    .tls = tls_credentials_,
                                                    .metrics = &metrics_},
                                                   peers_));
    return absl::OkStatus();
  }

  void StartAccepting() {
    rpc_acceptor_ = std::make_unique<Acceptor>(
        io_, rpc_listener_->fd(), [this](UniqueFd connection) { rpc_server_->ServeLocal(std::move(connection)); });
    side_acceptor_ = std::make_unique<Acceptor>(io_, side_listener_->fd(), [this](UniqueFd connection) {
      const absl::StatusOr<Peer> peer = PeerOfSocket(connection.get());
      if (!peer.ok()) return spdlog::warn("side connection refused: {}", MessageOf(peer.status()));
      ServeSideConnection(io_, std::move(connection), *peer, sessions_, metrics_);
    });
    if (!tcp_listener_.has_value()) return;
    tcp_acceptor_ = std::make_unique<Acceptor>(io_, tcp_listener_->fd(), [this](UniqueFd connection) {
      SetTcpOptions(connection.get());
      if (settings_.tcp_plaintext) return rpc_server_->ServeAnonymous(std::move(connection));
      rpc_server_->ServeTls(std::move(connection));
    });
  }

  // Leases whose time is over, and what is stuck. While nothing is cleaned up any more, the daemon is not ready.
  void Tick() {
    sessions_.Tick();
    executor_.Tick();
    reaper_.Tick();
    if (const bool blocked = reaper_.blocked(); blocked != blocked_.exchange(blocked)) {
      spdlog::error("clean-up of memory {}", blocked ? "is stuck: not ready" : "goes on: ready");
      if (serving_.load() || !blocked) SetServing(!blocked && !draining_.load());
    }
    tick_.expires_after(kTick);
    tick_.async_wait([this](const boost::system::error_code& error) {
      if (!error) Tick();
    });
  }

  void SetServing(bool serving) {
    serving_.store(serving);
    metrics_.SetReady(serving);
    if (rpc_server_ != nullptr) rpc_server_->SetServing(serving);  // the GPU may be lost before it is there
  }

  void Stop() {
    io_.stop();
    if (io_thread_.joinable()) io_thread_.join();
    rpc_server_.reset();
    sessions_.EndAllSessions(SessionEnd::kDrained);
    reaper_.AwaitIdle();  // sessions have streams of the executor's devices
  }

  const Settings settings_;
  const std::vector<SettingValue> setting_report_;
  // Read by HTTP and RPC threads: constructed before them, destroyed after them.
  std::atomic<bool> serving_{false};
  std::atomic<bool> draining_{false};
  std::atomic<bool> gpu_lost_{false};
  std::atomic<bool> blocked_{false};  // the reaper
  std::mutex drain_mutex_;
  std::condition_variable drain_requested_;
  std::chrono::steady_clock::time_point drain_deadline_;  // guarded by drain_mutex_

  const std::unique_ptr<Nvml> nvml_;  // null: no GPU, or no such library
  Metrics metrics_;
  PeerRegistry peers_;
  const IsolationMode isolation_;
  const std::unique_ptr<DeviceMemory> gpu_memory_;  // outlives the buffers on it, and the work that uses them
  Reaper reaper_;                                   // likewise
  const std::unique_ptr<RowsKeeper> rows_keeper_;
  planner::Planner planner_;
  asio::thread_pool rows_thread_{1};  // saves rows; idle once no call is open
  Executor executor_;
  SessionTable sessions_;
  RpcScope scope_;
  ComputeService compute_;
  MemoryService memory_;
  WatchPump watch_pump_;
  PlannerService planner_service_;
  std::optional<AdminService> admin_;
  std::string socket_path_;
  std::optional<UnixListener> rpc_listener_;
  std::optional<UnixListener> side_listener_;
  std::optional<TcpListener> tcp_listener_;
  std::shared_ptr<grpc::ServerCredentials> tls_credentials_;  // null: no TLS
  std::unique_ptr<RpcServer> rpc_server_;
  std::unique_ptr<HttpServer> http_;
  asio::io_context io_{1};
  asio::steady_timer tick_{io_};
  std::unique_ptr<Acceptor> rpc_acceptor_;
  std::unique_ptr<Acceptor> side_acceptor_;
  std::unique_ptr<Acceptor> tcp_acceptor_;
  std::thread io_thread_;
  const std::uint32_t restarts_;
  const std::shared_ptr<LossReport> loss_;
};

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const LoadedSettings& settings, std::uint32_t restarts) {
  const auto loss = std::make_shared<LossReport>();
  const std::uint32_t epoch = NewEpoch();
  ASSIGN_OR_RETURN(planner::PlannerOptions planner, PlannerOptionsOf(settings, fmt::format("{:08x}", epoch)));
  ASSIGN_OR_RETURN(OpenedDevices opened,
                   OpenDevices({.cpu_threads = static_cast<int>(settings.values.cpu_threads),
                                .cuda_device = settings.values.cuda_device,
                                .isolation = settings.values.isolation,
                                .workspace_bytes_max = settings.values.workspace_bytes_max,
                                .lost = [loss](const absl::Status& status) { loss->Tell(status); }}));
  std::unique_ptr<Nvml> nvml = OpenNvml(opened.gpu_memory.get());
  // More exact than what CUDA tells.
  if (nvml != nullptr) opened.signatures.front().driver = nvml->driver_version();
  auto keeper = std::make_unique<RowsKeeper>(RowsDirectoryOf(settings.values), opened.signatures);
  planner.start.tier_ptr(planner::Tier::kInjected) = keeper->Load();
  std::vector<std::string_view> devices;
  for (const planner::DeviceSignature& signature : opened.signatures) devices.push_back(signature.device);
  ASSIGN_OR_RETURN(planner.start.tier_ptr(planner::Tier::kBuiltin), planner::BuiltinRowsOf(devices));
  auto parts = std::make_unique<Parts>(settings, epoch, std::move(planner), std::move(keeper), std::move(opened),
                                       std::move(nvml), loss, restarts);
  RETURN_IF_ERROR(parts->Start());
  return std::unique_ptr<Daemon>(new Daemon(std::move(parts)));
}

Daemon::Daemon(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Daemon::~Daemon() = default;

void Daemon::RequestDrain() {
  parts_->RequestDrain();
}
bool Daemon::AwaitDrained() {
  return parts_->AwaitDrained();
}
void Daemon::RemoveSockets() {
  parts_->RemoveSockets();
}
bool Daemon::gpu_lost() const {
  return parts_->gpu_lost();
}
std::string Daemon::gpu_uuid() const {
  return parts_->gpu_uuid();
}
const std::string& Daemon::socket() const {
  return parts_->socket();
}
std::string Daemon::http_address() const {
  return parts_->http_address();
}
std::string Daemon::tcp_address() const {
  return parts_->tcp_address();
}

}  // namespace tessera::server
