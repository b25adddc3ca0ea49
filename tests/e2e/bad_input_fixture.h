// Good calls whose results are known, and the three things that a bad request must leave as they are: what the daemon
// holds, every byte of the memory, and the next good call on the same session.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/v1/compute.grpc.pb.h"
#include "tessera/v1/memory.grpc.pb.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/oracle/codec.h"

namespace tessera::e2e {

inline constexpr std::int64_t kM = 4;
inline constexpr std::int64_t kN = 6;
inline constexpr std::int64_t kK = 8;
inline constexpr std::uint64_t kOperandsBytes = 4096;

// One tensor of the good call with everything: where it lies, and how to reach it in a request.
struct Operand {
  const char* field;
  v1::Tensor& (*of)(v1::GemmRequest& request);
  std::uint64_t at;
  std::uint64_t bytes;
  v1::DType dtype;
  std::vector<std::int64_t> shape;
};

inline v1::Tensor& A(v1::GemmRequest& request) {
  return *request.mutable_op()->mutable_a();
}
inline v1::Tensor& B(v1::GemmRequest& request) {
  return *request.mutable_op()->mutable_b();
}
inline v1::Tensor& D(v1::GemmRequest& request) {
  return *request.mutable_op()->mutable_d();
}
inline v1::Tensor& AScale(v1::GemmRequest& request) {
  return *request.mutable_op()->mutable_a_scale()->mutable_vector();
}
inline v1::Tensor& BScale(v1::GemmRequest& request) {
  return *request.mutable_op()->mutable_b_scale()->mutable_vector();
}
inline v1::Tensor& Bias(v1::GemmRequest& request) {
  return *request.mutable_op()->mutable_epilogue()->mutable_bias();
}

// The inputs, then the output.
inline const std::vector<Operand>& AllOperands() {
  static const std::vector<Operand> operands = {{"op.a", &A, 256, kM * kK, v1::DTYPE_S8, {kM, kK}},
                                                {"op.b", &B, 512, kN * kK, v1::DTYPE_S8, {kN, kK}},
                                                {"op.a_scale.vector", &AScale, 768, kM * 4, v1::DTYPE_F32, {kM}},
                                                {"op.b_scale.vector", &BScale, 1024, kN * 4, v1::DTYPE_F32, {kN}},
                                                {"op.epilogue.bias", &Bias, 1280, kN * 4, v1::DTYPE_F32, {kN}},
                                                {"op.d", &D, 1536, kM * kN * 4, v1::DTYPE_F32, {kM, kN}}};
  return operands;
}

struct GoodCall {
  v1::GemmRequest request;
  std::vector<float> result;  // [kM, kN]
};

// A buffer with the operands of the good calls amid a pattern. It knows every byte that it should have.
class Operands {
 public:
  explicit Operands(client::Buffer buffer) : buffer_(std::move(buffer)), image_(buffer_.bytes(), kPattern) {
    for (std::int64_t i = 0; i < kM * kK; ++i) {
      Put(DType::kS8, Place(0), i, AValue(i / kK, i % kK));
      Put(DType::kBf16, kA16At, i, AValue(i / kK, i % kK));
    }
    for (std::int64_t i = 0; i < kN * kK; ++i) {
      Put(DType::kS8, Place(1), i, BValue(i / kK, i % kK));
      Put(DType::kBf16, kB16At, i, BValue(i / kK, i % kK));
    }
    for (std::int64_t m = 0; m < kM; ++m) Put(DType::kF32, Place(2), m, AScaleValue(m));
    for (std::int64_t n = 0; n < kN; ++n) {
      Put(DType::kF32, Place(3), n, BScaleValue(n));
      Put(DType::kF32, Place(4), n, BiasValue(n));
    }
    Restore();
  }

  const std::string& id() const { return buffer_.id(); }
  const std::string& image() const { return image_; }

  // s8 times s8 with a vector for each scale, and a bias: every tensor that a GEMM can have.
  GoodCall Full() const {
    GoodCall good;
    for (const Operand& part : AllOperands()) Set(part.of(good.request), part.dtype, part.shape, part.at);
    for (std::int64_t i = 0; i < kM * kN; ++i) {
      const std::int64_t m = i / kN;
      const std::int64_t n = i % kN;
      good.result.push_back(static_cast<float>(Sum(m, n) * AScaleValue(m) * BScaleValue(n) + BiasValue(n)));
    }
    return good;
  }

