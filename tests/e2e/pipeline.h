// Asynchronous GEMMs that are on their way together, and whether the daemon has them all.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <future>
#include <vector>

#include "client/client.h"
#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {

class Pipeline {
 public:
  // Only this object may have calls at the client's daemon.
  explicit Pipeline(const client::Client& client) : client_(client) {}

  void Send(client::Session& session, const client::GemmSpec& spec) { pending_.push_back(session.GemmAsync(spec)); }

  std::size_t Sent() const { return pending_.size(); }

  std::size_t Answered() const {
    std::size_t answered = 0;
    for (const auto& result : pending_) {
      answered += result.wait_for(std::chrono::seconds(0)) == std::future_status::ready ? 1 : 0;
    }
    return answered;
  }

  // Returns once the daemon has accepted or answered every call sent so far.
  void AwaitArrival() const {
    EXPECT_TRUE(Eventually(std::chrono::seconds(20), [this] {
      const std::size_t answered = Answered();  // first: a call that ends in between counts once or not at all
      const auto info = client_.ServerInfo();
      return info.ok() && answered + info->in_flight() >= pending_.size();
    }));
  }

  // The calls in the order of Send; each waits for its answer. Leaves nothing behind.
  std::vector<absl::StatusOr<client::GemmResult>> Results() {
    std::vector<absl::StatusOr<client::GemmResult>> results;
    for (auto& result : pending_) results.push_back(result.get());
    pending_.clear();
    return results;
  }

  void ExpectAllOk() {
    for (const auto& result : Results()) EXPECT_TRUE(result.ok()) << result.status();
  }

 private:
  const client::Client& client_;
  std::vector<std::future<absl::StatusOr<client::GemmResult>>> pending_;
};

}  // namespace tessera::e2e
