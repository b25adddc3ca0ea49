#include "client/tensor_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "common/text.h"
#include "nlohmann/json.hpp"

namespace tessera::client {
namespace {

static_assert(std::endian::native == std::endian::little, "both formats are read and written as memory holds them");

enum class Format { kNpy, kSafetensors };

constexpr std::string_view kNpyExtension = ".npy";
constexpr std::string_view kSafetensorsExtension = ".safetensors";
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::uint64_t kSafetensorsPrefixBytes = 8;  // the header's length, a little-endian u64

// "\x93NUMPY", the version (major, minor), then the header's length as u16 (version 1) or u32.
constexpr std::string_view kNpyMagic = "\x93NUMPY";
constexpr std::size_t kNpyLengthOffset = kNpyMagic.size() + 2;
constexpr std::size_t kNpyAlignment = 64;  // of the data, as NumPy writes it

struct NpyTypeRow {
  DType dtype;
  std::string_view descr;
};

constexpr std::array<NpyTypeRow, 4> kNpyTypes = {{
    {DType::kF32, "<f4"},
    {DType::kF16, "<f2"},
    {DType::kS8, "|i1"},
    {DType::kS32, "<i4"},
}};

std::string NpyTypeNames() {
  return absl::StrJoin(kNpyTypes, ", ",
                       [](std::string* out, const NpyTypeRow& row) { absl::StrAppend(out, Av(row.descr)); });
}

absl::Status Malformed(const std::string& message) {
  return absl::InvalidArgumentError(message);
}

absl::Status Annotate(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status SystemError(std::string_view what) {
  const int error = errno;
  return ErrnoStatus(absl::ErrnoToStatusCode(error), what, error);
}

// Text of a file, made fit for a message: escaped and bounded.
std::string Quoted(std::string_view text) {
  constexpr std::size_t kShownBytesMax = 100;
  const bool cut = text.size() > kShownBytesMax;
  return absl::StrCat("'", absl::Utf8SafeCEscape(Av(text.substr(0, kShownBytesMax))), cut ? "...'" : "'");
}

std::string ShapeText(const std::vector<std::int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::optional<Format> FormatOf(std::string_view path) {
  if (path.ends_with(kNpyExtension)) return Format::kNpy;
  if (path.ends_with(kSafetensorsExtension)) return Format::kSafetensors;
  return std::nullopt;
}

absl::Status UnknownExtension(std::string_view path) {
  return Malformed(absl::StrCat(Av(path), ": expected a file name that ends with ", Av(kNpyExtension), " or ",
                                Av(kSafetensorsExtension)));
}

// Checks the extents and returns the bytes of a packed tensor. Zero extents count as one in the overflow check, so
// that the strides fit too.
absl::StatusOr<std::uint64_t> PackedBytes(const std::vector<std::int64_t>& shape, std::size_t element_bytes) {
  if (shape.size() > kTensorFileRankMax) {
    return Malformed(absl::StrCat("rank ", shape.size(), ": at most ", kTensorFileRankMax, " dimensions are allowed"));
  }
  auto span_bytes = static_cast<std::int64_t>(element_bytes);
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return Malformed(absl::StrCat("shape ", ShapeText(shape), ": negative extent"));
    if (__builtin_mul_overflow(span_bytes, std::max<std::int64_t>(extent, 1), &span_bytes)) {
      return Malformed(absl::StrCat("shape ", ShapeText(shape), ": its size overflows 63 bits"));
    }
    empty = empty || extent == 0;
  }
  return empty ? 0 : static_cast<std::uint64_t>(span_bytes);
}

enum class Order { kRowMajor, kColumnMajor };

// Strides of a shape that PackedBytes accepted.
std::vector<std::int64_t> PackedStrides(const std::vector<std::int64_t>& shape, Order order) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const std::size_t axis = order == Order::kColumnMajor ? i : shape.size() - 1 - i;
    strides[axis] = stride;
    stride *= std::max<std::int64_t>(shape[axis], 1);
  }
  return strides;
}

// ---- Reading: files ----

struct OpenedFile {
  UniqueFd fd;
  std::uint64_t bytes = 0;
};

absl::StatusOr<OpenedFile> OpenRegularFile(const std::string& path) {
  // O_NONBLOCK: a FIFO of that name must fail the check below, not wait for a writer.
  OpenedFile file{UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY))};
  if (!file.fd) return SystemError("open");
  struct stat info {};
  if (::fstat(file.fd.get(), &info) != 0) return SystemError("fstat");
  if (!S_ISREG(info.st_mode)) return Malformed("not a regular file");
  file.bytes = static_cast<std::uint64_t>(info.st_size);
  return file;
}

