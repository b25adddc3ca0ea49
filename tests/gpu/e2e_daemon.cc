#include "tests/gpu/e2e_daemon.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kMpsStartLimit = 15s;
constexpr auto kMpsQuitLimit = 20s;
constexpr auto kAnswerLimit = 5s;
constexpr auto kChildGoneLimit = 3s;

// A program of PATH; "" if there is none.
std::string FindProgram(const std::string& name) {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "/usr/local/bin:/usr/bin:/bin" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    std::string candidate = absl::StrCat(folder, "/", name);
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

// Numbers of the processes whose command line begins with a tesserad and names `socket`.
std::vector<pid_t> DaemonsOf(const std::string& socket) {
  std::vector<pid_t> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos || name.size() > 9) continue;
    std::ifstream file(entry->path() / "cmdline");
    std::string program;
    std::getline(file, program, '\0');
    if (std::filesystem::path(program).filename() != "tesserad") continue;
    for (std::string argument; std::getline(file, argument, '\0');) {
      if (argument == socket) found.push_back(std::atoi(name.c_str()));
    }
  }
  return found;
}

}  // namespace

bool Eventually(std::chrono::milliseconds limit, const std::function<bool()>& condition) {
  const Clock::time_point deadline = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(10ms);
  }
  return true;
}

absl::StatusOr<std::unique_ptr<Mps>> Mps::Start(const ScratchDirectory& scratch, const std::string& name) {
  std::string program = FindProgram("nvidia-cuda-mps-control");
  if (program.empty()) return absl::UnavailableError("no MPS: nvidia-cuda-mps-control is not in PATH");
  std::string directory = scratch.File(name);
  std::error_code error;
  for (const char* const folder : {"/pipe", "/log"}) std::filesystem::create_directories(directory + folder, error);
  if (error) return absl::UnavailableError(absl::StrCat("no MPS: ", directory, ": ", error.message()));
  // In the foreground, so that it is our child and ends with us.
  absl::StatusOr<Process> control = Process::Start({.command = {program, "-f"},
                                                    .environment = {"CUDA_MPS_PIPE_DIRECTORY=" + directory + "/pipe",
                                                                    "CUDA_MPS_LOG_DIRECTORY=" + directory + "/log"},
                                                    .log = directory + "/control.txt"});
  RETURN_IF_ERROR(control.status());
  std::unique_ptr<Mps> mps(new Mps(*std::move(control), std::move(program), std::move(directory)));
  const bool ready = Eventually(kMpsStartLimit, [&] {
    return !mps->control_.running() || std::filesystem::exists(mps->directory_ + "/pipe/control", error);
  });
  if (ready && mps->control_.running()) return mps;
  return absl::UnavailableError(
      absl::StrCat("no MPS: nvidia-cuda-mps-control -f ",
                   mps->control_.running() ? "opens no pipe: " : "ended: ", mps->control_.LogTail()));
}

std::vector<std::string> Mps::environment() const {
  return {"CUDA_MPS_PIPE_DIRECTORY=" + directory_ + "/pipe", "CUDA_MPS_LOG_DIRECTORY=" + directory_ + "/log"};
}

absl::Status Mps::AdmitOtherUsers() const {
  std::error_code error;
  for (const char* const folder : {"/pipe", "/log"}) {
    std::filesystem::permissions(directory_ + folder, std::filesystem::perms::all, error);
    if (error) return absl::PermissionDeniedError(absl::StrCat(directory_, folder, ": ", error.message()));
  }
  // The servers of all users write to one file, which would be that of the first one.
  const std::string log = directory_ + "/log/server.log";
  std::ofstream(log, std::ios::app).close();
  std::filesystem::permissions(log, static_cast<std::filesystem::perms>(0666), error);
  if (error) return absl::PermissionDeniedError(absl::StrCat(log, ": ", error.message()));
  // The way there, for which others need no more than to pass.
  const std::filesystem::path scratch = std::filesystem::path(directory_).parent_path();
  for (const std::filesystem::path& path : {scratch, std::filesystem::path(directory_)}) {
    std::filesystem::permissions(path, std::filesystem::perms::others_exec, std::filesystem::perm_options::add, error);
    if (error) return absl::PermissionDeniedError(absl::StrCat(path.string(), ": ", error.message()));
  }
  return absl::OkStatus();
}

