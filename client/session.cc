// Session and Buffer: memory, descriptors and calls.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/core.h"
#include "client/cuda_memory.h"
#include "client/host_mapping.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client {
namespace {

absl::Status ReleaseId(SessionCore& session, const std::string& buffer_id) {
  grpc::ClientContext context;
  session.Prepare(context, session.client->options.timeout);
  v1::ReleaseBufferRequest request;
  request.set_buffer_id(buffer_id);
  v1::ReleaseBufferReply reply;
  return FromUnaryCall(session.client->memory->ReleaseBuffer(&context, request, &reply));
}

constexpr char kHost[] = "host";

// Whether a space is a GPU's; a daemon that names none has the host's only.
bool OnDevice(const std::string& space) {
  return !space.empty() && space != kHost;
}

// What keeps a buffer's memory in this process: the first is for a pointer of the caller's.
using Memory = std::variant<std::monostate, HostMapping, MappedAllocation>;

std::byte* DataOf(const Memory& memory) {
  if (const auto* mapping = std::get_if<HostMapping>(&memory); mapping != nullptr) return mapping->data();
  if (const auto* mapped = std::get_if<MappedAllocation>(&memory); mapped != nullptr) return mapped->data();
  return nullptr;
}

// The memory of a buffer that the daemon has just allocated.
absl::StatusOr<Memory> MapAllocated(SessionCore& session, const std::string& buffer_id) {
  v1::SideRequest fetch;
  fetch.mutable_fetch_descriptor()->set_buffer_id(buffer_id);
  ASSIGN_OR_RETURN(SideChannel::Reply fetched, session.CallSideChannel(fetch));
  if (!fetched.fd) return absl::InternalError("side channel: the daemon sent no descriptor");
  const auto& passed = fetched.message.descriptor_passed();
  if (!OnDevice(passed.space())) {
    ASSIGN_OR_RETURN(HostMapping mapping, HostMapping::Map(fetched.fd.get(), passed.byte_offset(), passed.bytes()));
    return mapping;
  }
  const absl::StatusOr<CudaDriver>& driver = CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  ASSIGN_OR_RETURN(MappedAllocation mapped,
                   MappedAllocation::Map(*driver, passed.space(), std::move(fetched.fd), passed.allocation_bytes()));
  return mapped;
}

// A ticket for ImportBuffer; `fd` stays the caller's.
absl::StatusOr<std::uint64_t> PassDescriptor(SessionCore& session, int fd) {
  v1::SideRequest pass;
  pass.mutable_pass_descriptor();
  ASSIGN_OR_RETURN(const SideChannel::Reply accepted, session.CallSideChannel(pass, fd));
  return accepted.message.descriptor_accepted().ticket();
}

absl::StatusOr<v1::ImportBufferReply> CallImport(SessionCore& session, const v1::ImportBufferRequest& request) {
  grpc::ClientContext context;
  session.Prepare(context, session.client->options.timeout);
  v1::ImportBufferReply reply;
  RETURN_IF_ERROR(FromUnaryCall(session.client->memory->ImportBuffer(&context, request, &reply)));
  return reply;
}

absl::Status CheckRange(std::uint64_t size, std::uint64_t byte_offset, std::uint64_t bytes) {
  if (byte_offset <= size && bytes <= size - byte_offset) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(bytes, " bytes at byte_offset ", byte_offset, "; the buffer has ", size));
}

}  // namespace

struct Buffer::State {
  std::shared_ptr<SessionCore> session;
  std::string id;
  std::uint64_t bytes = 0;
  std::string space;
  std::byte* data = nullptr;
  Memory memory;

  static Buffer Make(std::shared_ptr<SessionCore> session, const std::string& id, std::uint64_t bytes,
                     const std::string& space, std::byte* data, Memory memory) {
    return Buffer(std::make_unique<State>(State{.session = std::move(session),
                                                .id = id,
                                                .bytes = bytes,
                                                .space = space.empty() ? kHost : space,
                                                .data = data,
                                                .memory = std::move(memory)}));
  }

  // Memory that the daemon allocates in `space`, mapped here.
  static absl::StatusOr<Buffer> Allocate(const std::shared_ptr<SessionCore>& session, std::uint64_t bytes,
                                         std::string_view space);
};

