// Problems of the Planner service: what each field decodes to, and each way in which one can be wrong.
#include "server/rpc/planner_decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "common/text.h"

namespace tessera::server {
namespace {

using ::testing::StartsWith;

v1::Problem Good() {
  v1::Problem problem;
  v1::GemmShape& shape = *problem.mutable_gemm();
  shape.set_m(512);
  shape.set_n(1024);
  shape.set_k(256);
  return problem;
}

ProbedProblem Decoded(const std::function<void(v1::Problem&)>& change) {
  v1::Problem problem = Good();
  change(problem);
  const auto decoded = DecodeProblem(problem, "problem");
  EXPECT_TRUE(decoded.ok()) << decoded.status();
  return decoded.ok() ? *decoded : ProbedProblem{};
}

std::string Refusal(const std::function<void(v1::Problem&)>& change) {
  v1::Problem problem = Good();
  change(problem);
  const auto decoded = DecodeProblem(problem, "problem");
  EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument);
  return MessageOf(decoded.status());
}

TEST(PlannerDecodeTest, DefaultsAreAPackedBf16Product) {
  const ProbedProblem decoded = Decoded([](v1::Problem&) {});
  EXPECT_EQ(decoded.gemm.gemm_class.ToString(), "bf16_bf16.bf16.fast.NT");
  EXPECT_EQ(decoded.gemm.batch, 1);
  EXPECT_EQ(decoded.gemm.m, 512);
  EXPECT_EQ(decoded.gemm.n, 1024);
  EXPECT_EQ(decoded.gemm.k, 256);
  EXPECT_FALSE(decoded.backend.has_value());
  EXPECT_EQ(decoded.device, "");
  for (const kernels::Arch arch : {kernels::Arch::kCpu, kernels::Arch::kSm80, kernels::Arch::kSm90a}) {
    EXPECT_TRUE(decoded.gemm.addressable.Has(arch)) << kernels::ArchName(arch);
  }
}

TEST(PlannerDecodeTest, EveryFieldIsTaken) {
  const ProbedProblem decoded = Decoded([](v1::Problem& problem) {
    v1::GemmShape& shape = *problem.mutable_gemm();
    shape.set_a(v1::DTYPE_E4M3);
    shape.set_b(v1::DTYPE_E5M2);
    shape.set_d(v1::DTYPE_F32);
    shape.set_accumulation(v1::ACCUMULATION_EXACT);
    shape.set_layout(v1::GEMM_LAYOUT_TN);
    shape.set_batch(7);
    problem.set_backend(v1::BACKEND_CUDA);
    problem.set_device("h200");
  });
  EXPECT_EQ(decoded.gemm.gemm_class.ToString(), "e4m3_e5m2.f32.exact.TN");
  EXPECT_EQ(decoded.gemm.batch, 7);
  EXPECT_EQ(decoded.backend, kernels::Backend::kCuda);
  EXPECT_EQ(decoded.device, "h200");
}

TEST(PlannerDecodeTest, ATypeAloneIsThatOfBothOperands) {
  const ProbedProblem decoded = Decoded([](v1::Problem& problem) { problem.mutable_gemm()->set_a(v1::DTYPE_S8); });
  EXPECT_EQ(decoded.gemm.gemm_class.ToString(), "s8_s8.bf16.fast.NT");
}

// Only fp8 pairs have a choice, as in a call.
TEST(PlannerDecodeTest, AccumulationOfOtherPairsIsTheOneTheyHave) {
  const ProbedProblem decoded =
      Decoded([](v1::Problem& problem) { problem.mutable_gemm()->set_accumulation(v1::ACCUMULATION_EXACT); });
  EXPECT_EQ(decoded.gemm.gemm_class.accumulation, kernels::Accumulation::kFast);
}

TEST(PlannerDecodeTest, StridesAndAlignmentSayWhoCanAddress) {
  const auto hopper = [](const std::function<void(v1::GemmShape&)>& change) {
    const ProbedProblem decoded = Decoded([&](v1::Problem& problem) { change(*problem.mutable_gemm()); });
    EXPECT_TRUE(decoded.gemm.addressable.Has(kernels::Arch::kSm80));
    return decoded.gemm.addressable.Has(kernels::Arch::kSm90a);
  };
  EXPECT_TRUE(hopper([](v1::GemmShape& shape) { shape.set_alignment_bytes(16); }));
  EXPECT_FALSE(hopper([](v1::GemmShape& shape) { shape.set_alignment_bytes(8); }));
  EXPECT_FALSE(hopper([](v1::GemmShape& shape) { shape.set_k(257); }));
  EXPECT_FALSE(hopper([](v1::GemmShape& shape) { shape.set_a_stride(257); }));
  EXPECT_TRUE(hopper([](v1::GemmShape& shape) { shape.set_b_stride(264); }));
  EXPECT_TRUE(hopper([](v1::GemmShape& shape) {  // K is no stride of these
    shape.set_k(257);
    shape.set_layout(v1::GEMM_LAYOUT_TN);
  }));
}

TEST(PlannerDecodeTest, ErrorsNameTheField) {
  struct Case {
    std::function<void(v1::Problem&)> change;
    std::string begins;
  };
  const auto gemm = [](auto change) { return [change](v1::Problem& problem) { change(*problem.mutable_gemm()); }; };
  const Case cases[] = {
      {[](v1::Problem& problem) { problem.clear_gemm(); }, "problem: no problem is set"},
      {[](v1::Problem& problem) { problem.set_backend(static_cast<v1::Backend>(77)); }, "problem.backend: unknown"},
      {[](v1::Problem& problem) { problem.set_device(std::string(65, 'x')); }, "problem.device: "},
      {gemm([](v1::GemmShape& shape) { shape.set_a(static_cast<v1::DType>(55)); }), "problem.gemm.a: unknown value 55"},
      {gemm([](v1::GemmShape& shape) { shape.set_b(static_cast<v1::DType>(-1)); }), "problem.gemm.b: unknown value"},
      {gemm([](v1::GemmShape& shape) { shape.set_d(static_cast<v1::DType>(8)); }), "problem.gemm.d: unknown value 8"},
      {gemm([](v1::GemmShape& shape) { shape.set_layout(static_cast<v1::GemmLayout>(9)); }),
       "problem.gemm.layout: unknown value 9"},
      {gemm([](v1::GemmShape& shape) { shape.set_accumulation(static_cast<v1::Accumulation>(9)); }),
       "problem.gemm.accumulation: unknown value 9"},
      {gemm([](v1::GemmShape& shape) { shape.set_m(0); }), "problem.gemm.m: 0; takes 1 to 2147483647"},
      {gemm([](v1::GemmShape& shape) { shape.set_n(std::int64_t{1} << 31); }), "problem.gemm.n: 2147483648"},
      {gemm([](v1::GemmShape& shape) { shape.set_k(-1); }), "problem.gemm.k: -1"},
      {gemm([](v1::GemmShape& shape) { shape.set_batch(-1); }), "problem.gemm.batch: -1"},
      {gemm([](v1::GemmShape& shape) { shape.set_a_stride(255); }),
       "problem.gemm.a_stride: 255; takes 0 (packed) or 256"},
      {gemm([](v1::GemmShape& shape) { shape.set_b_stride((std::int64_t{1} << 40) + 1); }), "problem.gemm.b_stride: "},
      {gemm([](v1::GemmShape& shape) { shape.set_alignment_bytes(3); }), "problem.gemm.alignment_bytes: 3; takes"},
      {gemm([](v1::GemmShape& shape) { shape.set_alignment_bytes(512); }), "problem.gemm.alignment_bytes: 512"},
      {gemm([](v1::GemmShape& shape) { shape.set_alignment_bytes(1); }), "problem.gemm.alignment_bytes: 1; less than"},
  };
  for (const Case& each : cases) EXPECT_THAT(Refusal(each.change), StartsWith(each.begins));
}

TEST(PlannerDecodeTest, TheLargestExtentsDoNotOverflow) {
  const auto largest = [](v1::Problem& problem) {
    v1::GemmShape& shape = *problem.mutable_gemm();
    for (const auto set :
         {&v1::GemmShape::set_m, &v1::GemmShape::set_n, &v1::GemmShape::set_k, &v1::GemmShape::set_batch}) {
      (shape.*set)(2147483647);
    }
  };
  EXPECT_EQ(Decoded(largest).gemm.m, 2147483647);
  EXPECT_THAT(Refusal([&](v1::Problem& problem) {
                largest(problem);
                problem.mutable_gemm()->set_a_stride(std::int64_t{1} << 40);
              }),
              StartsWith("problem.gemm.a_stride: the operand of all batches"));
}

}  // namespace
}  // namespace tessera::server
