#include "tests/e2e/daemon_process.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <system_error>
#include <utility>

namespace tessera::e2e {

using namespace std::chrono_literals;

DaemonProcess::DaemonProcess(std::string program, std::vector<std::string> flags)
    : program_(std::move(program)), flags_(std::move(flags)) {
  StartAgain();
}

void DaemonProcess::StartAgain() {
  std::vector<std::string> argv = {program_,      "--socket",      socket(), "--http-address",
                                   "127.0.0.1:0", "--cuda-device", "off"};
  argv.insert(argv.end(), flags_.begin(), flags_.end());
  child_.emplace(argv);
  EXPECT_TRUE(Eventually(30s, [this] {
    const auto client = Connect(1s);
    const auto info = client.ok() ? client->ServerInfo() : client.status();
    if (!info.ok()) return false;
    pid_ = info->pid();
    http_address_ = info->http_address();
    return true;
  })) << child_->Err();
}

absl::StatusOr<client::Client> DaemonProcess::Connect(std::chrono::milliseconds timeout) const {
  return client::Client::Connect({.socket = socket(), .side_channel = {}, .timeout = timeout});
}

namespace {

void CountMappings(const std::string& process, ProcessView& view) {
  std::ifstream maps(process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    ++view.mappings;
    if (line.find(" /") == std::string::npos) continue;
    ++view.file_mappings;
    if (line.find("/memfd:") != std::string::npos) ++view.memfd_mappings;
  }
}

// Inodes of connected TCP sockets of this machine: in these tests, of scrapes. A scrape's connection lives a moment
// longer than the scrape, longer still on a busy machine, and is nobody's leak.
std::set<std::string> ConnectedTcpSockets() {
  constexpr char kEstablished[] = "01";
  constexpr char kCloseWait[] = "08";
  std::set<std::string> inodes;
  std::ifstream table("/proc/net/tcp");
  for (std::string line; std::getline(table, line);) {
    std::istringstream words(line);
    std::array<std::string, 10> word;  // number, local, remote, state, queues, timer, retransmits, uid, timeout, inode
    for (std::string& each : word) words >> each;
    if (word[3] == kEstablished || word[3] == kCloseWait) inodes.insert(word[9]);
  }
  return inodes;
}

// "socket:[4711]" and "/memfd:name (deleted)" without what tells one from another.
std::string KindOf(const std::string& target) {
  if (target.starts_with("/memfd:")) return "memfd";
  if (target.starts_with("/")) return "file";
  if (target.starts_with("anon_inode:")) return target;
  return target.substr(0, target.find(':'));
}

void CountDescriptors(const std::string& process, ProcessView& view) {
  const std::set<std::string> scrapes = ConnectedTcpSockets();
  std::error_code gone;
  std::filesystem::directory_iterator descriptors(process + "/fd", gone);
  for (; !gone && descriptors != std::filesystem::directory_iterator(); descriptors.increment(gone)) {
    std::error_code closed;  // between the listing and this
    const std::string target = std::filesystem::read_symlink(descriptors->path(), closed);
    if (closed) continue;
    const std::size_t inode = target.starts_with("socket:[") ? target.find('[') + 1 : std::string::npos;
    if (inode != std::string::npos && scrapes.contains(target.substr(inode, target.find(']') - inode))) continue;
    ++view.descriptors[KindOf(target)];
  }
}

}  // namespace

ProcessView ViewProcess(pid_t pid) {
  const std::string process = "/proc/" + std::to_string(pid);
  ProcessView view;
  CountMappings(process, view);
  CountDescriptors(process, view);
  std::int64_t pages = 0;
  std::ifstream(process + "/statm") >> pages >> pages;
  view.resident_bytes = pages * ::sysconf(_SC_PAGESIZE);
  std::ifstream status(process + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Threads:")) view.threads = std::stoul(line.substr(line.find(':') + 1));
  }
  return view;
}

std::ostream& operator<<(std::ostream& out, const ProcessView& view) {
  out << view.mappings << " mappings (" << view.file_mappings << " of files, " << view.memfd_mappings << " of memfds), "
      << view.threads << " threads, " << view.resident_bytes << " bytes resident, descriptors:";
  for (const auto& [kind, count] : view.descriptors) out << " " << count << " " << kind;
  return out;
}

std::uint64_t TestSeed() {
  const char* fixed = std::getenv("TESSERA_TEST_SEED");
  const std::uint64_t seed = fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device()();
  std::printf("TESSERA_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  return seed;
}

}  // namespace tessera::e2e