  // The same matrices in bf16, and nothing else.
  GoodCall Plain() const {
    GoodCall good;
    Set(A(good.request), v1::DTYPE_BF16, {kM, kK}, kA16At);
    Set(B(good.request), v1::DTYPE_BF16, {kN, kK}, kB16At);
    Set(D(good.request), v1::DTYPE_F32, {kM, kN}, Place(5));
    for (std::int64_t i = 0; i < kM * kN; ++i) good.result.push_back(static_cast<float>(Sum(i / kN, i % kN)));
    return good;
  }

  // Full with every input in the message and the output in the reply.
  GoodCall Inline() const {
    GoodCall good = Full();
    for (const Operand& operand : AllOperands()) {
      v1::Tensor& tensor = operand.of(good.request);
      tensor.clear_byte_offset();
      tensor.set_inline_data(image_.substr(operand.at, operand.bytes));
    }
    D(good.request).mutable_inline_result();
    return good;
  }

  // The elements of D at `at`, which then is the pattern again.
  std::vector<float> TakeResult(std::uint64_t at) {
    std::vector<float> values(kM * kN);
    std::memcpy(values.data(), buffer_.data() + at, values.size() * sizeof(float));
    std::memcpy(buffer_.data() + at, image_.data() + at, values.size() * sizeof(float));
    return values;
  }

  // Copies an operand's bytes to another place.
  void Copy(std::uint64_t from, std::uint64_t bytes, std::uint64_t to) {
    image_.replace(to, bytes, image_.substr(from, bytes));
    Restore();
  }

  void Restore() { std::memcpy(buffer_.data(), image_.data(), image_.size()); }

  void ExpectUntouched() const {
    const std::string now(reinterpret_cast<const char*>(buffer_.data()), buffer_.bytes());
    const auto [changed, was] = std::mismatch(now.begin(), now.end(), image_.begin());
    EXPECT_TRUE(was == image_.end()) << "byte " << was - image_.begin() << " of the memory has changed";
  }

 private:
  static constexpr char kPattern = 0x5a;
  static constexpr std::uint64_t kA16At = 1792;
  static constexpr std::uint64_t kB16At = 2048;

  // Small integers, so that every sum and product is exact.
  static std::int64_t AValue(std::int64_t m, std::int64_t k) { return (3 * m + 2 * k) % 7 - 3; }
  static std::int64_t BValue(std::int64_t n, std::int64_t k) { return (2 * n + 3 * k) % 5 - 2; }
  static std::int64_t AScaleValue(std::int64_t m) { return m + 1; }
  static std::int64_t BScaleValue(std::int64_t n) { return 2 * n - 3; }
  static std::int64_t BiasValue(std::int64_t n) { return 10 * n - 20; }
  static std::int64_t Sum(std::int64_t m, std::int64_t n) {
    std::int64_t sum = 0;
    for (std::int64_t k = 0; k < kK; ++k) sum += AValue(m, k) * BValue(n, k);
    return sum;
  }

  static std::uint64_t Place(std::size_t operand) { return AllOperands()[operand].at; }

  void Put(DType dtype, std::uint64_t at, std::int64_t element, std::int64_t value) {
    const std::uint64_t offset = at + static_cast<std::uint64_t>(element) * DTypeBytes(dtype);
    oracle::Encode(dtype, static_cast<double>(value), image_.data() + offset);
  }

  void Set(v1::Tensor& tensor, v1::DType dtype, const std::vector<std::int64_t>& shape, std::uint64_t at) const {
    tensor.set_buffer_id(id());
    tensor.set_byte_offset(at);
    tensor.set_dtype(dtype);
    tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  }

