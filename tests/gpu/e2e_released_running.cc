#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/gemm_stream.h"
#include "common/float_codec.h"
#include "common/status_macros.h"
#include "tests/gpu/e2e_kernels.h"
#include "tests/gpu/e2e_lifetime_jobs.h"
#include "tests/gpu/e2e_memory.h"
#include "tests/gpu/e2e_product.h"

namespace tessera::gpu_test {
namespace {

enum class Ending { kInput, kOutput, kSession };

// Answers of products that are on the way.
class Answers {
 public:
  void Take(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++taken_[status.code()];
    if (!status.ok()) last_error_ = Text(status);
  }
  int count() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    int all = 0;
    for (const auto& [code, number] : taken_) all += number;
    return all;
  }
  int count(absl::StatusCode code) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = taken_.find(code);
    return found == taken_.end() ? 0 : found->second;
  }
  std::string last_error() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_error_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<absl::StatusCode, int> taken_;
  std::string last_error_;
};

// cudaMalloc memory that the daemon has, too.
struct Imported {
  std::unique_ptr<DeviceAllocation> memory;
  std::optional<client::Buffer> buffer;

  static absl::StatusOr<Imported> Make(client::Session& session, std::uint64_t bytes) {
    Imported imported;
    ASSIGN_OR_RETURN(imported.memory, AllocatePlain(bytes));
    ASSIGN_OR_RETURN(imported.buffer, session.ImportDevice(imported.memory->data()));
    return imported;
  }

  absl::Status Fill(float number) const {
    RETURN_IF_ERROR(ToStatus(LaunchLateFill(reinterpret_cast<std::uint16_t*>(memory->data()),
                                            memory->bytes() / kBf16Bytes, EncodeBf16(number), 0, nullptr),
                             "launching a fill"));
    return ToStatus(cudaStreamSynchronize(nullptr), "filling");
  }
};

absl::Status SetBytes(const DeviceAllocation& memory, std::byte value) {
  RETURN_IF_ERROR(ToStatus(cudaMemset(memory.data(), std::to_integer<int>(value), memory.bytes()), "cudaMemset"));
  return ToStatus(cudaDeviceSynchronize(), "cudaMemset");
}

// Many long products in a row, and in the middle of them their input, their output or their session goes.
class ReleasedRunning {
 public:
  static constexpr std::int64_t kM = 16384;
  static constexpr std::int64_t kN = 8192;
  static constexpr std::int64_t kK = 16384;
  static constexpr int kProducts = 48;  // of some 6 ms; a stream of the daemon's takes 64
  static constexpr float kNumber = 3;
  static constexpr std::byte kMark{0x5a};

  ReleasedRunning(Row& row, Ending ending, Connected connected, std::string label)
      : row_(row), ending_(ending), connected_(std::move(connected)), label_(std::move(label)) {}

  absl::Status Run() {
    ASSIGN_OR_RETURN(a_, Imported::Make(connected_.session, kM * kK * kBf16Bytes));
    ASSIGN_OR_RETURN(b_, Imported::Make(connected_.session, kN * kK * kBf16Bytes));
    ASSIGN_OR_RETURN(first_, Imported::Make(connected_.session, kM * kN * kBf16Bytes));
    ASSIGN_OR_RETURN(last_, Imported::Make(connected_.session, kM * kN * kBf16Bytes));
    RETURN_IF_ERROR(a_.Fill(kNumber));
    RETURN_IF_ERROR(b_.Fill(1));
    RETURN_IF_ERROR(SetBytes(*first_.memory, kPoison));
    RETURN_IF_ERROR(SetBytes(*last_.memory, kPoison));
    const client::GemmSpec to_first = SpecTo(first_);
    const client::GemmSpec to_last = SpecTo(last_);

    client::GemmStream stream = connected_.session.OpenStream();
    for (int i = 0; i < kProducts; ++i) {
      // The last of all tells whether all are over; where the output goes, every one of them writes it.
      const bool last = ending_ != Ending::kInput || i == kProducts - 1;
      RETURN_IF_ERROR(stream.Gemm(last ? to_last : to_first, [this](const absl::StatusOr<client::GemmResult>& result) {
        answers_.Take(result.status());
      }));
    }
    const absl::Status status = End(to_last);
    const absl::Status finished = stream.Finish();
    row_.Check(finished.ok() || ending_ == Ending::kSession, absl::StrCat("the stream: ", finished.ToString()));
    RETURN_IF_ERROR(status);
    return Judge();
  }

 private:
  client::GemmSpec SpecTo(const Imported& d) const {
    return {.a = a_.buffer->Tensor(DType::kBf16, {kM, kK}),
            .b = b_.buffer->Tensor(DType::kBf16, {kN, kK}),
            .d = d.buffer->Tensor(DType::kBf16, {kM, kN}),
            .backend = v1::BACKEND_CUDA};
  }

