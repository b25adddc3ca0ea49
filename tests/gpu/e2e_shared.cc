// A buffer that another process uses, and that process.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "common/status_macros.h"
#include "tests/gpu/e2e_board.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/e2e_process.h"
#include "tests/gpu/e2e_product.h"

namespace tessera::gpu_test {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kSharedExtent = 128;  // of M, N and K
constexpr float kOwnersNumber = 7;
constexpr float kGuestsNumber = 11;

client::TensorView SharedView(const std::string& buffer_id) {
  return {.buffer_id = buffer_id,
          .dtype = DType::kBf16,
          .shape = {kSharedExtent, kSharedExtent},
          .strides = client::PackedStrides({kSharedExtent, kSharedExtent})};
}

// The process that owns nothing of what it uses. Steps: 1 not shared, 2 for reading, 3 for writing, 4 no longer,
// 5 released.
class Guest {
 public:
  Guest(Row& row, Board board, Connected connected, OnesProduct product, client::Buffer own)
      : row_(row),
        board_(std::move(board)),
        connected_(std::move(connected)),
        product_(std::move(product)),
        own_(std::move(own)) {}

  absl::Status Run() {
    const std::vector<std::byte> numbers = Repeated(kGuestsNumber, product_.a_bytes());
    RETURN_IF_ERROR(own_.Upload(numbers.data(), numbers.size()));
    for (std::uint64_t step = 1; step <= 5; ++step) {
      if (!Soon([&] { return board_->asked >= step; })) return absl::DeadlineExceededError("the owner says nothing");
      for (const auto& bytes : board_->buffer_ids) TryStep(step, std::string(bytes.begin(), bytes.end()));
      board_->reached = step;
    }
    return absl::OkStatus();
  }

 private:
  void TryStep(std::uint64_t step, const std::string& id) {
    const client::TensorView view = SharedView(id);
    const std::string name = absl::StrCat("step ", step);
    if (step == 1 || step == 4) {
      Refused(name + " read", product_.Call(connected_.session, view), absl::StatusCode::kPermissionDenied);
      Refused(name + " write", Write(view), absl::StatusCode::kPermissionDenied);
    } else if (step == 5) {
      Refused(name + " read", product_.Call(connected_.session, view), absl::StatusCode::kNotFound);
    } else if (step == 2) {
      CheckRight(row_, "shared for reading", product_.Run(connected_.session, view, kOwnersNumber));
      Refused(name + " write", Write(view), absl::StatusCode::kPermissionDenied);
    } else {
      CheckRight(row_, "shared for writing, read", product_.Run(connected_.session, view, kOwnersNumber));
      CheckOk(row_, "shared for writing", Write(view));
    }
  }

  absl::Status Write(const client::TensorView& d) {
    return connected_.session
        .Gemm({.a = product_.a_view(own_), .b = product_.b_view(), .d = d, .backend = v1::BACKEND_CUDA})
        .status();
  }

  void Refused(const std::string& what, const absl::Status& status, absl::StatusCode code) {
    CheckRefused(row_, what, status, code, {"op."});
  }

  Row& row_;
  Board board_;
  Connected connected_;
  OnesProduct product_;
  client::Buffer own_;
};

// What the guest writes into the owner's memory is there.
void CheckOwnersBytes(Row& row, float number, const DeviceAllocation& plain, const client::Buffer& allocated) {
  std::vector<std::byte> bytes(kSharedExtent * kSharedExtent * kBf16Bytes);
  absl::Status status = CopyOut(bytes.data(), plain.data(), bytes.size());
  CheckRight(row, "the owner's own memory", status.ok() ? WrongNumbers(bytes, number) : Text(status));
  status = allocated.Download(bytes.data(), bytes.size());
  CheckRight(row, "the owner's buffer", status.ok() ? WrongNumbers(bytes, number) : Text(status));
}

}  // namespace