  client::Buffer buffer_;
  std::string image_;
};

using Mutation = std::function<void(v1::GemmRequest& request)>;

// One way in which a good request becomes a bad one.
struct BadGemm {
  std::string what;
  Mutation mutate;
  grpc::StatusCode code;
  std::string begins;      // of the message: the field's path
  std::string names = {};  // anywhere in it: a limit, for example
};

class BadInputFixture : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    Reconnect();
  }

  void TearDown() override {
    Disconnect();
    DaemonFixture::TearDown();
  }

  void Disconnect() {
    foreign_.reset();
    operands_.reset();
    other_session_.reset();
    session_.reset();
    client_.reset();
  }

  // Everything anew, after StartDaemon.
  void Reconnect() {
    Disconnect();
    client_.emplace(Connect());
    session_.emplace(client_->OpenSession("good").value());
    other_session_.emplace(client_->OpenSession("other").value());
    operands_.emplace(session_->Allocate(kOperandsBytes).value());
    foreign_.emplace(other_session_->Allocate(kOperandsBytes).value());
    compute_ = v1::Compute::NewStub(client_->channel());
    memory_ = v1::Memory::NewStub(client_->channel());
  }

  // A call's context with that session token, which may be any bytes; nullopt: without.
  static std::unique_ptr<grpc::ClientContext> Context(const std::optional<std::string>& token) {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    if (token.has_value()) context->AddMetadata("tessera-session-bin", *token);
    return context;
  }

  grpc::Status Gemm(const v1::GemmRequest& request, const std::optional<std::string>& token) {
    reply_.Clear();
    return compute_->Gemm(Context(token).get(), request, &reply_);
  }
  grpc::Status Gemm(const v1::GemmRequest& request) { return Gemm(request, session_->token()); }

  // What the daemon holds, as text.
  std::string State() const {
    v1::ServerInfoReply info = client_->ServerInfo().value();
    v1::ListBuffersReply list = client_->ListBuffers(true).value();
    info.clear_uptime_ms();
    for (v1::BufferInfo& buffer : *list.mutable_buffers()) buffer.clear_age_ms();
    return info.DebugString() + list.DebugString();
  }

  // The same with no buffer in use: the daemon holds one a moment longer than its client waits for the descriptor.
  std::string IdleState() const {
    EXPECT_TRUE(Eventually(std::chrono::seconds(20), [this] {
      const v1::ListBuffersReply list = client_->ListBuffers(true).value();
      return std::all_of(list.buffers().begin(), list.buffers().end(),
                         [](const v1::BufferInfo& buffer) { return buffer.references() == 0; });
    }));
    return State();
  }

  static void ExpectRefused(const grpc::Status& status, grpc::StatusCode code, const std::string& begins,
                            const std::string& names = {}) {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), ::testing::StartsWith(begins));
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr(names));
  }

  // Computes, gives exactly the known numbers, and writes nothing else.
  void ExpectRight(GoodCall good) {
    const grpc::Status status = Gemm(good.request);
    ASSERT_TRUE(status.ok()) << status.error_message();
    if (D(good.request).has_inline_result()) {
      ASSERT_EQ(reply_.inline_result().size(), good.result.size() * sizeof(float));
      std::vector<float> values(good.result.size());
      std::memcpy(values.data(), reply_.inline_result().data(), reply_.inline_result().size());
      EXPECT_EQ(values, good.result);
    } else {
      EXPECT_EQ(operands_->TakeResult(D(good.request).byte_offset()), good.result);
    }
    operands_->ExpectUntouched();
  }

  // `send` makes a bad request of any kind, between two looks at everything that it must not change.
  void ExpectNothingChanges(const GoodCall& good, const std::function<void()>& send) {
    const std::string before = IdleState();
    send();
    EXPECT_EQ(State(), before);
    operands_->ExpectUntouched();
    foreign_->ExpectUntouched();
    ExpectRight(good);
  }

  void ExpectEach(const GoodCall& good, const std::vector<BadGemm>& rows) {
    ExpectRight(good);
    for (const BadGemm& row : rows) {
      SCOPED_TRACE(row.what);
      v1::GemmRequest request = good.request;
      row.mutate(request);
      ExpectNothingChanges(good, [&] { ExpectRefused(Gemm(request), row.code, row.begins, row.names); });
    }
  }

  std::optional<client::Client> client_;
  std::optional<client::Session> session_, other_session_;  // of one user
  std::optional<Operands> operands_;                        // of session_
  std::optional<Operands> foreign_;                         // of other_session_
  std::unique_ptr<v1::Compute::Stub> compute_;
  std::unique_ptr<v1::Memory::Stub> memory_;
  v1::GemmReply reply_;
};

}  // namespace tessera::e2e
