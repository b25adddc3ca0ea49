// `tessera bench rpc`: what a call through the daemon costs, beside a bare echo service in a process of its own with
// the same gRPC build, socket kind, channel arguments, client code and message sizes. One JSON object a line.

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <thread>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/bench_echo.h"
#include "client/cli/bench_stream.h"
#include "client/cli/commands.h"
#include "client/core.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;            // medians of these
constexpr int kCallsPerRound = 4000;  // of all clients together, to each side
constexpr int kSlices = 8;            // of a round, the two sides in turn: both see the same machine
constexpr int kRssWarmUpCalls = 10000;
constexpr int kRssCalls = 100000;

struct BenchOptions {
  std::string out;  // empty = stdout
  std::string git;
};

// One client: a connection of its own and the request that it repeats.
struct Caller {
  std::shared_ptr<ClientCore> core;
  v1::GemmRequest request;
  std::string token;

  absl::Status Call() const {
    grpc::ClientContext context;
    context.AddMetadata("tessera-session-bin", token);
    context.set_wait_for_ready(true);
    v1::GemmReply reply;
    return FromGrpc(core->compute->Gemm(&context, request, &reply));
  }
};

// What one side of the comparison needs: callers, and for the daemon the sessions behind them.
struct Side {
  std::vector<Session> sessions;
  std::vector<Buffer> buffers;
  std::vector<Caller> callers;
};

// The echo's callers send the same bytes as the daemon's.
absl::StatusOr<std::pair<Side, Side>> MakeSides(Client& client, const std::string& echo_socket, int clients) {
  Side daemon;
  Side echo;
  for (int i = 0; i < clients; ++i) {
    ASSIGN_OR_RETURN(Session session, client.OpenSession("bench"));
    ASSIGN_OR_RETURN(Buffer buffer, session.Allocate(4096));
    ASSIGN_OR_RETURN(std::shared_ptr<ClientCore> to_daemon, ClientCore::Make({.socket = client.socket()}));
    ASSIGN_OR_RETURN(std::shared_ptr<ClientCore> to_echo, ClientCore::Make({.socket = echo_socket}));
    Caller caller{.core = std::move(to_daemon), .request = {}, .token = session.token()};
    SetTensor(buffer.id(), 0, *caller.request.mutable_op()->mutable_a());
    SetTensor(buffer.id(), 1024, *caller.request.mutable_op()->mutable_b());
    SetTensor(buffer.id(), 2048, *caller.request.mutable_op()->mutable_d());
    caller.request.mutable_options()->set_backend(v1::BACKEND_CPU);
    echo.callers.push_back({.core = std::move(to_echo), .request = caller.request, .token = caller.token});
    daemon.callers.push_back(std::move(caller));
    daemon.sessions.push_back(std::move(session));
    daemon.buffers.push_back(std::move(buffer));
  }
  return std::make_pair(std::move(daemon), std::move(echo));
}

struct Round {
  double p50_us = 0;
  double p99_us = 0;
  double rate = 0;  // calls a second, all clients
};