absl::Status ReadExactly(int fd, std::uint64_t offset, std::span<std::byte> destination) {
  constexpr auto kOffsetMax = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (offset > kOffsetMax || destination.size() > kOffsetMax - offset) {
    return Malformed(absl::StrCat("byte ", offset, ": beyond any file"));
  }
  while (!destination.empty()) {
    const ssize_t got = ::pread(fd, destination.data(), destination.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(absl::StrCat("read at byte ", offset));
    if (got == 0) {
      return absl::DataLossError(absl::StrCat("the file ends at byte ", offset, ": cut since it was opened"));
    }
    offset += static_cast<std::uint64_t>(got);
    destination = destination.subspan(static_cast<std::size_t>(got));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadText(const OpenedFile& file, std::uint64_t offset, std::uint64_t bytes) {
  std::string text(bytes, '\0');
  RETURN_IF_ERROR(ReadExactly(file.fd.get(), offset, std::as_writable_bytes(std::span(text))));
  return text;
}

// ---- Reading: .npy ----

struct NpyHeader {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
};

// Parses the one Python literal that a .npy header may be: a dict of exactly `descr` (string), `fortran_order` (bool)
// and `shape` (tuple of ints), in any order. No escapes, no other types, no expressions.
class NpyHeaderParser {
 public:
  explicit NpyHeaderParser(std::string_view text) : text_(text) {}

  absl::StatusOr<NpyHeader> Parse() {
    if (!Take('{')) return Error("expected '{'");
    while (!Take('}')) {
      RETURN_IF_ERROR(ParseItem());
      if (!Take(',') && Peek() != '}') return Error("expected ',' or '}'");
    }
    if (Peek() != '\0' || place_ != text_.size()) return Error("expected nothing after '}'");
    for (const std::string_view key : {"descr", "fortran_order", "shape"}) {
      if (!seen_.contains(key)) return Error(absl::StrCat("key ", Quoted(key), " is missing"));
    }
    return std::move(header_);
  }

 private:
  absl::Status Error(std::string_view what) const {
    return Malformed(absl::StrCat("header byte ", place_, ": ", Av(what)));
  }

  // The next character that is no white space, or NUL at the end.
  char Peek() {
    while (place_ < text_.size() && std::string_view(" \t\r\n").find(text_[place_]) != std::string_view::npos) ++place_;
    return place_ < text_.size() ? text_[place_] : '\0';
  }

  bool Take(char wanted) {
    if (Peek() != wanted || place_ == text_.size()) return false;
    ++place_;
    return true;
  }

  bool TakeWord(std::string_view word) {
    Peek();
    if (!text_.substr(place_).starts_with(word)) return false;
    place_ += word.size();
    return true;
  }

  absl::Status ParseItem() {
    ASSIGN_OR_RETURN(const std::string key, ParseString("a key"));
    if (!Take(':')) return Error("expected ':'");
    if (!seen_.insert(key).second) return Error(absl::StrCat("key ", Quoted(key), " appears twice"));
    if (key == "descr") return ParseDescr();
    if (key == "fortran_order") return ParseFortranOrder();
    if (key == "shape") return ParseShape();
    return Error(absl::StrCat("unknown key ", Quoted(key)));
  }

  absl::Status ParseDescr() {
    if (Peek() == '[') return Error("descr is a structured type, which is not supported");
    ASSIGN_OR_RETURN(header_.descr, ParseString("descr"));
    return absl::OkStatus();
  }

  absl::Status ParseFortranOrder() {
    if (TakeWord("True")) {
      header_.fortran_order = true;
    } else if (!TakeWord("False")) {
      return Error("fortran_order: expected True or False");
    }
    return absl::OkStatus();
  }

  absl::Status ParseShape() {
    if (!Take('(')) return Error("shape: expected a tuple");
    bool comma = true;
    while (!Take(')')) {
      if (!comma) return Error("shape: expected ',' or ')'");
      if (header_.shape.size() == kTensorFileRankMax) {
        return Error(absl::StrCat("shape: more than ", kTensorFileRankMax, " dimensions"));
      }
      ASSIGN_OR_RETURN(const std::int64_t extent, ParseExtent());
      header_.shape.push_back(extent);
      comma = Take(',');
    }
    // "(3)" is a number in Python, not a tuple.
    if (header_.shape.size() == 1 && !comma) return Error("shape: a tuple of one extent needs a comma");
    return absl::OkStatus();
  }

  absl::StatusOr<std::int64_t> ParseExtent() {
    if (Peek() == '-') return Error("shape: negative extent");
    const std::size_t begin = place_;
    std::int64_t value = 0;
    for (; place_ < text_.size() && text_[place_] >= '0' && text_[place_] <= '9'; ++place_) {
      const int digit = text_[place_] - '0';
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, digit, &value)) {
        return Error("shape: extent over 63 bits");
      }
    }
    if (place_ == begin) return Error("shape: expected a decimal integer");
    if (text_[begin] == '0' && place_ - begin > 1) return Error("shape: extent with a leading zero");
    return value;
  }

  absl::StatusOr<std::string> ParseString(std::string_view what) {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') return Error(absl::StrCat("expected ", Av(what), ", a quoted string"));
    const std::size_t begin = ++place_;
    const std::size_t end = text_.find(quote, begin);
    if (end == std::string_view::npos) return Error("string without an end");
    const std::string_view body = text_.substr(begin, end - begin);
    for (const char c : body) {
      if (c == '\\' || c < ' ' || c > '~') return Error("string with an escape or a character outside ASCII");
    }
    place_ = end + 1;
    return std::string(body);
  }

  std::string_view text_;
  std::size_t place_ = 0;
  std::set<std::string, std::less<>> seen_;
  NpyHeader header_;
};

absl::StatusOr<DType> DTypeFromDescr(std::string_view descr) {
  for (const NpyTypeRow& row : kNpyTypes) {
    if (row.descr == descr) return row.dtype;
  }
  if (descr.starts_with('>')) {
    return Malformed(absl::StrCat("descr ", Quoted(descr), " is big-endian; supported are ", NpyTypeNames(),
                                  " (in NumPy: array.astype(array.dtype.newbyteorder('<')))"));
  }
  return Malformed(absl::StrCat("descr ", Quoted(descr), " is not supported; supported are ", NpyTypeNames()));
}

struct NpyText {
  std::string text;
  std::uint64_t data_offset = 0;
};

absl::StatusOr<NpyText> ReadNpyText(const OpenedFile& file) {
  if (file.bytes < kNpyLengthOffset + sizeof(std::uint16_t)) return Malformed("too short for a .npy file");
  ASSIGN_OR_RETURN(const std::string prefix, ReadText(file, 0, kNpyLengthOffset));
  if (!std::string_view(prefix).starts_with(kNpyMagic)) return Malformed("byte 0: not the magic of a .npy file");
  const auto major = static_cast<unsigned char>(prefix[kNpyMagic.size()]);
  const auto minor = static_cast<unsigned char>(prefix[kNpyMagic.size() + 1]);
  if (major < 1 || major > 3 || minor != 0) {
    return Malformed(absl::StrCat("byte 6: .npy version ", major, ".", minor, "; supported are 1.0, 2.0 and 3.0"));
  }
  const std::uint64_t length_bytes = major == 1 ? sizeof(std::uint16_t) : sizeof(std::uint32_t);
  const std::uint64_t header_offset = kNpyLengthOffset + length_bytes;
  if (file.bytes < header_offset) return Malformed("too short for a .npy file");
  ASSIGN_OR_RETURN(const std::string length_text, ReadText(file, kNpyLengthOffset, length_bytes));
  std::uint64_t length = 0;
  std::memcpy(&length, length_text.data(), length_text.size());
  if (length > kNpyHeaderBytesMax) {
    return Malformed(absl::StrCat("byte 8: header of ", length, " bytes, over the limit of ", kNpyHeaderBytesMax));
  }
  if (length > file.bytes - header_offset) {
    return Malformed(absl::StrCat("byte 8: header of ", length, " bytes in a file of ", file.bytes));
  }
  ASSIGN_OR_RETURN(std::string text, ReadText(file, header_offset, length));
  return NpyText{std::move(text), header_offset + length};
}

absl::StatusOr<std::vector<TensorFileEntry>> ReadNpyEntries(const OpenedFile& file) {
  ASSIGN_OR_RETURN(const NpyText header_text, ReadNpyText(file));
  ASSIGN_OR_RETURN(NpyHeader header, NpyHeaderParser(header_text.text).Parse());
  ASSIGN_OR_RETURN(const DType dtype, DTypeFromDescr(header.descr));
  ASSIGN_OR_RETURN(const std::uint64_t bytes, PackedBytes(header.shape, DTypeBytes(dtype)));
  const std::uint64_t data_bytes = file.bytes - header_text.data_offset;
  if (bytes != data_bytes) {
    return Malformed(absl::StrCat("shape ", ShapeText(header.shape), " of ", header.descr, " needs ", bytes,
                                  " bytes, but ", data_bytes, " follow the header (byte ", header_text.data_offset,
                                  ")"));
  }
  TensorFileEntry entry;
  entry.dtype = dtype;
  entry.strides = PackedStrides(header.shape, header.fortran_order ? Order::kColumnMajor : Order::kRowMajor);
  entry.shape = std::move(header.shape);
  entry.file_offset = header_text.data_offset;
  entry.bytes = bytes;
  entry.dtype_name = std::move(header.descr);
  return std::vector<TensorFileEntry>{std::move(entry)};
}

// ---- Reading: .safetensors ----

DType DTypeFromSafetensors(std::string_view name) {
  for (const DTypeRow& row : kDTypeRows) {
    if (row.safetensors == name) return row.dtype;
  }
  return DType::kUnspecified;
}

// Turns the header's JSON events into entries, whose `file_offset` is still relative to the data. Events rather than a
// document: keys that appear twice are seen, and deep nesting in ignored values costs neither stack nor memory.
class SafetensorsHeader : public nlohmann::json_sax<nlohmann::json> {
 public:
  absl::StatusOr<std::vector<TensorFileEntry>> Parse(const std::string& text) {
    // The parser would skip a byte order mark, which the format forbids.
    if (!text.starts_with('{')) return Malformed("header byte 0: expected '{'");
    const bool parsed = nlohmann::json::sax_parse(text, this);
    RETURN_IF_ERROR(error_);
    if (!parsed) return Malformed("the header is not JSON");
    return std::move(entries_);
  }

  bool null() override { return Scalar("null"); }
  bool boolean(bool) override { return Scalar("a bool"); }
  bool number_integer(std::int64_t) override { return Scalar("a negative number"); }
  bool number_float(double, const std::string&) override { return Scalar("a fraction or a number over 64 bits"); }
  bool binary(nlohmann::json::binary_t&) override { return Scalar("binary data"); }

  bool number_unsigned(std::uint64_t value) override {
    if (Ignoring() || place_ != Place::kList) return Scalar("a number");
    return field_ == Field::kShape ? AddExtent(value) : AddOffset(value);
  }

  bool string(std::string& value) override {
    if (Ignoring() || place_ != Place::kTensor || field_ != Field::kDType) return Scalar("a string");
    entry_.dtype_name = value;
    return true;
  }

  bool start_object(std::size_t) override {
    if (Ignoring()) return OpenIgnored();
    if (place_ == Place::kTensor || place_ == Place::kList) return Unexpected("an object");
    place_ = place_ == Place::kStart ? Place::kHeader : Place::kTensor;
    return true;
  }

  bool key(std::string& name) override {
    if (Ignoring()) return true;
    if (place_ == Place::kTensor) return StartField(name);
    if (name == kMetadataKey) {
      ignore_next_ = true;
      return true;
    }
    entry_ = TensorFileEntry{};
    entry_.name = name;
    offsets_.clear();
    seen_ = {};
    field_ = Field::kNone;
    in_tensor_ = true;
    return true;
  }

  bool end_object() override {
    if (ignored_depth_ > 0) return CloseIgnored();
    if (place_ == Place::kHeader) return true;
    place_ = Place::kHeader;
    return FinishTensor();
  }

  bool start_array(std::size_t) override {
    if (Ignoring()) return OpenIgnored();
    if (place_ != Place::kTensor || (field_ != Field::kShape && field_ != Field::kOffsets)) return Unexpected("a list");
    place_ = Place::kList;
    return true;
  }

  bool end_array() override {
    if (ignored_depth_ > 0) return CloseIgnored();
    place_ = Place::kTensor;
    return true;
  }

  // The exception is only handed over, never thrown; its text may quote all of the header, so the position must do.
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    error_ = Malformed(absl::StrCat("header byte ", position, ": not JSON"));
    return false;
  }

 private:
  enum class Place { kStart, kHeader, kTensor, kList };
  enum class Field { kDType, kShape, kOffsets, kNone };
  static constexpr std::array<std::string_view, 3> kFieldNames = {"dtype", "shape", "data_offsets"};  // by Field

  bool Ignoring() const { return ignore_next_ || ignored_depth_ > 0; }

  bool OpenIgnored() {
    ignore_next_ = false;
    ++ignored_depth_;
    return true;
  }

  bool CloseIgnored() {
    --ignored_depth_;
    return true;
  }

  bool Scalar(std::string_view what) {
    if (!Ignoring()) return Unexpected(what);
    ignore_next_ = false;
    return true;
  }

  bool Fail(std::string_view what) {
    const std::string where = in_tensor_ ? absl::StrCat("tensor ", Quoted(entry_.name), ": ") : "header: ";
    error_ = Malformed(absl::StrCat(where, Av(what)));
    return false;
  }

  bool Unexpected(std::string_view found) {
    if (field_ == Field::kNone) return Fail(absl::StrCat("expected an object, found ", Av(found)));
    const std::string_view wanted = field_ == Field::kDType ? "a string" : "a list of non-negative integers";
    return Fail(absl::StrCat(Av(kFieldNames[static_cast<std::size_t>(field_)]), ": expected ", Av(wanted), ", found ",
                             Av(found)));
  }

  // Unknown fields are ignored, as the format's own library does.
  bool StartField(std::string_view name) {
    const auto at = std::find(kFieldNames.begin(), kFieldNames.end(), name);
    if (at == kFieldNames.end()) {
      ignore_next_ = true;
      return true;
    }
    const auto idx = static_cast<std::size_t>(at - kFieldNames.begin());
    field_ = static_cast<Field>(idx);
    if (seen_[idx]) return Fail(absl::StrCat(Av(name), " appears twice"));
    seen_[idx] = true;
    return true;
  }

  bool AddExtent(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return Fail("shape: extent over 63 bits");
    }
    if (entry_.shape.size() == kTensorFileRankMax) {
      return Fail(absl::StrCat("shape: more than ", kTensorFileRankMax, " dimensions"));
    }
    entry_.shape.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool AddOffset(std::uint64_t value) {
    if (offsets_.size() == 2) return Fail("data_offsets: more than two numbers");
    offsets_.push_back(value);
    return true;
  }

  bool FinishTensor() {
    for (std::size_t i = 0; i < seen_.size(); ++i) {
      if (!seen_[i]) return Fail(absl::StrCat(Av(kFieldNames[i]), " is missing"));
    }
    if (offsets_.size() != 2) return Fail("data_offsets: expected two numbers");
    if (offsets_[1] < offsets_[0]) return Fail(absl::StrCat(OffsetsText(), " end before they begin"));
    entry_.file_offset = offsets_[0];
    entry_.bytes = offsets_[1] - offsets_[0];
    entry_.dtype = DTypeFromSafetensors(entry_.dtype_name);
    const bool known = IsKnown(entry_.dtype);
    const absl::StatusOr<std::uint64_t> bytes = PackedBytes(entry_.shape, known ? DTypeBytes(entry_.dtype) : 1);
    if (!bytes.ok()) return Fail(MessageOf(bytes.status()));
    if (known && *bytes != entry_.bytes) {
      return Fail(absl::StrCat(OffsetsText(), " hold ", entry_.bytes, " bytes, but shape ", ShapeText(entry_.shape),
                               " of ", entry_.dtype_name, " needs ", *bytes));
    }
    entry_.strides = PackedStrides(entry_.shape, Order::kRowMajor);
    entries_.push_back(std::move(entry_));
    field_ = Field::kNone;
    in_tensor_ = false;
    return true;
  }

  std::string OffsetsText() const { return absl::StrCat("data_offsets [", offsets_[0], ", ", offsets_[1], "]"); }

  std::vector<TensorFileEntry> entries_;
  absl::Status error_;
  Place place_ = Place::kStart;
  Field field_ = Field::kNone;
  bool in_tensor_ = false;  // `entry_` names the tensor at hand
  TensorFileEntry entry_;
  std::vector<std::uint64_t> offsets_;
  std::array<bool, kFieldNames.size()> seen_{};
  bool ignore_next_ = false;         // the next value belongs to a key without meaning here
  std::uint64_t ignored_depth_ = 0;  // open objects and lists of such a value
};

