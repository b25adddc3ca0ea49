// tesserad and the MPS control daemon as child processes.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "tests/gpu/e2e_process.h"

namespace tessera::gpu_test {

// Asks `condition` every few milliseconds; false if it did not become true within `limit`.
bool Eventually(std::chrono::milliseconds limit, const std::function<bool()>& condition);

// NVIDIA's Multi-Process Service for the processes that are given its environment; nobody else's is touched.
class Mps {
 public:
  // UNAVAILABLE, with the reason, where it does not start. Its files go to scratch.File(`name`).
  static absl::StatusOr<std::unique_ptr<Mps>> Start(const ScratchDirectory& scratch, const std::string& name);
  ~Mps();  // quits, and kills what does not go

  // For processes that shall use it.
  std::vector<std::string> environment() const;
  // Lets processes of other users ask for a context here, too; its directories are root's otherwise.
  absl::Status AdmitOtherUsers() const;

 private:
  Mps(Process control, std::string program, std::string directory)
      : control_(std::move(control)), program_(std::move(program)), directory_(std::move(directory)) {}
  // What the control daemon answers to a command, "" if nothing in time.
  std::string Ask(const std::string& command) const;

  Process control_;
  const std::string program_;
  const std::string directory_;
};

// Environment of processes that shall use no MPS, not even one that the machine has.
std::vector<std::string> WithoutMps(const ScratchDirectory& scratch);

struct DaemonSpec {
  std::string dist;
  std::string name;                         // of its socket and log in the scratch directory
  std::vector<std::string> environment;     // of Mps or WithoutMps
  int pid_number = 0;                       // as in ProcessSpec
  std::vector<std::string> arguments = {};  // of tesserad, behind the ones that it always gets
  // From its start to its first answer: the first CUDA context of a machine takes long, the more so under MPS.
  std::chrono::milliseconds serving_limit = std::chrono::seconds(90);
};

class TestDaemon {
 public:
  // Serving device 0, or an error with the end of its log.
  static absl::StatusOr<std::unique_ptr<TestDaemon>> Start(const ScratchDirectory& scratch, const DaemonSpec& spec);
  // Kills, a supervised daemon with its supervisor.
  ~TestDaemon();

  const std::string& socket() const { return socket_; }
  // This process's own connection; it may administer.
  client::Client& client() { return *client_; }
  bool alive() { return process_.running(); }
  std::string LogTail() const { return process_.LogTail(); }

  // A new connection, for after a restart; an error if nobody answers within `limit`. client() is the old one then.
  absl::Status Reconnect(std::chrono::milliseconds limit);
  // The text of /metrics, "" if nobody answers.
  std::string Metrics() const;
  // Drains; an error if it does not then exit with 0 in time.
  absl::Status Stop(std::chrono::milliseconds limit = std::chrono::seconds(40));

 private:
  TestDaemon(Process process, std::string socket) : process_(std::move(process)), socket_(std::move(socket)) {}

  Process process_;
  const std::string socket_;
  std::unique_ptr<client::Client> client_;
};

}  // namespace tessera::gpu_test
