#include "tests/gpu/e2e_lifetime_jobs.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "common/float_codec.h"
#include "common/status_macros.h"
#include "tests/gpu/e2e_kernels.h"
#include "tests/gpu/e2e_product.h"

namespace tessera::gpu_test {
namespace {

using Clock = std::chrono::steady_clock;

absl::Status RunSubBuffers(const ClientJob& job, Row& row) {
  constexpr std::array<std::uint64_t, 4> kOffsets = {0, 512, 4096, 65536};
  constexpr std::int64_t kExtent = 16;  // of M, N and K: operands of 512 bytes
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  client::Session& session = connected.session;
  ASSIGN_OR_RETURN(OnesProduct product, OnesProduct::Make(session, kExtent, kExtent, kExtent));
  ASSIGN_OR_RETURN(const auto memory, AllocatePlain(kMiB));
  std::vector<std::byte> image(kMiB, kPoison);
  for (std::size_t i = 0; i < kOffsets.size(); ++i) {
    const std::vector<std::byte> numbers = Repeated(static_cast<float>(i + 2), product.a_bytes());
    std::copy(numbers.begin(), numbers.end(), image.begin() + static_cast<std::ptrdiff_t>(kOffsets[i]));
  }
  RETURN_IF_ERROR(CopyIn(memory->data(), image.data(), image.size()));
  std::vector<client::Buffer> buffers;
  for (const std::uint64_t offset : kOffsets) {
    ASSIGN_OR_RETURN(client::Buffer buffer, session.ImportDevice(memory->data() + offset, product.a_bytes()));
    buffers.push_back(std::move(buffer));
  }
  for (std::size_t i = 0; i < kOffsets.size(); ++i) {
    CheckRight(row, absl::StrCat("input at ", kOffsets[i]),
               product.Run(session, product.a_view(buffers[i]), static_cast<float>(i + 2)));
  }
  // Outputs, too: each lands where it belongs, and nowhere else.
  ASSIGN_OR_RETURN(client::Buffer a, session.AllocateOnDevice(product.a_bytes()));
  for (std::size_t i = 0; i < kOffsets.size(); ++i) {
    const std::vector<std::byte> numbers = Repeated(static_cast<float>(i + 20), product.a_bytes());
    RETURN_IF_ERROR(a.Upload(numbers.data(), numbers.size()));
    CheckOk(row, absl::StrCat("output at ", kOffsets[i]),
            session
                .Gemm({.a = product.a_view(a),
                       .b = product.b_view(),
                       .d = buffers[i].Tensor(DType::kBf16, {kExtent, kExtent}),
                       .backend = v1::BACKEND_CUDA})
                .status());
    const std::vector<std::byte> wanted = Repeated(static_cast<float>((i + 20) * kExtent), product.d_bytes());
    std::copy(wanted.begin(), wanted.end(), image.begin() + static_cast<std::ptrdiff_t>(kOffsets[i]));
  }
  ASSIGN_OR_RETURN(const std::vector<std::byte> now, BytesOf(*memory));
  row.Check(now == image, "the allocation is not what the products wrote");
  // Those that stay keep the memory that all of them share.
  for (std::size_t i = 0; i < kOffsets.size(); ++i) {
    CheckRight(row, absl::StrCat("at ", kOffsets[i], " after the release of those before"),
               product.Run(session, product.a_view(buffers[i]), static_cast<float>((i + 20) * kExtent)));
    CheckOk(row, absl::StrCat("release at ", kOffsets[i]), buffers[i].Release());
  }
  return absl::OkStatus();
}

absl::Status Produce(client::Session& session, OnesProduct& product, const client::Buffer& buffer,
                     const std::string& name, Row& row) {
  constexpr int kRounds = 5;
  constexpr std::int64_t kCycles = 100'000'000;  // 50 ms of 2 GHz
  constexpr double kLateS = 0.02;                // so that whoever does not wait is before it
  cudaStream_t stream = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  for (int round = 0; round < kRounds; ++round) {
    const auto number = static_cast<float>(2 + round);
    const std::string what = absl::StrCat(name, ", round ", round);
    const Clock::time_point begin = Clock::now();
    RETURN_IF_ERROR(ToStatus(LaunchLateFill(reinterpret_cast<std::uint16_t*>(buffer.data()),
                                            product.a_bytes() / kBf16Bytes, EncodeBf16(number), kCycles, stream),
                             "launching the producer"));
    RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(stream), "the producer"));
    row.Check(SecondsSince(begin) > kLateS, what + ": the producer was too quick: nothing was tried");
    CheckRight(row, what, product.Run(session, product.a_view(buffer), number));
  }
  return ToStatus(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

absl::Status RunProducer(const ClientJob& job, Row& row) {
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  client::Session& session = connected.session;
  ASSIGN_OR_RETURN(OnesProduct product, OnesProduct::Make(session, 512, 512, 2048));
  ASSIGN_OR_RETURN(const auto plain, AllocatePlain(product.a_bytes()));
  ASSIGN_OR_RETURN(const auto vmm, AllocateVmm(product.a_bytes()));
  ASSIGN_OR_RETURN(const client::Buffer handle, session.ImportDevice(plain->data()));
  ASSIGN_OR_RETURN(const client::Buffer descriptor, session.ImportDevice(vmm->data()));
  ASSIGN_OR_RETURN(const client::Buffer daemons, session.AllocateOnDevice(product.a_bytes()));
  RETURN_IF_ERROR(Produce(session, product, handle, "handle", row));
  RETURN_IF_ERROR(Produce(session, product, descriptor, "descriptor", row));
  return Produce(session, product, daemons, "daemon-owned", row);
}

using Job = absl::Status (*)(const ClientJob& job, Row& row);

const std::map<std::string, Job, std::less<>>& Jobs() {
  static const std::map<std::string, Job, std::less<>> jobs = {
      {"import-cycles", RunImportCycles},
      {"reused-address", RunReusedAddress},
      {"released-running", RunReleasedRunning},
      {"sub-buffers", RunSubBuffers},
      {"shared", RunShared},
      {"order", RunOrder},
      {"guest", RunGuest},
      {"producer", RunProducer},
  };
  return jobs;
}

}  // namespace

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void CheckOk(Row& row, const std::string& what, const absl::Status& status) {
  row.Check(status.ok(), absl::StrCat(what, ": ", status.ToString()));
}

void CheckRight(Row& row, const std::string& what, const std::string& wrong) {
  row.Check(wrong.empty(), absl::StrCat(what, ": ", wrong));
}

absl::StatusOr<std::unique_ptr<DeviceAllocation>> AllocateAt(const std::byte* address, std::size_t bytes) {
  constexpr int kTries = 8;
  std::vector<std::unique_ptr<DeviceAllocation>> others;
  for (int i = 0; i < kTries; ++i) {
    ASSIGN_OR_RETURN(auto memory, AllocatePlain(bytes));
    if (memory->data() == address) return memory;
    others.push_back(std::move(memory));
  }
  return nullptr;
}

absl::StatusOr<std::vector<std::byte>> BytesOf(const DeviceAllocation& memory) {
  std::vector<std::byte> bytes(memory.bytes());
  RETURN_IF_ERROR(CopyOut(bytes.data(), memory.data(), bytes.size()));
  return bytes;
}

bool IsLifetimeJob(std::string_view job) {
  return Jobs().contains(job);
}

absl::StatusOr<std::vector<Row>> RunLifetimeJob(const ClientJob& job) {
  Row row{.environment = {}, .route = job.job};
  const absl::Status status = Jobs().at(job.job)(job, row);
  if (!status.ok()) row.Check(false, Text(status));
  return std::vector<Row>{row};
}

}  // namespace tessera::gpu_test