// Sorts by offset and checks that the tensors fill the data without overlap, hole or rest, as the format demands.
absl::Status CheckLayout(std::vector<TensorFileEntry>& entries, std::uint64_t data_bytes) {
  std::stable_sort(entries.begin(), entries.end(), [](const TensorFileEntry& a, const TensorFileEntry& b) {
    return std::pair(a.file_offset, a.bytes) < std::pair(b.file_offset, b.bytes);
  });
  std::uint64_t filled = 0;
  for (const TensorFileEntry& entry : entries) {
    const std::uint64_t end = entry.file_offset + entry.bytes;
    const std::string where =
        absl::StrCat("tensor ", Quoted(entry.name), ": data_offsets [", entry.file_offset, ", ", end, "]");
    if (end > data_bytes) return Malformed(absl::StrCat(where, " lie outside the ", data_bytes, " bytes of data"));
    if (entry.file_offset < filled) return Malformed(absl::StrCat(where, " overlap another tensor"));
    if (entry.file_offset > filled) return Malformed(absl::StrCat(where, " leave a hole from ", filled));
    filled = end;
  }
  if (filled == data_bytes) return absl::OkStatus();
  return Malformed(absl::StrCat(data_bytes - filled, " trailing bytes after the last tensor"));
}

absl::StatusOr<std::vector<TensorFileEntry>> ReadSafetensorsEntries(const OpenedFile& file) {
  if (file.bytes < kSafetensorsPrefixBytes) return Malformed("too short for a .safetensors file");
  ASSIGN_OR_RETURN(const std::string prefix, ReadText(file, 0, kSafetensorsPrefixBytes));
  std::uint64_t length = 0;
  std::memcpy(&length, prefix.data(), sizeof(length));
  if (length > kSafetensorsHeaderBytesMax) {
    return Malformed(
        absl::StrCat("byte 0: header of ", length, " bytes, over the limit of ", kSafetensorsHeaderBytesMax));
  }
  if (length > file.bytes - kSafetensorsPrefixBytes) {
    return Malformed(absl::StrCat("byte 0: header of ", length, " bytes in a file of ", file.bytes));
  }
  ASSIGN_OR_RETURN(const std::string text, ReadText(file, kSafetensorsPrefixBytes, length));
  ASSIGN_OR_RETURN(std::vector<TensorFileEntry> entries, SafetensorsHeader().Parse(text));
  const std::uint64_t data_offset = kSafetensorsPrefixBytes + length;
  RETURN_IF_ERROR(CheckLayout(entries, file.bytes - data_offset));
  for (TensorFileEntry& entry : entries) entry.file_offset += data_offset;
  return entries;
}