std::string Mps::Ask(const std::string& command) const {
  const std::string answer = directory_ + "/answer.txt";
  std::error_code error;
  std::filesystem::remove(answer, error);
  absl::StatusOr<Process> asking =
      Process::Start({.command = {"/bin/sh", "-c", "echo \"$1\" | \"$2\"", "sh", command, program_},
                      .environment = environment(),
                      .log = answer});
  if (!asking.ok() || !asking->Wait(kAnswerLimit).has_value()) return "";
  std::ifstream file(answer);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Mps::~Mps() {
  if (!control_.running()) return;
  // Its server is not our child: if it stays behind, it has to be ended by its number.
  std::istringstream answer(Ask("get_server_list"));
  std::vector<pid_t> servers;
  for (std::string word; answer >> word;) {
    const bool number = std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    if (number && word.size() < 10) servers.push_back(std::atoi(word.c_str()));
  }
  Ask("quit -t 5");
  if (control_.Wait(kMpsQuitLimit).has_value()) return;
  control_.Kill();
  for (const pid_t server : servers) static_cast<void>(::kill(server, SIGKILL));
}

std::vector<std::string> WithoutMps(const ScratchDirectory& scratch) {
  return {"CUDA_MPS_PIPE_DIRECTORY=" + scratch.File("no-mps")};
}

absl::StatusOr<std::unique_ptr<TestDaemon>> TestDaemon::Start(const ScratchDirectory& scratch, const DaemonSpec& spec) {
  std::string socket = scratch.File(spec.name + ".sock");
  std::vector<std::string> command = {
      spec.dist + "/bin/tesserad", "--socket", socket, "--http-address", "127.0.0.1:0", "--cuda-device", "0"};
  // What others have kept here is not what is measured.
  command.insert(command.end(), {"--cache-dir", "off"});
  command.insert(command.end(), spec.arguments.begin(), spec.arguments.end());
  ASSIGN_OR_RETURN(Process process, Process::Start({.command = std::move(command),
                                                    .environment = spec.environment,
                                                    .log = scratch.File(spec.name + ".log"),
                                                    .pid_number = spec.pid_number}));
  std::unique_ptr<TestDaemon> daemon(new TestDaemon(std::move(process), std::move(socket)));
  RETURN_IF_ERROR(daemon->Reconnect(spec.serving_limit));
  return daemon;
}

TestDaemon::~TestDaemon() {
  process_.Kill();
  // The child of a killed supervisor is told to go by the kernel at the latest now, but nobody waits for it.
  Eventually(kChildGoneLimit, [&] { return DaemonsOf(socket_).empty(); });
  for (const pid_t pid : DaemonsOf(socket_)) static_cast<void>(::kill(pid, SIGKILL));
}

absl::Status TestDaemon::Reconnect(std::chrono::milliseconds limit) {
  std::string last = "no answer";
  bool connected = false;
  Eventually(limit, [&] {
    if (!process_.running()) return true;
    absl::StatusOr<client::Client> client =
        client::Client::Connect({.socket = socket_, .side_channel = {}, .timeout = 2s});
    if (!client.ok()) {
      last = std::string(client.status().message());
      return false;
    }
    client_ = std::make_unique<client::Client>(*std::move(client));
    connected = true;
    return true;
  });
  if (connected && process_.running()) return absl::OkStatus();
  const std::optional<int> code = process_.Wait(0ms);
  return absl::UnavailableError(absl::StrCat(
      "tesserad does not serve: ", code.has_value() ? absl::StrCat("exit code ", *code) : last, ": ", LogTail()));
}

std::string TestDaemon::Metrics() const {
  const absl::StatusOr<v1::ServerInfoReply> info = client_->ServerInfo();
  if (!info.ok()) return "";
  const std::string& address = info->http_address();
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos) return "";
  boost::asio::ip::tcp::iostream http;
  http.expires_after(5s);
  http.connect(address.substr(0, colon), address.substr(colon + 1));
  http << "GET /metrics HTTP/1.0\r\nHost: " << address << "\r\n\r\n" << std::flush;
  std::ostringstream reply;
  reply << http.rdbuf();
  return reply.str();
}

absl::Status TestDaemon::Stop(std::chrono::milliseconds limit) {
  RETURN_IF_ERROR(client_->Drain().status());
  const std::optional<int> code = process_.Wait(limit);
  if (code == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "tesserad ", code.has_value() ? absl::StrCat("exited with ", *code) : "does not end", ": ", LogTail()));
}

}  // namespace tessera::gpu_test
