// Tensors in NumPy `.npy` (format 1, 2 and 3) and `.safetensors` files: listing, reading, writing. Files are not
// trusted: every length, extent and offset is checked against the file before anything is read or sized by it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/unique_fd.h"

namespace tessera::client {

inline constexpr std::size_t kTensorFileRankMax = 64;                        // dimensions, read and written
inline constexpr std::uint64_t kNpyHeaderBytesMax = std::uint64_t{1} << 20;  // of the header text
inline constexpr std::uint64_t kSafetensorsHeaderBytesMax = 100'000'000;     // as the format's own library allows

// One tensor of a file. `bytes` and every stride fit an int64; `bytes` equals elements times element size unless the
// type is unknown.
struct TensorFileEntry {
  std::string name;                   // empty in a .npy file
  DType dtype = DType::kUnspecified;  // kUnspecified: a type this library does not know (see TensorFile::Find)
  std::vector<std::int64_t> shape;    // extents in elements, slowest first; empty = a scalar
  std::vector<std::int64_t> strides;  // in elements; packed row-major, or column-major for npy `fortran_order`
  std::uint64_t file_offset = 0;      // bytes from the start of the file; aligned to nothing in particular
  std::uint64_t bytes = 0;
  std::string dtype_name;  // the type as the file spells it, such as F8_E4M3 or <f4
};

// An open file and its list of tensors. Movable; const calls may run on several threads at once.
//
//   ASSIGN_OR_RETURN(const TensorFile file, TensorFile::Open("weights.safetensors"));
//   ASSIGN_OR_RETURN(const TensorFileEntry entry, file.Find("layer0.w"));
//   std::vector<std::byte> data(entry.bytes);
//   RETURN_IF_ERROR(file.Read(entry, data));
class TensorFile {
 public:
  // Opens by extension, .npy or .safetensors, and checks the whole header. Reads no tensor data.
  // Errors, all beginning with the path: NOT_FOUND (no such file), INVALID_ARGUMENT (another extension, not a regular
  // file, malformed, or a .npy type other than <f4, <f2, |i1, <i4), PERMISSION_DENIED and others as the system reports.
  static absl::StatusOr<TensorFile> Open(const std::string& path);

  // Every tensor, ordered by file offset, those of unknown type included.
  const std::vector<TensorFileEntry>& entries() const { return entries_; }

  // The tensor of that name; an empty name means the file's only tensor.
  // Errors: NOT_FOUND (no such name, or the file is empty), INVALID_ARGUMENT (an empty name and several tensors, or the
  // tensor's type is unknown; other tensors of the file stay usable).
  absl::StatusOr<TensorFileEntry> Find(std::string_view name) const;

  // Fills `destination`, whose size must equal `entry.bytes`, with the tensor's bytes in file order (see `strides`).
  // Errors: INVALID_ARGUMENT (another size), DATA_LOSS (the file was cut since Open), others as the system reports;
  // after an error the contents of `destination` are unspecified.
  absl::Status Read(const TensorFileEntry& entry, std::span<std::byte> destination) const;

 private:
  TensorFile(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  std::string path_;
  UniqueFd fd_;
  std::vector<TensorFileEntry> entries_;
  std::map<std::string, std::size_t, std::less<>> index_;  // name -> place in `entries_`
};

struct TensorFileSpec {
  std::string path;
  std::string name;  // empty = the file's only tensor
};

// Parses "path[:name]", such as "x.npy" or "weights.safetensors:layer0.w". The name begins after the first colon that
// follows .npy or .safetensors, so that paths and names may hold colons.
// INVALID_ARGUMENT if the path has neither extension or a colon is followed by nothing.
absl::StatusOr<TensorFileSpec> ParseTensorFileSpec(std::string_view spec);

// A tensor to be written. Refers to the caller's memory.
struct NamedTensor {
  std::string name;
  DType dtype = DType::kUnspecified;
  std::vector<std::int64_t> shape;  // extents in elements, slowest first
  std::span<const std::byte> data;  // packed row-major; its size must match shape and dtype
};

// The writers below replace `path` in one step: it holds the old file or the complete new one, never a part, and a
// failed write leaves no file behind. Errors: INVALID_ARGUMENT (a tensor that its shape, type or name rules out;
// nothing is touched), NOT_FOUND (no such folder), others as the system reports.

// Names must be unique, non-empty UTF-8 other than `__metadata__`. Types of wider elements come first in the file, so
// that every tensor is aligned to its element.
absl::Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors);

// Only f32, f16, s8 and s32: NumPy has no bf16 and no fp8. The name is not stored.
absl::Status WriteNpy(const std::string& path, const NamedTensor& tensor);

// WriteNpy or WriteSafetensors, by extension; INVALID_ARGUMENT for any other.
absl::Status WriteTensorFile(const std::string& path, const NamedTensor& tensor);

}  // namespace tessera::client