// ---- Finding ----

// "3 tensors: 'a', 'b', 'c'", bounded.
std::string Inventory(const std::vector<TensorFileEntry>& entries) {
  constexpr std::size_t kNamesMax = 20;
  if (entries.size() == 1 && entries[0].name.empty()) return "one tensor, without a name";
  std::vector<std::string> names;
  for (const TensorFileEntry& entry : entries) {
    if (names.size() == kNamesMax) break;
    names.push_back(Quoted(entry.name));
  }
  return absl::StrCat(entries.size(), entries.size() == 1 ? " tensor" : " tensors", names.empty() ? "" : ": ",
                      absl::StrJoin(names, ", "), entries.size() > kNamesMax ? ", ..." : "");
}

std::string SafetensorsTypeNames() {
  return absl::StrJoin(kDTypeRows, ", ",
                       [](std::string* out, const DTypeRow& row) { absl::StrAppend(out, Av(row.safetensors)); });
}

// ---- Writing ----

// A file beside `path` that becomes it on Commit and vanishes otherwise.
class Replacement {
 public:
  Replacement() = default;
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;
  ~Replacement() {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }

  absl::Status Create(const std::string& path) {
    constexpr int kAttemptsMax = 100;  // names left behind by a killed process of the same id
    static std::atomic<std::uint64_t> serial = 0;
    const std::size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
    for (int attempt = 0; attempt < kAttemptsMax; ++attempt) {
      const std::string name = absl::StrCat(folder, ".tessera-", ::getpid(), "-", serial++, ".tmp");
      fd_.Reset(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (!fd_ && errno == EEXIST) continue;
      if (!fd_) return SystemError("create");
      temporary_ = name;
      return absl::OkStatus();
    }
    return absl::AlreadyExistsError("create: every temporary name tried beside it is taken");
  }

  absl::Status Append(std::span<const std::byte> data) {
    while (!data.empty()) {
      const ssize_t wrote = ::write(fd_.get(), data.data(), data.size());
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return SystemError("write");
      data = data.subspan(static_cast<std::size_t>(wrote));
    }
    return absl::OkStatus();
  }

  absl::Status Commit(const std::string& path) {
    // Some file systems report a full disk only here.
    if (::fsync(fd_.get()) != 0) return SystemError("fsync");
    if (::close(fd_.Release()) != 0) return SystemError("close");
    if (::rename(temporary_.c_str(), path.c_str()) != 0) return SystemError("rename");
    temporary_.clear();
    return absl::OkStatus();
  }

 private:
  std::string temporary_;
  UniqueFd fd_;
};

absl::Status ReplaceFile(const std::string& path, std::span<const std::span<const std::byte>> pieces) {
  Replacement replacement;
  RETURN_IF_ERROR(replacement.Create(path));
  for (const std::span<const std::byte> piece : pieces) RETURN_IF_ERROR(replacement.Append(piece));
  return replacement.Commit(path);
}

absl::Status CheckTensor(const NamedTensor& tensor) {
  if (!IsKnown(tensor.dtype)) return Malformed("its dtype is unspecified");
  ASSIGN_OR_RETURN(const std::uint64_t bytes, PackedBytes(tensor.shape, DTypeBytes(tensor.dtype)));
  if (bytes == tensor.data.size()) return absl::OkStatus();
  return Malformed(absl::StrCat("shape ", ShapeText(tensor.shape), " of ", Av(DTypeName(tensor.dtype)), " needs ",
                                bytes, " bytes, but its data has ", tensor.data.size()));
}

// `text` as a JSON string, or INVALID_ARGUMENT if it is not UTF-8.
absl::StatusOr<std::string> JsonQuoted(const std::string& text) {
  using nlohmann::json;
  const json value(text);
  std::string quoted = value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
  // Bytes that are not UTF-8 were replaced, so that the text does not come back.
  if (json::parse(quoted, nullptr, /*allow_exceptions=*/false) != value) return Malformed("its name is not UTF-8");
  return quoted;
}

absl::Status CheckForSafetensors(std::span<const NamedTensor> tensors) {
  std::set<std::string_view> names;
  for (const NamedTensor& tensor : tensors) {
    const std::string where = absl::StrCat("tensor ", Quoted(tensor.name));
    if (tensor.name.empty() || tensor.name == kMetadataKey) {
      return Malformed(absl::StrCat(where, ": a .safetensors file cannot hold that name"));
    }
    if (!names.insert(tensor.name).second) return Malformed(absl::StrCat(where, ": appears twice"));
    const absl::Status status = CheckTensor(tensor);
    if (!status.ok()) return Annotate(where, status);
  }
  return absl::OkStatus();
}

std::string_view SafetensorsName(DType dtype) {
  const auto row = std::find_if(kDTypeRows.begin(), kDTypeRows.end(), [&](const auto& r) { return r.dtype == dtype; });
  return row == kDTypeRows.end() ? std::string_view() : row->safetensors;
}

// Length prefix and JSON for tensors that lie in this order.
absl::StatusOr<std::string> SafetensorsPrologue(std::span<const NamedTensor* const> tensors) {
  std::string header = "{";
  std::uint64_t offset = 0;
  for (const NamedTensor* tensor : tensors) {
    ASSIGN_OR_RETURN(const std::string name, JsonQuoted(tensor->name));
    absl::StrAppend(&header, header.size() > 1 ? "," : "", name, ":{\"dtype\":\"", Av(SafetensorsName(tensor->dtype)),
                    "\",\"shape\":[", absl::StrJoin(tensor->shape, ","), "],\"data_offsets\":[", offset, ",");
    offset += tensor->data.size();
    absl::StrAppend(&header, offset, "]}");
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the data begin at a multiple of 8
  if (header.size() > kSafetensorsHeaderBytesMax) {
    return Malformed(absl::StrCat("its header would have ", header.size(), " bytes, over the limit of ",
                                  kSafetensorsHeaderBytesMax));
  }
  std::string prologue(kSafetensorsPrefixBytes, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(prologue.data(), &length, sizeof(length));
  return prologue + header;
}

absl::Status WriteSafetensorsTo(const std::string& path, std::span<const NamedTensor> tensors) {
  RETURN_IF_ERROR(CheckForSafetensors(tensors));
  std::vector<const NamedTensor*> ordered;
  for (const NamedTensor& tensor : tensors) ordered.push_back(&tensor);
  std::stable_sort(ordered.begin(), ordered.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return DTypeBytes(a->dtype) > DTypeBytes(b->dtype);
  });
  ASSIGN_OR_RETURN(const std::string prologue, SafetensorsPrologue(ordered));
  std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(prologue))};
  for (const NamedTensor* tensor : ordered) pieces.push_back(tensor->data);
  return ReplaceFile(path, pieces);
}

