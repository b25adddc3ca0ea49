// Tensors in shared memory never travel over the socket: a proxy between client and daemon counts what does.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <list>
#include <thread>

#include "common/unique_fd.h"
#include "tests/e2e/daemon_fixture.h"
#include "tests/oracle/codec.h"
#include "tests/workload/shared_problem.h"

namespace tessera::e2e {
namespace {

constexpr std::int64_t kExtent = 512;
constexpr std::uint64_t kMatrixBytes = kExtent * kExtent * 2;
constexpr int kCalls = 100;
constexpr std::uint64_t kBytesPerCallMax = 4096;
constexpr int kPoison = 0x7b;
constexpr std::uint64_t kSeed = 99;

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  EXPECT_LT(path.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Passes every byte between those who connect to `path` and the socket at `target`, and counts them.
class CountingProxy {
 public:
  CountingProxy(const std::string& path, std::string target)
      : target_(std::move(target)), listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_un address = AddressOf(path);
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_.get(), 8), 0);
    acceptor_ = std::thread([this] { Accept(); });
  }

  ~CountingProxy() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    acceptor_.join();
    for (Connection& connection : connections_) {
      ::shutdown(connection.near.get(), SHUT_RDWR);
      ::shutdown(connection.far.get(), SHUT_RDWR);
      connection.forth.join();
      connection.back.join();
    }
  }

  std::uint64_t bytes() const { return bytes_.load(); }

 private:
  struct Connection {
    UniqueFd near;
    UniqueFd far;
    std::thread forth;
    std::thread back;
  };

  void Accept() {
    const sockaddr_un address = AddressOf(target_);
    while (true) {
      UniqueFd near(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!near) return;  // shut down
      UniqueFd far(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT_EQ(::connect(far.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
      Connection& connection = connections_.emplace_back();
      connection.near = std::move(near);
      connection.far = std::move(far);
      connection.forth = std::thread([this, &connection] { Pump(connection.near.get(), connection.far.get()); });
      connection.back = std::thread([this, &connection] { Pump(connection.far.get(), connection.near.get()); });
    }
  }

  void Pump(int from, int to) {
    std::vector<char> chunk(1 << 16U);
    while (true) {
      const ssize_t got = ::recv(from, chunk.data(), chunk.size(), 0);
      if (got <= 0) break;
      // Counted before it is passed on, so that no answer can be seen before its bytes are.
      bytes_ += static_cast<std::uint64_t>(got);
      for (ssize_t sent = 0; sent < got;) {
        const ssize_t step = ::send(to, chunk.data() + sent, static_cast<std::size_t>(got - sent), MSG_NOSIGNAL);
        if (step <= 0) return;
        sent += step;
      }
    }
    ::shutdown(to, SHUT_WR);
  }

  const std::string target_;
  const UniqueFd listener_;
  std::thread acceptor_;
  std::list<Connection> connections_;  // of the acceptor's thread until it has ended
  std::atomic<std::uint64_t> bytes_{0};
};

class ZeroCopyTest : public DaemonFixture {
 protected:
  void SetUp() override {
    DaemonFixture::SetUp();
    proxy_ = std::make_unique<CountingProxy>(directory().File("proxy.sock"), socket());
    client_.emplace(client::Client::Connect({.socket = directory().File("proxy.sock"),
                                             .side_channel = socket() + ".side",
                                             .timeout = std::chrono::seconds(5)})
                        .value());
    session_.emplace(client_->OpenSession("zero copy").value());
  }

  void TearDown() override {
    session_.reset();
    client_.reset();
    proxy_.reset();
    DaemonFixture::TearDown();
  }

  // A GEMM of bf16 with all tensors in `buffer`, from its `byte_offset` on.
  static client::GemmSpec Fill(const client::Buffer& buffer, std::uint64_t byte_offset) {
    const auto matrix = [&](std::uint64_t i) {
      return buffer.Tensor(DType::kBf16, {kExtent, kExtent}, byte_offset + i * kMatrixBytes);
    };
    client::GemmSpec spec{.a = matrix(0), .b = matrix(1), .d = matrix(2)};
    oracle::Random random(kSeed);
    for (const client::TensorView* view : {&spec.a, &spec.b}) {
      for (std::int64_t i = 0; i < kExtent * kExtent; ++i) {
        oracle::Encode(DType::kBf16, random.Uniform(-1, 1), view->data + i * 2);
      }
    }
    return spec;
  }

  // Calls in steady state move few bytes, and the result stands in this process's own mapping.
  void ExpectZeroCopy(const client::GemmSpec& spec) {
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(session_->Gemm(spec).ok());
    std::memset(spec.d.data, kPoison, kMatrixBytes);
    const std::uint64_t before = proxy_->bytes();
    for (int i = 0; i < kCalls; ++i) {
      const auto result = session_->Gemm(spec);
      ASSERT_TRUE(result.ok()) << result.status();
    }
    const std::uint64_t moved = proxy_->bytes() - before;
    RecordProperty("bytes_per_call", static_cast<int>(moved / kCalls));
    EXPECT_GT(moved, 0U) << "the proxy saw nothing: the calls went around it";
    EXPECT_LT(moved, kCalls * kBytesPerCallMax);

    const kernels::GemmParams params = workload::ParamsOf(spec);
    const oracle::GemmTypes types{DType::kBf16, DType::kBf16, DType::kBf16};
    const oracle::Verdict verdict = oracle::CheckGemm(params, types, oracle::ComputeGemm(params, types));
    EXPECT_TRUE(verdict.ok) << verdict.wrong << " wrong: " << verdict.first << ", seed " << kSeed;
  }

  std::unique_ptr<CountingProxy> proxy_;
  std::optional<client::Client> client_;
  std::optional<client::Session> session_;
};

TEST_F(ZeroCopyTest, MemoryOfTheDaemon) {
  const client::Buffer buffer = session_->Allocate(3 * kMatrixBytes).value();
  ExpectZeroCopy(Fill(buffer, 0));
}

TEST_F(ZeroCopyTest, MemoryOfTheClient) {
  const client::Buffer buffer = session_->Share(3 * kMatrixBytes).value();
  ExpectZeroCopy(Fill(buffer, 0));
}

TEST_F(ZeroCopyTest, ImportedMemoryAtAnUnalignedOffset) {
  constexpr std::uint64_t kOffset = 3 * 4096 + 258;  // within a page; a multiple of the element only
  constexpr std::uint64_t kBytes = kOffset + 3 * kMatrixBytes + 6;
  const UniqueFd memfd(::memfd_create("zero-copy-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(memfd);
  ASSERT_EQ(::ftruncate(memfd.get(), kBytes), 0);
  ASSERT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  void* mine = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
  ASSERT_NE(mine, MAP_FAILED);
  std::memset(mine, kPoison, kBytes);

  const client::Buffer buffer = session_->Import(memfd.get(), kOffset).value();
  EXPECT_EQ(buffer.bytes(), kBytes - kOffset);
  const client::GemmSpec spec = Fill(buffer, 2);
  ExpectZeroCopy(spec);
  // The test's own mapping of the memfd shows the same result, and nothing around it was touched.
  const char* in_file = static_cast<const char*>(mine) + kOffset + 2;
  EXPECT_EQ(std::memcmp(in_file + 2 * kMatrixBytes, spec.d.data, kMatrixBytes), 0);
  for (const std::uint64_t at :
       {std::uint64_t{0}, kOffset - 1, kOffset + 1, kOffset + 2 + 3 * kMatrixBytes, kBytes - 1}) {
    EXPECT_EQ(static_cast<const char*>(mine)[at], kPoison) << at;
  }
  EXPECT_EQ(::munmap(mine, kBytes), 0);
}

TEST_F(ZeroCopyTest, TheProxyCountsWhatTravels) {
  // The other side of the proof: a reply that is larger than the bound above shows.
  std::vector<client::Buffer> buffers;
  for (int i = 0; i < 100; ++i) buffers.push_back(session_->Allocate(1).value());
  const std::uint64_t before = proxy_->bytes();
  ASSERT_EQ(client_->ListBuffers().value().buffers_size(), 100);
  EXPECT_GT(proxy_->bytes() - before, kBytesPerCallMax);
}

}  // namespace
}  // namespace tessera::e2e
