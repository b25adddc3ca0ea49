// Session and Buffer: memory, descriptors and calls.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/core.h"
#include "common/status_macros.h"
#include "common/text.h"

namespace tessera::client {
namespace {

// A shared mapping of part of a memfd; offsets need not be page-aligned.
class Mapping {
 public:
  static absl::StatusOr<Mapping> Map(int fd, std::uint64_t byte_offset, std::uint64_t bytes) {
    const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t lead = byte_offset % page_bytes;
    void* start =
        ::mmap(nullptr, bytes + lead, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(byte_offset - lead));
    if (start == MAP_FAILED) {
      return ErrnoStatus(absl::StatusCode::kResourceExhausted, absl::StrCat("mapping ", bytes, " bytes"));
    }
    return Mapping(start, bytes + lead, lead);
  }

  Mapping(Mapping&& other) noexcept
      : start_(std::exchange(other.start_, nullptr)), bytes_(other.bytes_), lead_(other.lead_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (start_ != nullptr) ::munmap(start_, bytes_);
  }

  std::byte* data() const { return static_cast<std::byte*>(start_) + lead_; }

 private:
  Mapping(void* start, std::uint64_t bytes, std::uint64_t lead) : start_(start), bytes_(bytes), lead_(lead) {}
  void* start_;
  std::uint64_t bytes_;
  std::uint64_t lead_;
};

absl::Status ReleaseId(SessionCore& session, const std::string& buffer_id) {
  grpc::ClientContext context;
  session.Prepare(context, session.client->options.timeout);
  v1::ReleaseBufferRequest request;
  request.set_buffer_id(buffer_id);
  v1::ReleaseBufferReply reply;
  return FromGrpc(session.client->memory->ReleaseBuffer(&context, request, &reply));
}

// The memory of a buffer that the daemon has just allocated.
absl::StatusOr<Mapping> MapAllocated(SessionCore& session, const std::string& buffer_id) {
  v1::SideRequest fetch;
  fetch.mutable_fetch_descriptor()->set_buffer_id(buffer_id);
  ASSIGN_OR_RETURN(SideChannel::Reply fetched, session.side_channel->Call(fetch));
  if (!fetched.fd) return absl::InternalError("side channel: the daemon sent no descriptor");
  const auto& passed = fetched.message.descriptor_passed();
  return Mapping::Map(fetched.fd.get(), passed.byte_offset(), passed.bytes());
}

}  // namespace

struct Buffer::State {
  std::shared_ptr<SessionCore> session;
  std::string id;
  std::uint64_t bytes = 0;
  Mapping mapping;
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
  return state_->mapping.data();
}
std::uint64_t Buffer::bytes() const {
  return state_->bytes;
}
const std::string& Buffer::id() const {
  return state_->id;
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

absl::StatusOr<Buffer> Session::Allocate(std::uint64_t bytes) {
  grpc::ClientContext context;
  core_->Prepare(context, core_->client->options.timeout);
  v1::AllocateBufferRequest request;
  request.set_bytes(bytes);
  v1::AllocateBufferReply reply;
  RETURN_IF_ERROR(FromGrpc(core_->client->memory->AllocateBuffer(&context, request, &reply)));

  absl::StatusOr<Mapping> mapping = MapAllocated(*core_, reply.buffer_id());
  if (!mapping.ok()) {
    ReleaseId(*core_, reply.buffer_id()).IgnoreError();  // the mapping's error is the one to tell
    return mapping.status();
  }
  return Buffer(std::make_unique<Buffer::State>(Buffer::State{
      .session = core_, .id = reply.buffer_id(), .bytes = reply.bytes(), .mapping = *std::move(mapping)}));
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
  v1::SideRequest pass;
  pass.mutable_pass_descriptor();
  ASSIGN_OR_RETURN(SideChannel::Reply accepted, core_->side_channel->Call(pass, memfd));

  grpc::ClientContext context;
  core_->Prepare(context, core_->client->options.timeout);
  v1::ImportBufferRequest request;
  request.set_descriptor_ticket(accepted.message.descriptor_accepted().ticket());
  request.set_byte_offset(byte_offset);
  request.set_bytes(bytes);
  v1::ImportBufferReply reply;
  RETURN_IF_ERROR(FromGrpc(core_->client->memory->ImportBuffer(&context, request, &reply)));
  absl::StatusOr<Mapping> mapping = Mapping::Map(memfd, byte_offset, reply.bytes());
  if (!mapping.ok()) {
    ReleaseId(*core_, reply.buffer_id()).IgnoreError();
    return mapping.status();
  }
  return Buffer(std::make_unique<Buffer::State>(Buffer::State{
      .session = core_, .id = reply.buffer_id(), .bytes = reply.bytes(), .mapping = *std::move(mapping)}));
}

absl::Status Session::Close() {
  grpc::ClientContext context;
  core_->Prepare(context, core_->client->options.timeout);
  v1::CloseSessionReply reply;
  return FromGrpc(core_->client->memory->CloseSession(&context, v1::CloseSessionRequest(), &reply));
}

}  // namespace tessera::client
