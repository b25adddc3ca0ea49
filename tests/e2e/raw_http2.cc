#include "tests/e2e/raw_http2.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace tessera::e2e {
namespace http2 {

std::string Number(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text.push_back(static_cast<char>(value >> (8 * i)));
  return text;
}

std::string FrameHead(std::uint32_t length, int type, int flags, std::uint32_t stream) {
  return Number(length, 3) + static_cast<char>(type) + static_cast<char>(flags) + Number(stream, 4);
}

std::string Frame(int type, int flags, std::uint32_t stream, std::string_view payload) {
  return FrameHead(static_cast<std::uint32_t>(payload.size()), type, flags, stream).append(payload);
}

std::string SettingsPayload(const std::vector<std::pair<std::uint16_t, std::uint32_t>>& settings) {
  std::string payload;
  for (const auto& [setting, value] : settings) payload += Number(setting, 2) + Number(value, 4);
  return payload;
}

namespace {

// RFC 7541, section 5: a string that is not Huffman-coded.
std::string HpackString(const std::string& text) {
  std::string coded;
  if (text.size() < 127) {
    coded.push_back(static_cast<char>(text.size()));
  } else {
    coded.push_back(127);
    std::size_t rest = text.size() - 127;
    for (; rest >= 128; rest /= 128) coded.push_back(static_cast<char>(rest % 128 + 128));
    coded.push_back(static_cast<char>(rest));
  }
  return coded + text;
}

}  // namespace

std::string HeaderBlock(const Fields& fields) {
  std::string block;
  for (const auto& [name, value] : fields) block += std::string(1, '\0') + HpackString(name) + HpackString(value);
  return block;
}

Fields GrpcRequestFields(const std::string& path) {
  return {{":method", "POST"},    {":scheme", "http"}, {":path", path},
          {":authority", "host"}, {"te", "trailers"},  {"content-type", "application/grpc"}};
}

std::string GrpcPrefix(std::uint32_t length, bool compressed) {
  return static_cast<char>(compressed ? 1 : 0) + Number(length, 4);
}

std::vector<IllegalFrames> AllIllegalFrames() {
  const std::string block = HeaderBlock(GrpcRequestFields("/tessera.v1.Compute/Gemm"));
  const auto headers = [](std::string_view payload) { return Frame(kHeaders, kEndHeaders, 1, payload); };
  const std::string open = headers(block);
  return {
      {"DATA on stream 0", Frame(kData, 0, 0, "abc"), Outcome::kEither},
      {"DATA on an idle stream", Frame(kData, 0, 9, "abc"), Outcome::kEither},
      {"DATA padded beyond its end", open + Frame(kData, kPadded, 1, "\xff!"), Outcome::kEither},
      {"DATA after the end", open + Frame(kData, kEndStream, 1, "") + Frame(kData, 0, 1, "abc"), Outcome::kEither},
      {"DATA longer than any frame", open + FrameHead(0xffffff, kData, 0, 1), Outcome::kEnds},
      {"HEADERS on stream 0", Frame(kHeaders, kEndHeaders, 0, block), Outcome::kEither},
      {"HEADERS on an even stream", Frame(kHeaders, kEndHeaders, 2, block), Outcome::kEither},
      {"HEADERS on an old stream", Frame(kHeaders, kEndHeaders, 5, block) + open, Outcome::kEither},
      {"HEADERS padded beyond their end", Frame(kHeaders, kEndHeaders | kPadded, 1, "\xff!"), Outcome::kEnds},
      {"HEADERS longer than any frame", FrameHead(0xffffff, kHeaders, kEndHeaders, 1), Outcome::kEnds},
      {"HPACK: index 0", headers("\x80"), Outcome::kEnds},
      {"HPACK: index out of range", headers("\xff\x80\x80\x01"), Outcome::kEnds},
      {"HPACK: an integer that overflows", headers("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"), Outcome::kEnds},
      {"HPACK: a table that is too large", headers("\x3f\xff\xff\xff\x0f"), Outcome::kEnds},
      {"HPACK: a string that ends early",
       headers(std::string("\0\x05"
                           "ab",
                           4)),
       Outcome::kEnds},
      {"HPACK: Huffman's end of string", headers(std::string("\0\x84\xff\xff\xff\xff", 6)), Outcome::kEnds},
      {"CONTINUATION of nothing", Frame(kContinuation, kEndHeaders, 1, block), Outcome::kEnds},
      {"PING inside headers", Frame(kHeaders, 0, 1, block) + Frame(kPing, 0, 0, "pingpong"), Outcome::kEnds},
      {"PRIORITY of 4 bytes", Frame(kPriority, 0, 1, "abcd"), Outcome::kEither},
      {"RST_STREAM of 3 bytes", open + Frame(kRstStream, 0, 1, "abc"), Outcome::kEnds},
      {"RST_STREAM of stream 0", Frame(kRstStream, 0, 0, "abcd"), Outcome::kEither},
      {"RST_STREAM of an idle stream", Frame(kRstStream, 0, 7, "abcd"), Outcome::kEither},
      {"SETTINGS of 5 bytes", Frame(kSettings, 0, 0, "abcde"), Outcome::kEnds},
      {"SETTINGS of a stream", Frame(kSettings, 0, 1, ""), Outcome::kEnds},
      {"SETTINGS that acknowledge with values", Frame(kSettings, kAck, 0, "abcdef"), Outcome::kEnds},
      {"SETTINGS of a window of 2^31", Frame(kSettings, 0, 0, SettingsPayload({{kInitialWindowSize, 1U << 31U}})),
       Outcome::kEnds},
      {"SETTINGS longer than any frame", FrameHead(0xfffffc, kSettings, 0, 0), Outcome::kEnds},
      {"PUSH_PROMISE", Frame(kPushPromise, kEndHeaders, 1, Number(2, 4)), Outcome::kEither},
      {"PING of 7 bytes", Frame(kPing, 0, 0, "pingpon"), Outcome::kEnds},
      {"PING of a stream", Frame(kPing, 0, 1, "pingpong"), Outcome::kEither},
      {"GOAWAY of 3 bytes", Frame(kGoAway, 0, 0, "abc"), Outcome::kEnds},
      {"WINDOW_UPDATE of 3 bytes", Frame(kWindowUpdate, 0, 0, "abc"), Outcome::kEnds},
      {"WINDOW_UPDATE by 0", Frame(kWindowUpdate, 0, 0, Number(0, 4)), Outcome::kEnds},
      {"WINDOW_UPDATE beyond 2^31-1", Frame(kWindowUpdate, 0, 0, Number(0x7fffffff, 4)), Outcome::kEither},
      {"WINDOW_UPDATE beyond 2^31-1 of a stream", open + Frame(kWindowUpdate, 0, 1, Number(0x7fffffff, 4)),
       Outcome::kEither},
      {"unknown types", Frame(0x0b, 0xff, 77, std::string(16384, 'x')) + Frame(0xfa, 0xff, 0, ""), Outcome::kGoesOn},
      {"unknown settings", Frame(kSettings, 0, 0, SettingsPayload({{0x7777, 7}, {0xffff, 0xffffffff}})),
       Outcome::kGoesOn},
  };
}

std::string RandomFrames(std::mt19937& random) {
  const auto below = [&](std::uint32_t end) { return static_cast<std::uint32_t>(random() % end); };
  std::string frames;
  for (std::uint32_t count = 1 + below(40); count > 0; --count) {
    const std::uint32_t type = below(11);
    const std::uint32_t stream = below(4) == 0 ? below(9) : 1 + 2 * below(6);
    static constexpr std::uint32_t kRightSizes[] = {20, 0, 5, 4, 6, 30, 8, 8, 4, 10, 3};
    std::string payload;
    const std::uint32_t bytes = below(8) == 0 ? below(64) : kRightSizes[type];
    for (std::uint32_t i = 0; i < bytes; ++i) payload.push_back(static_cast<char>(below(2) == 0 ? 0 : below(256)));
    if (type == kHeaders)
      payload = HeaderBlock(GrpcRequestFields(below(2) == 0 ? "/tessera.v1.Compute/Gemm" : "/no.such/Method"));
    if (type == kData && below(2) == 0) payload = GrpcPrefix(below(4)) + payload.substr(0, below(8));
    const std::uint32_t flags = below(4) == 0 ? below(256) : below(2) * kEndStream + kEndHeaders;
    frames += Frame(static_cast<int>(type), static_cast<int>(type == kSettings ? 0 : flags), stream, payload);
  }
  if (below(8) == 0) frames.resize(below(static_cast<std::uint32_t>(frames.size())));
  return frames;
}

}  // namespace http2

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kFrameHeadBytes = 9;
constexpr std::size_t kFrameBytes = 16384;  // every receiver takes that much