// What one side did in a round.
class Tally {
 public:
  // Every client calls back to back, `calls` in all.
  absl::Status Run(const std::vector<Caller>& callers, int calls) {
    std::vector<std::vector<double>> latencies(callers.size());
    std::vector<absl::Status> statuses(callers.size());
    std::vector<std::thread> threads;
    const int each = calls / static_cast<int>(callers.size());
    const Clock::time_point start = Clock::now();
    for (std::size_t i = 0; i < callers.size(); ++i) {
      threads.emplace_back([&, i] {
        for (int call = 0; call < each && statuses[i].ok(); ++call) {
          const Clock::time_point begin = Clock::now();
          statuses[i] = callers[i].Call();
          latencies[i].push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
    for (std::size_t i = 0; i < callers.size(); ++i) {
      RETURN_IF_ERROR(statuses[i]);
      latencies_us_.insert(latencies_us_.end(), latencies[i].begin(), latencies[i].end());
    }
    return absl::OkStatus();
  }

  Round Result() {
    std::sort(latencies_us_.begin(), latencies_us_.end());
    const std::size_t count = latencies_us_.size();
    return {.p50_us = latencies_us_[count / 2],
            .p99_us = latencies_us_[count * 99 / 100],
            .rate = static_cast<double>(count) / seconds_};
  }

 private:
  std::vector<double> latencies_us_;
  double seconds_ = 0;
};

double MedianOf(const std::vector<Round>& rounds, double Round::*field) {
  std::vector<double> values;
  values.reserve(rounds.size());
  for (const Round& round : rounds) values.push_back(round.*field);
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::int64_t ResidentBytes(int pid) {
  std::ifstream statm(absl::StrCat("/proc/", pid, "/statm"));
  std::int64_t total = 0;
  std::int64_t resident = 0;
  statm >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

absl::StatusOr<nlohmann::json> RunCase(Client& client, const std::string& echo_socket, int clients, int daemon_pid,
                                       const std::string& git, Progress& progress, std::uint64_t& done) {
  ASSIGN_OR_RETURN(auto sides, MakeSides(client, echo_socket, clients));
  auto& [daemon, echo] = sides;
  const auto run = [&](Tally& tally, const Side& side, int calls) {
    progress.Update(done += static_cast<std::uint64_t>(calls));
    return tally.Run(side.callers, calls);
  };
  std::vector<Round> daemon_rounds;
  std::vector<Round> echo_rounds;
  for (int round = 0; round <= kRounds; ++round) {
    Tally daemon_tally;
    Tally echo_tally;
    for (int slice = 0; slice < kSlices; ++slice) {
      RETURN_IF_ERROR(run(echo_tally, echo, kCallsPerRound / kSlices));
      RETURN_IF_ERROR(run(daemon_tally, daemon, kCallsPerRound / kSlices));
    }
    if (round == 0) continue;  // warms up both
    daemon_rounds.push_back(daemon_tally.Result());
    echo_rounds.push_back(echo_tally.Result());
  }
  Tally unreported;
  RETURN_IF_ERROR(run(unreported, daemon, kRssWarmUpCalls));
  const std::int64_t resident = ResidentBytes(daemon_pid);
  RETURN_IF_ERROR(run(unreported, daemon, kRssCalls));
  return nlohmann::json{{"case", "gemm16_uds"},
                        {"clients", clients},
                        {"p50_us", MedianOf(daemon_rounds, &Round::p50_us)},
                        {"p99_us", MedianOf(daemon_rounds, &Round::p99_us)},
                        {"rate", MedianOf(daemon_rounds, &Round::rate)},
                        {"echo_p50_us", MedianOf(echo_rounds, &Round::p50_us)},
                        {"echo_p99_us", MedianOf(echo_rounds, &Round::p99_us)},
                        {"echo_rate", MedianOf(echo_rounds, &Round::rate)},
                        {"rss_growth_bytes", ResidentBytes(daemon_pid) - resident},
                        {"machine", Machine()},
                        {"git", git}};
}

absl::StatusOr<std::string> RpcBenchLines(const GlobalOptions& options, const std::string& git) {
  ASSIGN_OR_RETURN(Client client, Connect(options));
  ASSIGN_OR_RETURN(const v1::ServerInfoReply info, client.ServerInfo());
  ASSIGN_OR_RETURN(const std::unique_ptr<EchoProcess> echo, EchoProcess::Start());
  constexpr int kClients[] = {1, 8};
  constexpr std::uint64_t kCallsPerCase = 2 * (kRounds + 1) * kCallsPerRound + kRssWarmUpCalls + kRssCalls;
  Progress progress("bench rpc", kCallsPerCase * std::size(kClients));
  std::uint64_t done = 0;
  std::string lines;
  for (const int clients : kClients) {
    ASSIGN_OR_RETURN(const nlohmann::json row, RunCase(client, echo->path(), clients, info.pid(), git, progress, done));
    lines += row.dump() + "\n";
  }
  return lines;
}

using Lines = absl::StatusOr<std::string> (*)(const GlobalOptions& options, const std::string& git);

absl::Status Write(const absl::StatusOr<std::string>& lines, const std::string& out) {
  RETURN_IF_ERROR(lines.status());
  if (out.empty()) {
    std::fputs(lines->c_str(), stdout);
    return absl::OkStatus();
  }
  std::ofstream file(out);
  if (!(file << *lines << std::flush)) return absl::InternalError(absl::StrCat("cannot write ", out));
  return absl::OkStatus();
}

int Run(const GlobalOptions& options, const BenchOptions& bench, Lines lines) {
  const absl::Status status = Write(lines(options, bench.git), bench.out);
  return status.ok() ? kExitOk : Fail(options, status);
}

}  // namespace

Command AddBench(CLI::App& app, const GlobalOptions& options) {
  CLI::App* command = app.add_subcommand("bench", "Measurements of this node's daemon");
  command->require_subcommand(1);
  auto bench = std::make_shared<BenchOptions>();
  CLI::App* rpc = command->add_subcommand(
      "rpc", "A 16x16x16 Gemm beside a bare echo service: latency, rate, memory growth; a minute or two");
  rpc->add_option("--out", bench->out, "Write the JSON lines here instead of to standard output");
  rpc->add_option("--git", bench->git, "Revision to note in the report");
  CLI::App* stream = command->add_subcommand(
      "stream", "The same, pipelined on Compute.Stream, beside an echo stream of the same depth: rate; half a minute");
  stream->add_option("--out", bench->out, "Write the JSON lines here instead of to standard output");
  stream->add_option("--git", bench->git, "Revision to note in the report");
  auto echo_path = std::make_shared<std::string>();
  CLI::App* echo = command->add_subcommand("echo-server", "The echo service of `bench rpc`")->group("");
  echo->add_option("path", *echo_path)->required();
  return {command, [&options, bench, stream, echo, echo_path] {
            if (echo->parsed()) return RunEchoServer(*echo_path);
            return Run(options, *bench, stream->parsed() ? &StreamBenchLines : &RpcBenchLines);
          }};
}

}  // namespace tessera::client::cli