absl::Status RunGuest(const ClientJob& job, Row& row) {
  ASSIGN_OR_RETURN(Board board, Board::Open(job.board));
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(OnesProduct product,
                   OnesProduct::Make(connected.session, kSharedExtent, kSharedExtent, kSharedExtent));
  ASSIGN_OR_RETURN(client::Buffer own, connected.session.AllocateOnDevice(product.a_bytes()));
  return Guest(row, std::move(board), std::move(connected), std::move(product), std::move(own)).Run();
}

absl::Status RunShared(const ClientJob& job, Row& row) {
  constexpr std::uint64_t kBytes = kSharedExtent * kSharedExtent * kBf16Bytes;
  ASSIGN_OR_RETURN(Connected connected, Connect(job));
  ASSIGN_OR_RETURN(const auto plain, AllocatePlain(kBytes));
  const std::vector<std::byte> numbers = Repeated(kOwnersNumber, kBytes);
  RETURN_IF_ERROR(CopyIn(plain->data(), numbers.data(), kBytes));
  std::vector<client::Buffer> buffers;
  ASSIGN_OR_RETURN(client::Buffer imported, connected.session.ImportDevice(plain->data()));
  ASSIGN_OR_RETURN(client::Buffer allocated, connected.session.AllocateOnDevice(kBytes));
  RETURN_IF_ERROR(allocated.Upload(numbers.data(), kBytes));
  buffers.push_back(std::move(imported));
  buffers.push_back(std::move(allocated));

  const std::string path = job.result + ".board";
  const std::string result = job.result + ".guest";
  ASSIGN_OR_RETURN(Board board, Board::Make(path));
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].id().size() != board->buffer_ids[i].size()) return absl::InternalError("an id of another size");
    std::copy(buffers[i].id().begin(), buffers[i].id().end(), board->buffer_ids[i].begin());
  }
  ASSIGN_OR_RETURN(Process guest, Process::Start({.command = {SelfPath(), "--client", "guest", "--socket", job.socket,
                                                              "--result", result, "--board", path},
                                                  .environment = {},
                                                  .log = result + ".log"}));
  const auto step = [&](std::uint64_t number) -> absl::Status {
    board->asked = number;
    Soon([&] { return board->reached >= number || !guest.running(); });
    if (board->reached >= number) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("the guest did not take step ", number, ": ", guest.LogTail()));
  };
  const auto share = [&](v1::BufferAccess access) {
    for (client::Buffer& buffer : buffers) CheckOk(row, "ShareBuffer", buffer.Share(access));
  };
  RETURN_IF_ERROR(step(1));
  share(v1::BUFFER_ACCESS_READ);
  RETURN_IF_ERROR(step(2));
  CheckOwnersBytes(row, kOwnersNumber, *plain, buffers[1]);
  share(v1::BUFFER_ACCESS_READ_WRITE);
  RETURN_IF_ERROR(step(3));
  CheckOwnersBytes(row, kGuestsNumber * kSharedExtent, *plain, buffers[1]);
  share(v1::BUFFER_ACCESS_NONE);
  RETURN_IF_ERROR(step(4));
  CheckOwnersBytes(row, kGuestsNumber * kSharedExtent, *plain, buffers[1]);
  for (client::Buffer& buffer : buffers) CheckOk(row, "release", buffer.Release());
  RETURN_IF_ERROR(step(5));

  const std::optional<int> code = guest.Wait(std::chrono::seconds(20));
  std::ifstream file(result);
  const Json answer = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (code != 0 || !answer.is_array()) return absl::InternalError("the guest did not end well: " + guest.LogTail());
  for (const Row& guests : answer.get<std::vector<Row>>()) {
    row.cases += guests.cases;
    row.failed += guests.failed;
    if (!guests.detail.empty()) row.Remark("guest: " + guests.detail);
  }
  return absl::OkStatus();
}

}  // namespace tessera::gpu_test