std::uint64_t ReadNumber(std::string_view bytes) {
  std::uint64_t value = 0;
  for (const char byte : bytes) value = value << 8 | static_cast<std::uint8_t>(byte);
  return value;
}

// Reads the daemon's header blocks. It is told to keep no dynamic table, so that fields are literals or of the static
// table, whose names this reader does not need: it calls them "#<index>".
class HpackReader {
 public:
  explicit HpackReader(std::string_view block) : rest_(block) {}

  void ReadInto(std::map<std::string, std::string, std::less<>>& headers) {
    while (!rest_.empty()) {
      const auto first = static_cast<std::uint8_t>(rest_[0]);
      if (first & 0x80) {
        headers["#" + std::to_string(Integer(7))];
      } else if ((first & 0xe0) == 0x20) {
        Integer(5);  // a new size of the table
      } else {
        const std::uint64_t index = Integer((first & 0x40) ? 6 : 4);
        const std::string name = index == 0 ? String() : "#" + std::to_string(index);
        headers[name] = String();
      }
    }
  }

 private:
  std::uint64_t Integer(int prefix_bits) {
    const std::uint64_t mask = (1U << prefix_bits) - 1;
    std::uint64_t value = Byte() & mask;
    if (value < mask) return value;
    for (int shift = 0; shift < 56; shift += 7) {
      const std::uint8_t byte = Byte();
      value += static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) break;
    }
    return value;
  }

  std::string String() {
    const bool huffman = !rest_.empty() && (rest_[0] & 0x80) != 0;
    const std::uint64_t length = std::min<std::uint64_t>(Integer(7), rest_.size());
    std::string text(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return huffman ? "(Huffman)" : text;
  }

  std::uint8_t Byte() {
    if (rest_.empty()) return 0;
    const char byte = rest_[0];
    rest_.remove_prefix(1);
    return static_cast<std::uint8_t>(byte);
  }

  std::string_view rest_;
};

}  // namespace

