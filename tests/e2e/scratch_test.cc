// Scratch memory of streams: products that need it and products that do not, in turns, from several clients at once.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/e2e/daemon_fixture.h"
#include "tests/e2e/exact_product.h"

namespace tessera::e2e {
namespace {

constexpr int kClients = 4;
constexpr int kCalls = 10'000;  // of all clients

struct Extents {
  std::int64_t m, n, k;
};
// K that is long beside M and N is cut into slices, whose partial sums lie in scratch memory.
constexpr std::array<Extents, 5> kShapes = {{{8, 8, 4096}, {32, 32, 64}, {1, 16, 8192}, {3, 5, 777}, {16, 8, 2048}}};

struct Problem {
  client::Buffer buffer;
  ExactProduct product;

  static Problem Make(client::Session& session, const Extents& extents) {
    client::Buffer buffer = session.Allocate(ExactProduct::Bytes(extents.m, extents.n, extents.k)).value();
    const ExactProduct product(buffer, extents.m, extents.n, extents.k);
    return {std::move(buffer), product};
  }

  // The number of slices that K was cut into; -1 if the result is not exactly right.
  int Run(client::Session& session, std::uint64_t number) {
    product.Fill(number);
    const auto result = session.Gemm(product.spec());
    return result.ok() && product.Right(number) ? static_cast<int>(result->report.split()) : -1;
  }
};

class ScratchTest : public DaemonFixture {};

TEST_F(ScratchTest, SlicedProductsBetweenOthersAreExactEveryTime) {
  std::array<int, kClients> wrong{};
  std::array<int, kClients> sliced{};
  std::vector<std::thread> clients;
  for (std::size_t c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      std::mt19937 random(static_cast<std::uint32_t>(c + 1));
      client::Client client = Connect();
      client::Session session = client.OpenSession("scratch").value();
      std::vector<Problem> problems;
      for (const Extents& extents : kShapes) problems.push_back(Problem::Make(session, extents));
      for (int call = 0; call < kCalls / kClients; ++call) {
        const int split = problems[random() % problems.size()].Run(session, random());
        wrong[c] += split < 0 ? 1 : 0;
        sliced[c] += split > 1 ? 1 : 0;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  for (std::size_t c = 0; c < kClients; ++c) {
    EXPECT_EQ(wrong[c], 0) << "client " << c;
    EXPECT_GT(sliced[c], kCalls / kClients / 10) << "client " << c << ": too few products used scratch memory";
  }
}

}  // namespace
}  // namespace tessera::e2e
