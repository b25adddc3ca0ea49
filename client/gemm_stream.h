// Many products on one call: no round trip for each, and a session's products start in the order in which they are
// given.
//
//   GemmStream stream = session.OpenStream();
//   for (const GemmSpec& spec : specs) RETURN_IF_ERROR(stream.Gemm(spec, [](absl::StatusOr<GemmResult> result) { ..
//   })); RETURN_IF_ERROR(stream.Finish());
#pragma once

#include <cstddef>
#include <functional>
#include <future>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"

namespace tessera::client {

// Made by Session::OpenStream and Client::OpenStream, whose connection it keeps alive. A product that is refused or
// fails has its own status and leaves the others alone. An error of the call breaks the stream: it becomes the result
// of all that is not answered, and of every Gemm and Finish from then on; go on with a new stream.
class GemmStream {
 public:
  // Requests of this process that are not written yet; the daemon's own limit is in compute.proto.
  static constexpr std::size_t kUnwrittenMax = 64;

  GemmStream(GemmStream&&) noexcept;
  GemmStream& operator=(GemmStream&&) noexcept;
  // As Finish. On a library's thread it only begins that, and the answers come without anybody waiting.
  ~GemmStream();

  // Queues one product. `done` runs on a library thread, exactly once, in the order of completion; the views' buffers
  // must live until then. It must not block, as all answers of the stream wait for it, but may call Gemm.
  //
  // Waits while kUnwrittenMax requests are unwritten, except inside `done`. An error means that `done` will not be
  // called: the stream is broken or finished (FAILED_PRECONDITION), or the spec has a timeout, which is the stream's
  // (INVALID_ARGUMENT).
  absl::Status Gemm(const GemmSpec& spec, std::function<void(absl::StatusOr<GemmResult>)> done);
  std::future<absl::StatusOr<GemmResult>> Gemm(const GemmSpec& spec);

  // Takes no more products, waits until every `done` has returned, and tells how the call ended. As long as the daemon
  // lives that may take as long as the products do: see Cancel and the timeout of OpenStream. May be called again, but
  // not inside `done` (FAILED_PRECONDITION).
  absl::Status Finish();

  // Breaks the stream: products that have not been launched are CANCELLED, and results of those that have are lost.
  void Cancel();

 private:
  friend class Session;
  friend class Client;
  class Call;
  explicit GemmStream(std::shared_ptr<Call> call);
  static GemmStream Open(std::shared_ptr<ClientCore> client, std::shared_ptr<SessionCore> session,
                         std::chrono::milliseconds timeout);
  std::shared_ptr<Call> call_;  // null: moved from
};

}  // namespace tessera::client