std::string RawHttp2::Stream::Text() const {
  if (headers.contains("grpc-status")) return "status " + Header("grpc-status") + ": " + Header("grpc-message");
  if (reset.has_value()) return "reset " + std::to_string(*reset);
  return ended ? "ended" : "open";
}

std::string RawHttp2::Stream::Header(std::string_view name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

RawHttp2::RawHttp2(const std::string& socket) : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  EXPECT_LT(socket.size(), sizeof(address.sun_path));
  socket.copy(address.sun_path, sizeof(address.sun_path) - 1);
  EXPECT_EQ(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0)
      << std::strerror(errno);
}

std::string RawHttp2::DefaultStart() {
  return std::string(http2::kPreface) +
         http2::Frame(http2::kSettings, 0, 0, http2::SettingsPayload({{http2::kHeaderTableSize, 0}}));
}

bool RawHttp2::Start(const std::string& preface_and_settings) {
  return Send(preface_and_settings) && Await([this] { return settings_came_; });
}

bool RawHttp2::WaitFor(short events, std::chrono::milliseconds timeout) {
  pollfd entry{.fd = socket_.get(), .events = events, .revents = 0};
  return ::poll(&entry, 1, static_cast<int>(std::max<std::int64_t>(timeout.count(), 0))) > 0;
}

