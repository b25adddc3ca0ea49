// The checked workload in a process of its own: it must pass, and must notice a result that is wrong.

#include <gmock/gmock.h>

#include "tests/e2e/child_process.h"
#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {
namespace {

using ::testing::HasSubstr;

class WorkloadTest : public DaemonFixture {};

TEST_F(WorkloadTest, EveryResultIsRight) {
  const Finished run = RunProgram({TESSERA_WORKLOAD, "--socket", socket(), "--calls", "64"});
  EXPECT_EQ(run.code, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("65 right, 0 wrong"));
  EXPECT_EQ(MetricSum(Metrics(), "tessera_rpcs_total", {"method=\"Compute.Gemm\"", "code=\"OK\""}), 65);
  EXPECT_TRUE(Eventually(std::chrono::seconds(2), [this] { return MetricSum(Metrics(), "tessera_sessions") == 0; }));
}

TEST_F(WorkloadTest, OneDamagedElementIsNoticed) {
  const Finished run = RunProgram({TESSERA_WORKLOAD, "--socket", socket(), "--calls", "64", "--corrupt"});
  ASSERT_TRUE(run.code.has_value());
  EXPECT_EQ(*run.code, 1) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("64 right, 1 wrong"));
}

TEST_F(WorkloadTest, NoDaemonIsAnError) {
  const Finished run = RunProgram({TESSERA_WORKLOAD, "--socket", directory().File("nobody.sock"), "--calls", "1"});
  EXPECT_EQ(run.code, 1) << run.out;
  EXPECT_FALSE(run.err.empty());
}

}  // namespace
}  // namespace tessera::e2e
