#include "tests/gpu/e2e_hostile.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cuda_memory.h"
#include "common/fd_message.h"
#include "common/paths.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tessera/v1/side_channel.pb.h"
#include "tests/gpu/e2e_memory.h"

namespace tessera::gpu_test {
namespace {

using namespace std::chrono_literals;
using grpc::StatusCode;

constexpr std::uint64_t kBytes = std::uint64_t{4} << 20U;

// A session by hand: the side connection that is its lease, and calls with its token.
class Intruder {
 public:
  static absl::StatusOr<Intruder> Enter(const std::string& socket) {
    Intruder intruder;
    ASSIGN_OR_RETURN(intruder.side_, ConnectSeqpacket(SideChannelPath(socket)));
    ASSIGN_OR_RETURN(const v1::SideReply welcome, intruder.Receive());
    intruder.memory_ = v1::Memory::NewStub(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
    v1::OpenSessionRequest request;
    request.set_lease(welcome.welcome().lease());
    v1::OpenSessionReply reply;
    grpc::ClientContext context;
    if (const grpc::Status status = intruder.memory_->OpenSession(&context, request, &reply); !status.ok()) {
      return absl::InternalError(absl::StrCat("OpenSession: ", status.error_message()));
    }
    intruder.token_ = reply.token();
    return intruder;
  }

  // The ticket of a descriptor that was passed on.
  absl::StatusOr<std::uint64_t> Pass(int fd) {
    v1::SideRequest request;
    request.mutable_pass_descriptor();
    RETURN_IF_ERROR(SendFdMessage(side_.get(), request.SerializeAsString(), fd));
    ASSIGN_OR_RETURN(const v1::SideReply reply, Receive());
    if (!reply.has_descriptor_accepted()) return absl::InternalError("a descriptor was not taken");
    return reply.descriptor_accepted().ticket();
  }

  grpc::Status Import(const v1::ImportBufferRequest& request) {
    grpc::ClientContext context;
    context.AddMetadata("tessera-session-bin", token_);
    context.set_deadline(std::chrono::system_clock::now() + 20s);
    v1::ImportBufferReply reply;
    return memory_->ImportBuffer(&context, request, &reply);
  }

 private:
  absl::StatusOr<v1::SideReply> Receive() {
    ASSIGN_OR_RETURN(const FdMessage message, ReceiveFdMessage(side_.get()));
    v1::SideReply reply;
    if (!reply.ParseFromString(message.bytes)) return absl::InternalError("the side channel's answer cannot be read");
    return reply;
  }

  UniqueFd side_;
  std::unique_ptr<v1::Memory::Stub> memory_;
  std::string token_;
};

void ExpectRefused(Row& row, const std::string& what, const grpc::Status& status, StatusCode code) {
  row.Check(status.error_code() == code && !status.error_message().empty(),
            absl::StrCat(what, ": ", static_cast<int>(status.error_code()), " ", status.error_message()));
}

v1::ImportBufferRequest WithHandle(const client::ExportedMemory& memory, const std::string& handle) {
  v1::ImportBufferRequest request;
  v1::CudaIpcHandle& ipc = *request.mutable_cuda_ipc_handle();
  ipc.set_handle(handle);
  ipc.set_device_uuid(memory.device_uuid);
  ipc.set_allocation_id(memory.allocation_id);
  ipc.set_exporter_pid(::getpid());
  return request;
}

absl::Status TryHandleOfFreedMemory(const client::CudaDriver& driver, Intruder& intruder, Row& row) {
  ASSIGN_OR_RETURN(auto plain, AllocatePlain(kBytes));
  ASSIGN_OR_RETURN(const client::ExportedMemory memory, client::ExportMemory(driver, plain->data(), kBytes));
  plain.reset();
  const v1::ImportBufferRequest request = WithHandle(memory, std::get<client::LegacyRoute>(memory.route).handle);
  ExpectRefused(row, "memory that is gone", intruder.Import(request), StatusCode::INVALID_ARGUMENT);
  return absl::OkStatus();
}

absl::Status TryHandles(const client::CudaDriver& driver, Intruder& intruder, Row& row) {
  ASSIGN_OR_RETURN(const auto plain, AllocatePlain(kBytes));
  ASSIGN_OR_RETURN(const client::ExportedMemory memory, client::ExportMemory(driver, plain->data(), kBytes));
  const std::string handle = std::get<client::LegacyRoute>(memory.route).handle;
  for (const auto& [what, bytes] : {std::pair{"a handle of zeros", std::string(64, '\0')},
                                    std::pair{"a handle of ones", std::string(64, '\xff')}}) {
    ExpectRefused(row, what, intruder.Import(WithHandle(memory, bytes)), StatusCode::INVALID_ARGUMENT);
  }
  for (std::size_t at = 0; at < handle.size(); at += 7) {  // whatever a byte of it means
    std::string damaged = handle;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x55);
    const grpc::Status status = intruder.Import(WithHandle(memory, damaged));
    row.Check(status.error_code() != StatusCode::UNAVAILABLE && status.error_code() != StatusCode::INTERNAL &&
                  status.error_code() != StatusCode::DEADLINE_EXCEEDED,
              absl::StrCat("byte ", at, " damaged: ", status.error_message()));
  }
  ExpectRefused(row, "a short handle", intruder.Import(WithHandle(memory, "short")), StatusCode::INVALID_ARGUMENT);
  v1::ImportBufferRequest request = WithHandle(memory, handle);
  request.set_byte_offset(kBytes);
  request.set_bytes(1);
  ExpectRefused(row, "a byte past the allocation", intruder.Import(request), StatusCode::INVALID_ARGUMENT);
  request.set_byte_offset(~std::uint64_t{0} - 7);
  request.set_bytes(16);
  ExpectRefused(row, "an offset that wraps around", intruder.Import(request), StatusCode::INVALID_ARGUMENT);
  request = WithHandle(memory, handle);
  request.mutable_cuda_ipc_handle()->set_device_uuid("GPU-00000000-0000-0000-0000-000000000000");
  ExpectRefused(row, "another GPU", intruder.Import(request), StatusCode::INVALID_ARGUMENT);
  request.mutable_cuda_ipc_handle()->set_device_uuid("MIG-00000000-0000-0000-0000-000000000000");
  ExpectRefused(row, "a MIG instance", intruder.Import(request), StatusCode::UNIMPLEMENTED);
  return absl::OkStatus();
}

absl::StatusOr<v1::ImportBufferRequest> WithDescriptor(Intruder& intruder, int fd, const std::string& uuid,
                                                       std::uint64_t bytes) {
  v1::ImportBufferRequest request;
  ASSIGN_OR_RETURN(const std::uint64_t ticket, intruder.Pass(fd));
  request.set_descriptor_ticket(ticket);
  request.mutable_cuda_descriptor()->set_device_uuid(uuid);
  request.mutable_cuda_descriptor()->set_allocation_bytes(bytes);
  request.mutable_cuda_descriptor()->set_allocation_id(1);
  return request;
}

absl::Status TryDescriptors(const client::CudaDriver& driver, Intruder& intruder, Row& row) {
  ASSIGN_OR_RETURN(const auto allocation, AllocateVmm(kBytes));
  ASSIGN_OR_RETURN(const client::ExportedMemory memory, client::ExportMemory(driver, allocation->data(), kBytes));
  const auto& route = std::get<client::DescriptorRoute>(memory.route);
  const auto refused = [&](const std::string& what, int fd, std::uint64_t bytes) -> absl::Status {
    ASSIGN_OR_RETURN(const v1::ImportBufferRequest request, WithDescriptor(intruder, fd, memory.device_uuid, bytes));
    ExpectRefused(row, what, intruder.Import(request), StatusCode::INVALID_ARGUMENT);
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(refused("twice the allocation's size", route.fd.get(), 2 * route.allocation_bytes));
  RETURN_IF_ERROR(refused("a size of no whole pages", route.fd.get(), route.allocation_bytes - 1));
  const UniqueFd memfd(::memfd_create("intruder", MFD_CLOEXEC));
  RETURN_IF_ERROR(refused("a memfd as GPU memory", memfd.get(), kBytes));
  for (const char* path : {"/dev/null", "/dev/zero", "/dev/nvidiactl", "/dev/nvidia0"}) {
    const UniqueFd device(::open(path, O_RDWR | O_CLOEXEC));
    if (!device) continue;
    RETURN_IF_ERROR(refused(path, device.get(), kBytes));
  }
  // The right one still gets in after all that.
  ASSIGN_OR_RETURN(const v1::ImportBufferRequest request,
                   WithDescriptor(intruder, route.fd.get(), memory.device_uuid, route.allocation_bytes));
  const grpc::Status right = intruder.Import(request);
  row.Check(right.ok(), absl::StrCat("the right descriptor: ", right.error_message()));
  return absl::OkStatus();
}

}  // namespace

absl::Status TryHostileImports(const std::string& socket, Row& row) {
  const absl::StatusOr<client::CudaDriver>& driver = client::CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  ASSIGN_OR_RETURN(Intruder intruder, Intruder::Enter(socket));
  RETURN_IF_ERROR(TryHandleOfFreedMemory(*driver, intruder, row));
  RETURN_IF_ERROR(TryHandles(*driver, intruder, row));
  return TryDescriptors(*driver, intruder, row);
}

}  // namespace tessera::gpu_test