  // This session, as the daemon lists it.
  std::optional<v1::SessionInfo> Listed() {
    const absl::StatusOr<v1::ListSessionsReply> list = connected_.client.ListSessions();
    if (!list.ok()) return std::nullopt;
    for (const v1::SessionInfo& session : list->sessions()) {
      if (session.label() == label_) return session;
    }
    return std::nullopt;
  }

  bool AllAccepted() {
    const int answered = answers_.count();  // before the daemon counts the others: none is counted twice
    const std::optional<v1::SessionInfo> session = Listed();
    return session.has_value() && answered + static_cast<int>(session->in_flight()) >= kProducts;
  }

  // Whether new calls are to be refused from now on.
  bool Refusing(const std::string& id) {
    if (ending_ == Ending::kSession) {
      const std::optional<v1::SessionInfo> session = Listed();
      return session.has_value() && session->state() != v1::SESSION_STATE_OPEN;
    }
    const absl::StatusOr<v1::ListBuffersReply> list = connected_.client.ListBuffers();
    if (!list.ok()) return false;
    return std::none_of(list->buffers().begin(), list->buffers().end(),
                        [&](const v1::BufferInfo& buffer) { return buffer.buffer_id() == id; });
  }

  // Lets the memory go in the middle of the products, and gives it to somebody else at the answer.
  absl::Status End(const client::GemmSpec& spec) {
    if (!Soon([&] { return AllAccepted(); })) return absl::InternalError("the daemon did not take the products");
    Imported& victim = ending_ == Ending::kInput ? a_ : last_;
    const std::string id = victim.buffer->id();
    std::atomic<bool> answered = false;
    std::future<absl::Status> release = std::async(std::launch::async, [&] {
      absl::Status status = ending_ == Ending::kSession ? connected_.session.Close() : victim.buffer->Release();
      answered = true;
      return status;
    });
    const bool refusing = Soon([&] { return Refusing(id) || answered; });
    const absl::Status refused = connected_.session.Gemm(spec).status();
    const bool early = answered;
    const int done = answers_.count();
    absl::Status released = release.get();  // the client's timeout bounds it

    row_.Check(refusing && !early && done < kProducts,
               absl::StrCat("the release was ", early ? "answered" : "on the way", " with ", done, " of ", kProducts,
                            " products answered: nothing was tried, or it did not wait"));
    CheckRefused(row_, "a new product", refused, absl::StatusCode::kNotFound, {});
    CheckOk(row_, "the release", released);
    if (!released.ok()) return released;

    const std::size_t bytes = victim.memory->bytes();
    std::byte* const address = victim.memory->data();
    victim.memory.reset();
    ASSIGN_OR_RETURN(successor_, AllocateAt(address, bytes));
    if (successor_ == nullptr) {
      row_.Remark("the address did not come back");
      ASSIGN_OR_RETURN(successor_, AllocatePlain(bytes));
    }
    return SetBytes(*successor_, kMark);
  }

  // After everything: the results are those of what was released, and its successor is as it was filled.
  absl::Status Judge() {
    const int right = answers_.count(absl::StatusCode::kOk);
    const int cancelled = answers_.count(absl::StatusCode::kCancelled);
    row_.Check(right + cancelled == kProducts && right > 0 && (cancelled > 0) == (ending_ == Ending::kSession),
               absl::StrCat(right, " products were done and ", cancelled, " cancelled of ", kProducts,
                            "; another answer: ", answers_.last_error()));
    ASSIGN_OR_RETURN(const std::vector<std::byte> successor, BytesOf(*successor_));
    row_.Check(std::all_of(successor.begin(), successor.end(), [](std::byte value) { return value == kMark; }),
               "memory that was allocated after the answer has changed");
    if (ending_ != Ending::kInput) return absl::OkStatus();
    for (const Imported* d : {&first_, &last_}) {
      ASSIGN_OR_RETURN(const std::vector<std::byte> result, BytesOf(*d->memory));
      CheckRight(row_, d == &last_ ? "the last result" : "the results", WrongNumbers(result, kNumber * kK));
    }
    return absl::OkStatus();
  }

  Row& row_;
  const Ending ending_;
  Connected connected_;
  const std::string label_;  // of its session: the one before may still be listed
  Imported a_;
  Imported b_;
  Imported first_;
  Imported last_;
  Answers answers_;
  std::unique_ptr<DeviceAllocation> successor_;
};

}  // namespace

absl::Status RunReleasedRunning(const ClientJob& job, Row& row) {
  for (const Ending ending : {Ending::kInput, Ending::kOutput, Ending::kSession}) {
    ClientJob labelled = job;
    labelled.job = absl::StrCat(job.job, "-", static_cast<int>(ending));
    ASSIGN_OR_RETURN(Connected connected, Connect(labelled));
    RETURN_IF_ERROR(ReleasedRunning(row, ending, std::move(connected), labelled.job).Run());
  }
  return absl::OkStatus();
}

}  // namespace tessera::gpu_test
