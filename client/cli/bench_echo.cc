#include "client/cli/bench_echo.h"

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <deque>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cli/output.h"
#include "tessera/v1/compute.grpc.pb.h"

extern char** environ;

namespace tessera::client::cli {
namespace {

// What the daemon reports of a 16x16x16 product.
void FillReport(v1::OpReport& report) {
  report.set_variant("gemm.cpu.bf16_bf16.bf16.fast.NT/reference");
  report.set_backend("cpu");
  report.set_source("degraded");
  report.set_split(1);
  report.set_flops(8192);
}

// Answers each message as it comes.
class EchoStream final : public grpc::ServerBidiReactor<v1::StreamRequest, v1::StreamReply> {
 public:
  EchoStream() { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!ok) {
      ended_ = true;
      return FinishIfDone();
    }
    v1::StreamReply& reply = replies_.emplace_back();
    reply.set_tag(request_.tag());
    FillReport(*reply.add_results()->mutable_report());
    if (replies_.size() == 1) StartWrite(&replies_.front());
    StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    replies_.pop_front();
    if (!ok) replies_.clear();
    if (!replies_.empty()) return StartWrite(&replies_.front());
    FinishIfDone();
  }

  void OnDone() override { delete this; }

 private:
  void FinishIfDone() {
    if (ended_ && replies_.empty()) Finish(grpc::Status::OK);
  }

  std::mutex mutex_;
  v1::StreamRequest request_;
  std::deque<v1::StreamReply> replies_;  // the first is being written
  bool ended_ = false;
};

// Answers every Gemm at once with a reply of the size that the daemon's has.
class EchoService final : public v1::Compute::CallbackService {
  grpc::ServerUnaryReactor* Gemm(grpc::CallbackServerContext* context, const v1::GemmRequest* /*request*/,
                                 v1::GemmReply* reply) override {
    FillReport(*reply->mutable_report());
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerBidiReactor<v1::StreamRequest, v1::StreamReply>* Stream(
      grpc::CallbackServerContext* /*context*/) override {
    return new EchoStream();
  }
};

}  // namespace

int RunEchoServer(const std::string& path) {
  EchoService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return kExitFailed;
  server->Wait();  // until killed
  return kExitOk;
}

absl::StatusOr<std::unique_ptr<EchoProcess>> EchoProcess::Start() {
  const std::string path = absl::StrCat("/tmp/tessera-echo-", ::getpid(), ".sock");
  std::string words[] = {"tessera", "bench", "echo-server", path};
  char* arguments[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data(), nullptr};
  std::error_code error;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", error);
  pid_t pid = 0;
  if (error || ::posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments, environ) != 0) {
    return absl::InternalError("cannot start the echo service");
  }
  return std::unique_ptr<EchoProcess>(new EchoProcess(pid, path));
}

EchoProcess::~EchoProcess() {
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  ::unlink(path_.c_str());
}

void SetTensor(const std::string& buffer_id, std::uint64_t byte_offset, v1::Tensor& tensor) {
  tensor.set_buffer_id(buffer_id);
  tensor.set_byte_offset(byte_offset);
  tensor.set_dtype(v1::DTYPE_BF16);
  tensor.add_shape(16);
  tensor.add_shape(16);
}

std::string Machine() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string model = "unknown processor";
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) == 0) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  }
  return absl::StrCat(model, ", ", std::thread::hardware_concurrency(), " threads");
}

}  // namespace tessera::client::cli
