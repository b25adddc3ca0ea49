#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/cuda_memory.h"
#include "common/status_macros.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/e2e_product.h"

namespace tessera::gpu_test {
namespace {

absl::StatusOr<std::string> HandleOf(const DeviceAllocation& memory) {
  const absl::StatusOr<client::CudaDriver>& driver = client::CudaDriver::Get();
  RETURN_IF_ERROR(driver.status());
  ASSIGN_OR_RETURN(const client::ExportedMemory exported, client::ExportMemory(*driver, memory.data(), 0));
  const auto* const route = std::get_if<client::LegacyRoute>(&exported.route);
  if (route == nullptr) return absl::InternalError("memory of cudaMalloc has no handle");
  return route->handle;
}

class ReusedAddress {
 public:
  ReusedAddress(Row& row, Connected first, Connected second, OnesProduct first_product, OnesProduct second_product)
      : row_(row),
        sessions_{std::move(first), std::move(second)},
        products_{std::move(first_product), std::move(second_product)} {}

  // Imported, used, released, freed, again and again at the same address: by sessions in turns, each of which sees
  // what the other one had imported.
  absl::Status InOrder(std::size_t bytes, int rounds) {
    std::byte* address = nullptr;
    std::string handle;
    int same_addresses = 0;
    int same_handles = 0;
    for (int round = 0; round < rounds; ++round) {
      ASSIGN_OR_RETURN(auto memory, AllocateAt(address, bytes));
      if (memory != nullptr) {
        ++same_addresses;
      } else {
        ASSIGN_OR_RETURN(memory, AllocatePlain(bytes));
      }
      address = memory->data();
      ASSIGN_OR_RETURN(std::string now, HandleOf(*memory));
      if (now == handle) ++same_handles;
      handle = std::move(now);
      const auto number = static_cast<float>(1 + round);
      RETURN_IF_ERROR(Fill(*memory, number));
      const std::size_t who = static_cast<std::size_t>(round) / 2 % 2;  // each after itself and after the other
      const std::string what = absl::StrCat("round ", round, " of ", bytes, " bytes");
      ASSIGN_OR_RETURN(client::Buffer buffer, sessions_[who].session.ImportDevice(memory->data()));
      CheckRight(row_, what, See(who, buffer, number));
      CheckOk(row_, what + ", release", buffer.Release());
    }
    row_.Check(same_addresses >= rounds / 4, absl::StrCat("the address came back only ", same_addresses, " times of ",
                                                          rounds, ": nothing was tried"));
    row_.Remark(absl::StrCat(bytes, " bytes: ", same_addresses, " same addresses and ", same_handles,
                             " same handles in ", rounds, " rounds"));
    return absl::OkStatus();
  }

  // Freed while the daemon has it: what comes to its address is not taken for it, whoever imports that.
  absl::Status FreedWhileImported(std::size_t bytes) {
    ASSIGN_OR_RETURN(auto old_memory, AllocatePlain(bytes));
    std::byte* const address = old_memory->data();
    RETURN_IF_ERROR(Fill(*old_memory, 3));
    ASSIGN_OR_RETURN(const std::string old_handle, HandleOf(*old_memory));
    ASSIGN_OR_RETURN(client::Buffer old_buffer, sessions_[0].session.ImportDevice(address));
    CheckRight(row_, "before it is freed", See(0, old_buffer, 3));
    old_memory.reset();
    ASSIGN_OR_RETURN(auto memory, AllocateAt(address, bytes));
    if (memory == nullptr) {
      row_.Remark(absl::StrCat(bytes, " bytes: the address does not come back while the daemon has the old memory"));
      CheckOk(row_, "release of what was freed", old_buffer.Release());
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(Fill(*memory, 5));
    ASSIGN_OR_RETURN(const std::string handle, HandleOf(*memory));
    for (const std::size_t who : {0, 1}) TryWhileOldIsImported(who, *memory, handle == old_handle);
    CheckOk(row_, "release of what was freed", old_buffer.Release());
    row_.Remark(absl::StrCat(bytes, " bytes, freed while imported: the new memory has ",
                             handle == old_handle ? "the same handle" : "another handle"));
    return BothSee(*memory, 5);
  }

 private:
  absl::Status Fill(const DeviceAllocation& memory, float number) {
    const std::vector<std::byte> numbers = Repeated(number, products_[0].a_bytes());
    return CopyIn(memory.data(), numbers.data(), numbers.size());
  }

  std::string See(std::size_t who, const client::Buffer& buffer, float number) {
    OnesProduct& product = products_[who];
    return product.Run(sessions_[who].session, product.a_view(buffer), number);
  }

  // Refused where the handle is the old memory's, too, which the driver would open; where it is another, right.
  void TryWhileOldIsImported(std::size_t who, const DeviceAllocation& memory, bool same_handle) {
    const std::string what = absl::StrCat("session ", who, ", new memory while the old one is imported");
    absl::StatusOr<client::Buffer> buffer = sessions_[who].session.ImportDevice(memory.data());
    if (same_handle) {
      return CheckRefused(row_, what, buffer.status(), absl::StatusCode::kFailedPrecondition,
                          {"cuda_ipc_handle", "release its buffers"});
    }
    CheckOk(row_, what, buffer.status());
    if (!buffer.ok()) return;
    CheckRight(row_, what, See(who, *buffer, 5));
    CheckOk(row_, what + ", release", buffer->Release());
  }

  // One after the other has let go, as long as it likes.
  absl::Status BothSee(const DeviceAllocation& memory, float number) {
    ASSIGN_OR_RETURN(client::Buffer first, sessions_[0].session.ImportDevice(memory.data()));
    ASSIGN_OR_RETURN(client::Buffer second, sessions_[1].session.ImportDevice(memory.data()));
    CheckRight(row_, "new memory in the first session", See(0, first, number));
    CheckRight(row_, "new memory in the second session", See(1, second, number));
    CheckOk(row_, "the first session's release", first.Release());
    CheckRight(row_, "new memory in the second session alone", See(1, second, number));
    CheckOk(row_, "the second session's release", second.Release());
    return absl::OkStatus();
  }

  Row& row_;
  std::array<Connected, 2> sessions_;
  std::array<OnesProduct, 2> products_;
};

}  // namespace

absl::Status RunReusedAddress(const ClientJob& job, Row& row) {
  constexpr int kRounds = 100;
  constexpr std::size_t kLarge = 4 * kMiB;   // a block of the driver's for itself
  constexpr std::size_t kSmall = 32 * 1024;  // shares one
  constexpr std::int64_t kExtent = 128;      // of M, N and K: an A of 32 KiB
  ASSIGN_OR_RETURN(Connected first, Connect(job));
  ASSIGN_OR_RETURN(Connected second, Connect(job));
  ASSIGN_OR_RETURN(OnesProduct first_product, OnesProduct::Make(first.session, kExtent, kExtent, kExtent));
  ASSIGN_OR_RETURN(OnesProduct second_product, OnesProduct::Make(second.session, kExtent, kExtent, kExtent));
  ReusedAddress reused(row, std::move(first), std::move(second), std::move(first_product), std::move(second_product));
  RETURN_IF_ERROR(reused.InOrder(kLarge, kRounds));
  RETURN_IF_ERROR(reused.InOrder(kSmall, kRounds));
  return reused.FreedWhileImported(kLarge);
}

}  // namespace tessera::gpu_test