bool RawHttp2::Send(std::string_view bytes, std::chrono::milliseconds patience) {
  const std::string all = std::exchange(answer_, {}).append(bytes);
  std::string_view rest = all;
  auto last_progress = Clock::now();
  while (!rest.empty() && !closed_) {
    const ssize_t sent = ::send(socket_.get(), rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
      rest.remove_prefix(static_cast<std::size_t>(sent));
      last_progress = Clock::now();
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (Clock::now() - last_progress > patience) return false;
      WaitFor(POLLIN | POLLOUT, std::chrono::milliseconds(100));
    } else {
      Read();  // the daemon may have said why
      closed_ = true;
    }
    Read();
  }
  return rest.empty();
}

std::size_t RawHttp2::SendUnread(std::string_view bytes, std::chrono::milliseconds patience) {
  std::size_t all = 0;
  while (all < bytes.size()) {
    const ssize_t sent = ::send(socket_.get(), bytes.data() + all, bytes.size() - all, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
      all += static_cast<std::size_t>(sent);
    } else if ((errno != EAGAIN && errno != EWOULDBLOCK) || !WaitFor(POLLOUT, patience)) {
      break;
    }
  }
  return all;
}

std::uint32_t RawHttp2::Open(std::string_view block) {
  const std::uint32_t id = next_id_;
  next_id_ += 2;
  streams_[id].window = initial_window_;
  std::string frames;
  int type = http2::kHeaders;
  do {
    const std::string_view part = block.substr(0, kFrameBytes);
    block.remove_prefix(part.size());
    frames += http2::Frame(type, block.empty() ? http2::kEndHeaders : http2::kNoFlags, id, part);
    type = http2::kContinuation;
  } while (!block.empty());
  Send(frames);
  return id;
}

std::size_t RawHttp2::SendData(std::uint32_t id, std::string_view bytes) {
  Stream& stream = streams_[id];
  std::size_t all = 0;
  while (all < bytes.size() && !closed_ && !stream.ended) {
    const auto room = static_cast<std::size_t>(std::max<std::int64_t>(std::min(stream.window, window_), 0));
    const std::size_t now = std::min({room, kFrameBytes, bytes.size() - all});
    if (now == 0) break;
    stream.window -= static_cast<std::int64_t>(now);
    window_ -= static_cast<std::int64_t>(now);
    if (!Send(http2::Frame(http2::kData, 0, id, bytes.substr(all, now)))) break;
    all += now;
  }
  return all;
}

bool RawHttp2::Finish(std::uint32_t id, std::string_view bytes, std::chrono::milliseconds patience) {
  const Stream& stream = streams_[id];
  std::size_t all = 0;
  while (all < bytes.size()) {
    all += SendData(id, bytes.substr(all));
    if (all == bytes.size()) break;
    if (!Await([&] { return stream.ended || (stream.window > 0 && window_ > 0); }, patience) || stream.ended)
      return false;
  }
  return Send(http2::Frame(http2::kData, http2::kEndStream, id, ""));
}

int RawHttp2::SendSideBySide(const std::string& path, int streams, std::uint32_t announced, std::size_t bytes) {
  const std::string content(std::min<std::size_t>(bytes, 1 << 20), 'x');
  std::map<std::uint32_t, std::size_t> sent;  // bytes of a stream
  for (int i = 0; i < streams; ++i) {
    const std::uint32_t id = OpenGrpc(path);
    SendData(id, http2::GrpcPrefix(announced));
    sent[id] = 0;
  }
  const auto unfinished = [&](const auto& entry) { return !streams_[entry.first].ended && entry.second < bytes; };
  auto last_progress = Clock::now();
  while (!closed_ && std::ranges::any_of(sent, unfinished) && Clock::now() - last_progress < std::chrono::seconds(2)) {
    for (auto& [id, all] : sent) {
      if (all >= bytes) continue;
      const std::size_t now = SendData(id, content);
      if (now > 0) last_progress = Clock::now();
      all += now;
    }
    Await([] { return false; }, std::chrono::milliseconds(2));
  }
  return static_cast<int>(std::ranges::count_if(
      sent, [&](const auto& entry) { return entry.second >= bytes && !closed_ && !streams_[entry.first].ended; }));
}

