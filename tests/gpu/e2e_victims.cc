// Jobs that go on until somebody ends them.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <deque>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/gemm_stream.h"
#include "common/float_codec.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "tests/gpu/e2e_board.h"
#include "tests/gpu/e2e_kernels.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_lifetimes.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/e2e_product.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr unsigned kWatchdogS = 120;
constexpr std::string_view kVictimPrefix = "victim-";
constexpr std::uint64_t kImportedBytes = std::uint64_t{128} << 20U;
constexpr std::int64_t kFillCycles = 20'000'000;  // some 10 ms

absl::Status Watch(Board& board) {
  while (board->asked != Board::kStop) {
    ASSIGN_OR_RETURN(board->free_bytes, FreeDeviceBytes());
    ++board->count;  // behind what it counts
    board->reached = 1;
    std::this_thread::sleep_for(1ms);
  }
  return absl::OkStatus();
}

absl::Status Bystand(const ClientJob& job, Board& board) {
  constexpr std::uint64_t kNumbers = 100;
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(OnesProduct product, OnesProduct::Make(connected.session, 256, 384, 512));
  ASSIGN_OR_RETURN(client::Buffer a, connected.session.AllocateOnDevice(product.a_bytes()));
  while (board->asked != Board::kStop) {
    // Another one each time: a result that is left of the last product is wrong.
    const auto number = static_cast<float>(1 + board->count % kNumbers);
    const std::vector<std::byte> numbers = Repeated(number, product.a_bytes());
    RETURN_IF_ERROR(a.Upload(numbers.data(), numbers.size()));
    const std::string wrong = product.Run(connected.session, product.a_view(a), number);
    if (!wrong.empty()) {
      ++board->wrong;
      std::fprintf(stderr, "%s\n", wrong.c_str());
    }
    ++board->count;
    board->reached = 1;
  }
  return absl::OkStatus();
}

// Imports and releases without pause.
template <typename Allocate>
absl::Status Import(const ClientJob& job, Board& board, const Allocate& allocate) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(const auto first, allocate(kImportedBytes));
  ASSIGN_OR_RETURN(const auto second, allocate(kImportedBytes));
  while (true) {
    ASSIGN_OR_RETURN(client::Buffer a, connected.session.ImportDevice(first->data()));
    ASSIGN_OR_RETURN(client::Buffer b, connected.session.ImportDevice(second->data()));
    RETURN_IF_ERROR(a.Release());
    RETURN_IF_ERROR(b.Release());
    board->reached = 1;
  }
}

// A product of some 6 ms on memory of every kind.
struct LargeProduct {
  static constexpr std::int64_t kRows = 16384;  // M and N
  static constexpr std::int64_t kDepth = 8192;
  static constexpr std::uint64_t kOperandBytes = kRows * kDepth * kBf16Bytes;

  Connected connected;
  std::unique_ptr<DeviceAllocation> plain;
  std::unique_ptr<DeviceAllocation> vmm;
  client::Buffer a;
  client::Buffer b;
  client::Buffer d;

  static absl::StatusOr<LargeProduct> Make(const ClientJob& job) {
    ASSIGN_OR_RETURN(Connected connected, Connect(job));
    ASSIGN_OR_RETURN(auto plain, AllocatePlain(kOperandBytes));
    ASSIGN_OR_RETURN(auto vmm, AllocateVmm(kOperandBytes));
    for (const auto* memory : {&plain, &vmm}) RETURN_IF_ERROR(Fill(**memory, nullptr));
    RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(nullptr), "filling the operands"));
    ASSIGN_OR_RETURN(client::Buffer a, connected.session.ImportDevice(plain->data()));
    ASSIGN_OR_RETURN(client::Buffer b, connected.session.ImportDevice(vmm->data()));
    ASSIGN_OR_RETURN(client::Buffer d, connected.session.AllocateOnDevice(kRows * kRows * kBf16Bytes));
    return LargeProduct{.connected = std::move(connected),
                        .plain = std::move(plain),
                        .vmm = std::move(vmm),
                        .a = std::move(a),
                        .b = std::move(b),
                        .d = std::move(d)};
  }

  static absl::Status Fill(const DeviceAllocation& memory, cudaStream_t stream, std::int64_t cycles = 0) {
    return ToStatus(LaunchLateFill(reinterpret_cast<std::uint16_t*>(memory.data()), kOperandBytes / kBf16Bytes,
                                   EncodeBf16(1), cycles, stream),
                    "launching a fill");
  }

  client::GemmSpec Spec() const {
    return {.a = a.Tensor(DType::kBf16, {kRows, kDepth}),
            .b = b.Tensor(DType::kBf16, {kRows, kDepth}),
            .d = d.Tensor(DType::kBf16, {kRows, kRows}),
            .backend = v1::BACKEND_CUDA};
  }
};