Buffer::Buffer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Buffer::Buffer(Buffer&&) noexcept = default;

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    Release().IgnoreError();  // a destructor has nobody to tell; Release() is there for those who ask
    state_ = std::move(other.state_);
  }
  return *this;
}

Buffer::~Buffer() {
  Release().IgnoreError();
}

std::byte* Buffer::data() const {
  return state_->data;
}
std::uint64_t Buffer::bytes() const {
  return state_->bytes;
}
const std::string& Buffer::id() const {
  return state_->id;
}

const std::string& Buffer::space() const {
  return state_->space;
}
bool Buffer::on_device() const {
  return OnDevice(state_->space);
}

absl::Status Buffer::Upload(const void* from, std::uint64_t bytes, std::uint64_t byte_offset) {
  RETURN_IF_ERROR(CheckRange(state_->bytes, byte_offset, bytes));
  if (bytes == 0) return absl::OkStatus();
  std::byte* const to = data() + byte_offset;
  if (!on_device()) {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  const absl::StatusOr<CudaDriver>& driver = CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  return CopyToDevice(*driver, state_->space, to, from, bytes);
}

absl::Status Buffer::Download(void* to, std::uint64_t bytes, std::uint64_t byte_offset) const {
  RETURN_IF_ERROR(CheckRange(state_->bytes, byte_offset, bytes));
  if (bytes == 0) return absl::OkStatus();
  const std::byte* const from = data() + byte_offset;
  if (!on_device()) {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  const absl::StatusOr<CudaDriver>& driver = CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  return CopyToHost(*driver, state_->space, to, from, bytes);
}

TensorView Buffer::Tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t byte_offset,
                          std::vector<std::int64_t> strides) const {
  if (strides.empty()) strides = PackedStrides(shape);
  return {.buffer_id = state_->id,
          .data = data() + byte_offset,
          .byte_offset = byte_offset,
          .dtype = dtype,
          .shape = std::move(shape),
          .strides = std::move(strides)};
}

absl::Status Buffer::Share(v1::BufferAccess access, std::string_view principal) {
  grpc::ClientContext context;
  state_->session->Prepare(context, state_->session->client->options.timeout);
  v1::ShareBufferRequest request;
  request.set_buffer_id(state_->id);
  request.set_principal(std::string(principal));
  request.set_access(access);
  v1::ShareBufferReply reply;
  return FromUnaryCall(state_->session->client->memory->ShareBuffer(&context, request, &reply));
}

absl::Status Buffer::Release() {
  if (state_ == nullptr) return absl::OkStatus();
  const std::unique_ptr<State> state = std::move(state_);
  return ReleaseId(*state->session, state->id);
}

Session::Session(std::shared_ptr<SessionCore> core) : core_(std::move(core)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

const std::string& Session::token() const {
  return core_->token;
}

absl::StatusOr<Buffer> Buffer::State::Allocate(const std::shared_ptr<SessionCore>& session, std::uint64_t bytes,
                                               std::string_view space) {
  RETURN_IF_ERROR(session->CheckSideChannel());  // before the daemon allocates what could not be mapped
  grpc::ClientContext context;
  session->Prepare(context, session->client->options.timeout);
  v1::AllocateBufferRequest request;
  request.set_bytes(bytes);
  request.set_space(std::string(space));
  v1::AllocateBufferReply reply;
  RETURN_IF_ERROR(FromUnaryCall(session->client->memory->AllocateBuffer(&context, request, &reply)));

  absl::StatusOr<Memory> memory = MapAllocated(*session, reply.buffer_id());
  if (!memory.ok()) {
    ReleaseId(*session, reply.buffer_id()).IgnoreError();  // the mapping's error is the one to tell
    return memory.status();
  }
  std::byte* const data = DataOf(*memory);
  return Make(session, reply.buffer_id(), reply.bytes(), reply.space(), data, *std::move(memory));
}

absl::StatusOr<Buffer> Session::Allocate(std::uint64_t bytes) {
  return Buffer::State::Allocate(core_, bytes, kHost);
}

absl::StatusOr<Buffer> Session::AllocateOnDevice(std::uint64_t bytes, std::string_view gpu) {
  RETURN_IF_ERROR(CudaDriver::Get().status());  // before the daemon allocates what could not be mapped
  return Buffer::State::Allocate(core_, bytes, gpu);
}

absl::StatusOr<Buffer> Session::ImportDevice(void* device_pointer, std::uint64_t bytes) {
  const absl::StatusOr<CudaDriver>& driver = CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  ASSIGN_OR_RETURN(const ExportedMemory memory, ExportMemory(*driver, device_pointer, bytes));
  v1::ImportBufferRequest request;
  request.set_byte_offset(memory.byte_offset);
  request.set_bytes(memory.bytes);
  std::string_view route = "handle route";
  if (const auto* legacy = std::get_if<LegacyRoute>(&memory.route); legacy != nullptr) {
    v1::CudaIpcHandle& handle = *request.mutable_cuda_ipc_handle();
    handle.set_handle(legacy->handle);
    handle.set_device_uuid(memory.device_uuid);
    handle.set_allocation_id(memory.allocation_id);
    handle.set_exporter_pid(::getpid());
  } else {
    const auto& allocation = std::get<DescriptorRoute>(memory.route);
    route = "descriptor route";
    ASSIGN_OR_RETURN(const std::uint64_t ticket, PassDescriptor(*core_, allocation.fd.get()));
    request.set_descriptor_ticket(ticket);
    v1::CudaDescriptor& descriptor = *request.mutable_cuda_descriptor();
    descriptor.set_device_uuid(memory.device_uuid);
    descriptor.set_allocation_id(memory.allocation_id);
    descriptor.set_allocation_bytes(allocation.allocation_bytes);
  }
  const absl::StatusOr<v1::ImportBufferReply> reply = CallImport(*core_, request);
  if (!reply.ok()) return InField(route, reply.status());
  return Buffer::State::Make(core_, reply->buffer_id(), reply->bytes(), reply->space(),
                             static_cast<std::byte*>(device_pointer), std::monostate());
}

absl::StatusOr<Buffer> Session::Share(std::uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: must be at least 1");
  const UniqueFd memfd(::memfd_create("tessera-client", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd) return ErrnoStatus(absl::StatusCode::kResourceExhausted, "memfd_create");
  if (::ftruncate(memfd.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return ErrnoStatus(absl::StatusCode::kResourceExhausted, absl::StrCat("memory of ", bytes, " bytes"));
  }
  return Import(memfd.get());
}

absl::StatusOr<Buffer> Session::Import(int memfd, std::uint64_t byte_offset, std::uint64_t bytes) {
  ASSIGN_OR_RETURN(const std::uint64_t ticket, PassDescriptor(*core_, memfd));
  v1::ImportBufferRequest request;
  request.set_descriptor_ticket(ticket);
  request.set_byte_offset(byte_offset);
  request.set_bytes(bytes);
  ASSIGN_OR_RETURN(const v1::ImportBufferReply reply, CallImport(*core_, request));
  absl::StatusOr<HostMapping> mapping = HostMapping::Map(memfd, byte_offset, reply.bytes());
  if (!mapping.ok()) {
    ReleaseId(*core_, reply.buffer_id()).IgnoreError();
    return mapping.status();
  }
  std::byte* const data = mapping->data();
  return Buffer::State::Make(core_, reply.buffer_id(), reply.bytes(), reply.space(), data, *std::move(mapping));
}

absl::StatusOr<std::chrono::milliseconds> Session::KeepAlive() {
  grpc::ClientContext context;
  core_->Prepare(context, core_->client->options.timeout);
  v1::KeepAliveReply reply;
  RETURN_IF_ERROR(FromUnaryCall(core_->client->memory->KeepAlive(&context, v1::KeepAliveRequest(), &reply)));
  return std::chrono::milliseconds(static_cast<std::int64_t>(reply.ttl_ms()));
}

absl::Status Session::Close() {
  grpc::ClientContext context;
  core_->Prepare(context, core_->client->options.timeout);
  v1::CloseSessionReply reply;
  return FromUnaryCall(core_->client->memory->CloseSession(&context, v1::CloseSessionRequest(), &reply));
}

}  // namespace tessera::client