bool RawHttp2::Await(const std::function<bool()>& condition, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  Read();
  while (!condition() && !closed_) {
    if (!answer_.empty()) Send("");
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    WaitFor(POLLIN, std::min(left, std::chrono::milliseconds(100)));
    Read();
  }
  return condition();
}

bool RawHttp2::PingPong() {
  const std::size_t before = pongs_;
  return Send(http2::Frame(http2::kPing, 0, 0, "pingpong")) && Await([&] { return pongs_ > before; });
}

void RawHttp2::Read() {
  std::array<char, 65536> bytes;
  for (;;) {
    const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      input_.append(bytes.data(), static_cast<std::size_t>(got));
      continue;
    }
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) closed_ = true;
    break;
  }
  std::string_view rest = input_;
  while (rest.size() >= kFrameHeadBytes) {
    const std::size_t length = ReadNumber(rest.substr(0, 3));
    if (rest.size() < kFrameHeadBytes + length) break;
    Take(rest[3], rest[4], static_cast<std::uint32_t>(ReadNumber(rest.substr(5, 4))),
         rest.substr(kFrameHeadBytes, length));
    rest.remove_prefix(kFrameHeadBytes + length);
  }
  input_.erase(0, input_.size() - rest.size());
}

void RawHttp2::Take(int type, int flags, std::uint32_t id, std::string_view payload) {
  switch (type) {
    case http2::kSettings:
      if (flags & http2::kAck) {
        ++settings_acks_;
      } else {
        TakeSettings(payload);
      }
      break;
    case http2::kPing:
      if (flags & http2::kAck) {
        ++pongs_;
      } else {
        answer_ += http2::Frame(http2::kPing, http2::kAck, 0, payload);
      }
      break;
    case http2::kWindowUpdate:
      (id == 0 ? window_ : streams_[id].window) += static_cast<std::int64_t>(ReadNumber(payload));
      break;
    case http2::kGoAway:
      // Of several the last one counts: gRPC first announces the end of the connection, then tells why.
      go_away_ = static_cast<std::uint32_t>(ReadNumber(payload.substr(4, 4)));
      break;
    case http2::kRstStream:
      streams_[id].reset = static_cast<std::uint32_t>(ReadNumber(payload));
      streams_[id].ended = true;
      break;
    case http2::kHeaders:
    case http2::kContinuation:
      block_.append(payload);
      if (flags & http2::kEndHeaders) {
        HpackReader(block_).ReadInto(streams_[id].headers);
        block_.clear();
      }
      break;
    default:
      break;
  }
  if ((type == http2::kHeaders || type == http2::kData) && (flags & http2::kEndStream)) streams_[id].ended = true;
}

void RawHttp2::TakeSettings(std::string_view payload) {
  for (; payload.size() >= 6; payload.remove_prefix(6)) {
    const auto setting = static_cast<std::uint16_t>(ReadNumber(payload.substr(0, 2)));
    const auto value = static_cast<std::uint32_t>(ReadNumber(payload.substr(2, 4)));
    settings_[setting] = value;
    if (setting != http2::kInitialWindowSize) continue;
    for (auto& [id, stream] : streams_) stream.window += value - initial_window_;
    initial_window_ = value;
  }
  settings_came_ = true;
  answer_ += http2::Frame(http2::kSettings, http2::kAck, 0, "");
}

}  // namespace tessera::e2e