absl::Status KeepUnderWay(LargeProduct& product, Board& board, std::size_t products) {
  const client::GemmSpec spec = product.Spec();
  std::deque<std::future<absl::StatusOr<client::GemmResult>>> under_way;
  while (true) {
    while (under_way.size() < products) under_way.push_back(product.connected.session.GemmAsync(spec));
    RETURN_IF_ERROR(under_way.front().get().status());
    under_way.pop_front();
    board->reached = 1;
  }
}

// Longer than any watchdog lets a process live.
void Forever() {
  std::this_thread::sleep_for(1h);
}

// The first answer's callback does not return, so that no further one is read.
absl::Status LeaveUnread(LargeProduct& product, Board& board) {
  const client::GemmSpec spec = product.Spec();
  client::GemmStream stream = product.connected.session.OpenStream();
  while (true) {
    RETURN_IF_ERROR(stream.Gemm(spec, [&board](const absl::StatusOr<client::GemmResult>& result) {
      if (result.ok()) board->reached = 1;
      std::fprintf(stderr, "first answer: %s\n", Text(result.status()).c_str());
      Forever();
    }));
  }
}

absl::Status WriteByKernels(LargeProduct& product, Board& board) {
  cudaStream_t stream = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  const client::GemmSpec spec = product.Spec();
  while (true) {
    // Under the product's hands, which is this process's own fault and nobody else's.
    RETURN_IF_ERROR(LargeProduct::Fill(*product.plain, stream, kFillCycles));
    RETURN_IF_ERROR(LargeProduct::Fill(*product.vmm, stream, kFillCycles));
    RETURN_IF_ERROR(product.connected.session.Gemm(spec).status());
    RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(stream), "this process's own kernels"));
    board->reached = 1;
  }
}

absl::Status BeVictim(const ClientJob& job, std::string_view kind, Board& board) {
  if (kind == "handles") return Import(job, board, AllocatePlain);
  if (kind == "descriptors") return Import(job, board, AllocateVmm);
  ASSIGN_OR_RETURN(LargeProduct product, LargeProduct::Make(job));
  if (kind == "running") return KeepUnderWay(product, board, 2);
  if (kind == "queued") return KeepUnderWay(product, board, 48);
  if (kind == "unread") return LeaveUnread(product, board);
  if (kind == "kernels") return WriteByKernels(product, board);
  if (kind != "idle") return absl::InvalidArgumentError(absl::StrCat("unknown job ", job.job));
  board->reached = 1;
  Forever();
  return absl::OkStatus();
}

}  // namespace

bool IsCompanionJob(std::string_view job) {
  return job == "watch" || job == "bystander" || job.starts_with(kVictimPrefix);
}

absl::Status RunCompanionJob(const ClientJob& job) {
  ::alarm(kWatchdogS);
  ASSIGN_OR_RETURN(Board board, Board::Open(job.board));
  if (job.job == "watch") return Watch(board);
  if (job.job == "bystander") return Bystand(job, board);
  return BeVictim(job, std::string_view(job.job).substr(kVictimPrefix.size()), board);
}

}  // namespace tessera::gpu_test