std::string NpyPrologue(std::string_view descr, const std::vector<std::int64_t>& shape) {
  static_assert(kTensorFileRankMax * 21 + 128 <= 0xffff, "any shape fits the 16-bit length of format 1.0");
  std::string header = absl::StrCat("{'descr': '", Av(descr), "', 'fortran_order': False, 'shape': (",
                                    absl::StrJoin(shape, ", "), shape.size() == 1 ? ",), }" : "), }");
  const std::size_t prefix_bytes = kNpyLengthOffset + sizeof(std::uint16_t);
  const std::size_t total = (prefix_bytes + header.size() + 1 + kNpyAlignment - 1) / kNpyAlignment * kNpyAlignment;
  header.resize(total - prefix_bytes - 1, ' ');
  header += '\n';
  const auto length = static_cast<std::uint16_t>(header.size());
  std::string prologue(kNpyMagic);
  prologue += {'\x01', '\x00', static_cast<char>(length & 0xff), static_cast<char>(length >> 8)};
  return prologue + header;
}

absl::Status WriteNpyTo(const std::string& path, const NamedTensor& tensor) {
  RETURN_IF_ERROR(CheckTensor(tensor));
  const auto row =
      std::find_if(kNpyTypes.begin(), kNpyTypes.end(), [&](const auto& r) { return r.dtype == tensor.dtype; });
  if (row == kNpyTypes.end()) {
    return Malformed(absl::StrCat("NumPy has no type ", Av(DTypeName(tensor.dtype)), ": write a ",
                                  Av(kSafetensorsExtension), " file instead"));
  }
  const std::string prologue = NpyPrologue(row->descr, tensor.shape);
  const std::array<std::span<const std::byte>, 2> pieces = {std::as_bytes(std::span(prologue)), tensor.data};
  return ReplaceFile(path, pieces);
}

