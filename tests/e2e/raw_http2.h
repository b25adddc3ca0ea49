// A hand-written HTTP/2 client over a Unix socket, for frames that no library would send. It keeps to the protocol
// where the test does not make it break it: it acknowledges SETTINGS and PING while it reads, and its DATA honours the
// windows.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/unique_fd.h"

namespace tessera::e2e {
namespace http2 {

// RFC 9113, sections 6 and 7.
enum Type : std::uint8_t {
  kData = 0,
  kHeaders = 1,
  kPriority = 2,
  kRstStream = 3,
  kSettings = 4,
  kPushPromise = 5,
  kPing = 6,
  kGoAway = 7,
  kWindowUpdate = 8,
  kContinuation = 9,
};
enum Flag : std::uint8_t { kNoFlags = 0, kEndStream = 1, kAck = 1, kEndHeaders = 4, kPadded = 8, kHasPriority = 0x20 };
enum Setting : std::uint16_t { kHeaderTableSize = 1, kMaxConcurrentStreams = 3, kInitialWindowSize = 4 };
enum Error : std::uint32_t { kNoError = 0, kRefusedStream = 7, kCancel = 8, kEnhanceYourCalm = 11 };

inline constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string Number(std::uint64_t value, int bytes);  // big-endian
std::string Frame(int type, int flags, std::uint32_t stream, std::string_view payload);
// `length` is what the frame says of itself, whatever follows.
std::string FrameHead(std::uint32_t length, int type, int flags, std::uint32_t stream);
std::string SettingsPayload(const std::vector<std::pair<std::uint16_t, std::uint32_t>>& settings);

using Fields = std::vector<std::pair<std::string, std::string>>;
// HPACK: each field a literal that is not indexed, nothing Huffman-coded.
std::string HeaderBlock(const Fields& fields);
Fields GrpcRequestFields(const std::string& path);

// The five bytes before a gRPC message.
std::string GrpcPrefix(std::uint32_t length, bool compressed = false);

// What becomes of a connection.
enum class Outcome { kEnds, kGoesOn, kEither };

struct IllegalFrames {
  std::string what;
  std::string frames;  // for a connection on which stream 1 is not open yet
  Outcome outcome;     // kEither: RFC 9113 wants its end, or that of a stream, and gRPC is lenient
};

// What the protocol forbids, and what it has a receiver ignore.
std::vector<IllegalFrames> AllIllegalFrames();

// Any frames, mostly well-formed ones, in any order.
std::string RandomFrames(std::mt19937& random);

}  // namespace http2

class RawHttp2 {
 public:
  struct Stream {
    std::int64_t window = 0;                                  // bytes that the daemon takes now
    std::map<std::string, std::string, std::less<>> headers;  // of the reply and its trailers
    std::optional<std::uint32_t> reset;                       // the error code
    bool ended = false;                                       // by the daemon, in whatever way

    // The trailers' "status 8: text", or "reset 11", or "open".
    std::string Text() const;
    std::string Header(std::string_view name) const;
  };

  // Connects, and sends nothing yet.
  explicit RawHttp2(const std::string& socket);

  // Preface and SETTINGS; false if the daemon's SETTINGS did not come.
  bool Start(const std::string& preface_and_settings = DefaultStart());
  static std::string DefaultStart();

  // Sends all of `bytes`, reading meanwhile what comes. False if the connection ended or the daemon took nothing for
  // `patience`; then the rest is dropped.
  bool Send(std::string_view bytes, std::chrono::milliseconds patience = std::chrono::seconds(10));
  // As Send, reading nothing. Tells how many bytes went.
  std::size_t SendUnread(std::string_view bytes, std::chrono::milliseconds patience);

  // A new stream: HEADERS, and CONTINUATION for what does not fit. Returns its id, whether or not the daemon takes it.
  std::uint32_t Open(std::string_view block);
  std::uint32_t OpenGrpc(const std::string& path) { return Open(http2::HeaderBlock(http2::GrpcRequestFields(path))); }
  // As much of `bytes` as the windows permit now, in DATA frames: tells how much that was.
  std::size_t SendData(std::uint32_t id, std::string_view bytes);
  // All of `bytes` and END_STREAM; false if the stream or the connection ends first, or within `patience` no window
  // opens.
  bool Finish(std::uint32_t id, std::string_view bytes, std::chrono::milliseconds patience = std::chrono::seconds(10));

  // Calls that each announce a message of `announced` bytes and send `bytes` of it, all at the same pace, for as long
  // as the daemon takes any. Returns how many calls are still open then, with all their bytes sent.
  int SendSideBySide(const std::string& path, int streams, std::uint32_t announced, std::size_t bytes);

  // Reads until `condition` or the end of the connection: tells whether the condition holds.
  bool Await(const std::function<bool()>& condition, std::chrono::milliseconds timeout = std::chrono::seconds(10));
  bool AwaitEnd(std::uint32_t id) {
    return Await([this, id] { return streams_[id].ended; });
  }
  bool AwaitClosed() {
    return Await([this] { return closed_; });
  }
  // A PING of its own comes back: all frames before it have been read.
  bool PingPong();

  Stream& stream(std::uint32_t id) { return streams_[id]; }
  std::uint32_t next_id() const { return next_id_; }
  const std::map<std::uint16_t, std::uint32_t>& settings() const { return settings_; }  // the daemon's
  std::optional<std::uint32_t> go_away() const { return go_away_; }                     // its error code
  std::size_t pongs() const { return pongs_; }
  std::size_t settings_acks() const { return settings_acks_; }
  bool closed() const { return closed_; }
  bool ended() const { return closed_ || go_away_.has_value(); }

 private:
  bool WaitFor(short events, std::chrono::milliseconds timeout);
  void Read();  // what is there
  void Take(int type, int flags, std::uint32_t id, std::string_view payload);
  void TakeSettings(std::string_view payload);

  UniqueFd socket_;
  std::string input_;
  std::string block_;   // a header block whose end has not come
  std::string answer_;  // acknowledgements that are not sent yet
  std::map<std::uint16_t, std::uint32_t> settings_;
  std::map<std::uint32_t, Stream> streams_;
  std::int64_t window_ = 65535;
  std::int64_t initial_window_ = 65535;
  std::optional<std::uint32_t> go_away_;
  std::size_t pongs_ = 0;
  std::size_t settings_acks_ = 0;
  std::uint32_t next_id_ = 1;
  bool settings_came_ = false;
  bool closed_ = false;
};

}  // namespace tessera::e2e
