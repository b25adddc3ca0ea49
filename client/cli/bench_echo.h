// The bare echo service beside which the daemon's calls are measured: the same gRPC build, socket kind, messages and
// sizes, and nothing behind them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "tessera/v1/types.pb.h"

namespace tessera::client::cli {

// Serves at a Unix socket until the process is killed; an exit code if it cannot.
int RunEchoServer(const std::string& path);

// The echo service in a child process, killed with the object.
class EchoProcess {
 public:
  static absl::StatusOr<std::unique_ptr<EchoProcess>> Start();
  ~EchoProcess();

  const std::string& path() const { return path_; }

 private:
  EchoProcess(pid_t pid, std::string path) : pid_(pid), path_(std::move(path)) {}
  const pid_t pid_;
  const std::string path_;
};

// A 16x16 bf16 matrix: what the benches multiply.
void SetTensor(const std::string& buffer_id, std::uint64_t byte_offset, v1::Tensor& tensor);

std::string Machine();  // for reports: processor and threads

}  // namespace tessera::client::cli