absl::Status AnnotateIfError(const std::string& path, const absl::Status& status) {
  return status.ok() ? status : Annotate(path, status);
}

}  // namespace

absl::StatusOr<TensorFile> TensorFile::Open(const std::string& path) {
  const std::optional<Format> format = FormatOf(path);
  if (!format) return UnknownExtension(path);
  absl::StatusOr<OpenedFile> file = OpenRegularFile(path);
  if (!file.ok()) return Annotate(path, file.status());
  absl::StatusOr<std::vector<TensorFileEntry>> entries =
      *format == Format::kNpy ? ReadNpyEntries(*file) : ReadSafetensorsEntries(*file);
  if (!entries.ok()) return Annotate(path, entries.status());
  TensorFile result(path, std::move(file->fd));
  result.entries_ = *std::move(entries);
  for (std::size_t i = 0; i < result.entries_.size(); ++i) {
    const std::string& name = result.entries_[i].name;
    if (!result.index_.emplace(name, i).second) {
      return Malformed(absl::StrCat(path, ": tensor ", Quoted(name), ": the name appears twice"));
    }
  }
  return result;
}

absl::StatusOr<TensorFileEntry> TensorFile::Find(std::string_view name) const {
  std::size_t idx = 0;
  if (!name.empty() || entries_.empty()) {
    const auto at = index_.find(name);
    if (at == index_.end()) {
      return absl::NotFoundError(
          absl::StrCat(path_, ": no tensor ", Quoted(name), "; the file holds ", Inventory(entries_)));
    }
    idx = at->second;
  } else if (entries_.size() > 1) {
    return Malformed(absl::StrCat(path_, ": name one of its ", Inventory(entries_)));
  }
  const TensorFileEntry& entry = entries_[idx];
  if (IsKnown(entry.dtype)) return entry;
  return Malformed(absl::StrCat(path_, ": tensor ", Quoted(entry.name), ": its type ", Quoted(entry.dtype_name),
                                " is not supported; supported are ", SafetensorsTypeNames()));
}

absl::Status TensorFile::Read(const TensorFileEntry& entry, std::span<std::byte> destination) const {
  if (destination.size() != entry.bytes) {
    return Malformed(absl::StrCat(path_, ": tensor ", Quoted(entry.name), ": it has ", entry.bytes,
                                  " bytes, the destination ", destination.size()));
  }
  return AnnotateIfError(path_, ReadExactly(fd_.get(), entry.file_offset, destination));
}

absl::StatusOr<TensorFileSpec> ParseTensorFileSpec(std::string_view spec) {
  for (std::size_t colon = spec.find(':'); colon != std::string_view::npos; colon = spec.find(':', colon + 1)) {
    if (!FormatOf(spec.substr(0, colon))) continue;
    if (colon + 1 == spec.size()) return Malformed(absl::StrCat(Av(spec), ": expected a tensor's name after ':'"));
    return TensorFileSpec{std::string(spec.substr(0, colon)), std::string(spec.substr(colon + 1))};
  }
  if (!FormatOf(spec)) return UnknownExtension(spec);
  return TensorFileSpec{std::string(spec), ""};
}

absl::Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors) {
  return AnnotateIfError(path, WriteSafetensorsTo(path, tensors));
}

absl::Status WriteNpy(const std::string& path, const NamedTensor& tensor) {
  return AnnotateIfError(path, WriteNpyTo(path, tensor));
}

absl::Status WriteTensorFile(const std::string& path, const NamedTensor& tensor) {
  const std::optional<Format> format = FormatOf(path);
  if (!format) return UnknownExtension(path);
  return *format == Format::kNpy ? WriteNpy(path, tensor) : WriteSafetensors(path, std::span(&tensor, 1));
}

}  // namespace tessera::client
