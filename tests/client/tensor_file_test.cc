// Tests of the .npy and .safetensors reader and writer: bytes as the formats' own libraries write them, every malformed
// case by its message, and random mutations of valid files.
#include "client/tensor_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <numeric>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::client {
namespace {

using Shape = std::vector<std::int64_t>;

class TensorFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/tensor_file_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(std::string_view name) const { return absl::StrCat(folder_, "/", Av(name)); }

  std::string Store(std::string_view name, std::string_view bytes) const {
    std::string path = Path(name);
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  // Status of opening a file of these bytes.
  absl::Status OpenStatus(std::string_view name, std::string_view bytes) const {
    return TensorFile::Open(Store(name, bytes)).status();
  }

  std::size_t FilesInFolder() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder_), {}));
  }

  std::string folder_;
};

std::string Contents(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

std::string LittleEndian(std::uint64_t value, std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(value >> (8 * i));
  return text;
}

// A .npy file of any version with this header text and data.
std::string Npy(std::string_view header, std::string_view data, char major = 1, char minor = 0) {
  std::string file = "\x93NUMPY";
  file += {major, minor};
  file += LittleEndian(header.size(), major == 1 ? 2 : 4);
  return absl::StrCat(file, Av(header), Av(data));
}

std::string NpyOfShape(std::string_view shape, std::string_view data = "", std::string_view descr = "'<f4'") {
  return Npy(absl::StrCat("{'descr': ", Av(descr), ", 'fortran_order': False, 'shape': ", Av(shape), ", }\n"), data);
}

std::string Safetensors(std::string_view header, std::string_view data = "") {
  return absl::StrCat(LittleEndian(header.size(), 8), Av(header), Av(data));
}

// A .safetensors file with one tensor `t` of these fields and 16 bytes of data.
std::string SafetensorsOf(std::string_view fields) {
  return Safetensors(absl::StrCat("{\"t\":{", Av(fields), "}}"), std::string(16, '\0'));
}

template <typename T>
std::span<const std::byte> BytesOf(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

std::vector<std::byte> ReadAll(const TensorFile& file, const TensorFileEntry& entry) {
  std::vector<std::byte> bytes(entry.bytes);
  EXPECT_TRUE(file.Read(entry, bytes).ok());
  return bytes;
}

bool SameBytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::ranges::equal(a, b);
}

void ExpectError(const absl::Status& status, absl::StatusCode code, std::string_view part) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(MessageOf(status).find(part), std::string::npos) << "expected: " << part << "\ngot: " << status;
}

void ExpectMalformed(const absl::Status& status, std::string_view part) {
  ExpectError(status, absl::StatusCode::kInvalidArgument, part);
}

// ---- Round trips ----

TEST_F(TensorFileTest, NpyRoundTrip) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kS8, DType::kS32}) {
    for (const Shape& shape : {Shape{}, Shape{5}, Shape{2, 3}, Shape{2, 0, 3}, Shape{1, 2, 3, 4, 5}, Shape(64, 1)}) {
      const auto elements = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
      std::vector<std::uint8_t> data(static_cast<std::size_t>(elements) * DTypeBytes(dtype));
      std::iota(data.begin(), data.end(), std::uint8_t{1});
      const std::string path = Path("x.npy");
      ASSERT_EQ(WriteTensorFile(path, {"ignored", dtype, shape, BytesOf(data)}), absl::OkStatus());
      const auto file = TensorFile::Open(path);
      ASSERT_TRUE(file.ok()) << file.status();
      const auto entry = file->Find("");
      ASSERT_TRUE(entry.ok()) << entry.status();
      EXPECT_EQ(entry->name, "");
      EXPECT_EQ(entry->dtype, dtype);
      EXPECT_EQ(entry->shape, shape);
      EXPECT_EQ(entry->file_offset % 64, 0u);
      EXPECT_TRUE(SameBytes(ReadAll(*file, *entry), BytesOf(data)));
    }
  }
  EXPECT_EQ(FilesInFolder(), 1u);
}

TEST_F(TensorFileTest, SafetensorsRoundTripOfEveryType) {
  std::vector<std::vector<std::uint8_t>> data;
  for (const DTypeRow& row : kDTypeRows) data.emplace_back(6 * row.bytes, static_cast<std::uint8_t>(data.size() + 1));
  std::vector<NamedTensor> tensors;
  for (std::size_t i = 0; i < kDTypeRows.size(); ++i) {
    tensors.push_back({absl::StrCat("layer", i, ".\"w\"\n\xc3\xa9"), kDTypeRows[i].dtype, {2, 3}, BytesOf(data[i])});
  }
  tensors.push_back({"scalar", DType::kS8, {}, BytesOf(data.back()).first(1)});
  tensors.push_back({"nothing", DType::kF32, {4, 0, 2}, {}});
  const std::string path = Path("w.safetensors");
  ASSERT_EQ(WriteSafetensors(path, tensors), absl::OkStatus());
  const auto file = TensorFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->entries().size(), tensors.size());
  for (const NamedTensor& tensor : tensors) {
    const auto entry = file->Find(tensor.name);
    ASSERT_TRUE(entry.ok()) << entry.status();
    EXPECT_EQ(entry->name, tensor.name);
    EXPECT_EQ(entry->dtype, tensor.dtype);
    EXPECT_EQ(entry->shape, tensor.shape);
    EXPECT_EQ(entry->file_offset % DTypeBytes(tensor.dtype), 0u) << tensor.name;
    EXPECT_TRUE(SameBytes(ReadAll(*file, *entry), tensor.data)) << tensor.name;
  }
}

TEST_F(TensorFileTest, SafetensorsWithoutTensors) {
  ASSERT_EQ(WriteSafetensors(Path("e.safetensors"), {}), absl::OkStatus());
  const auto file = TensorFile::Open(Path("e.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->entries().empty());
  ExpectError(file->Find("").status(), absl::StatusCode::kNotFound, "holds 0 tensors");
}

// ---- Bytes as the formats' own libraries write them ----

TEST_F(TensorFileTest, WritesAndReadsWhatNumpyWrites) {
  // numpy.save("x.npy", numpy.array([[1, 2, 3], [4, 5, 6]], dtype="<f4"))
  const std::string dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
  const std::string expected =
      absl::StrCat(std::string("\x93NUMPY\x01\x00v\x00", 10), dict, std::string(117 - dict.size(), ' '), "\n",
                   std::string("\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\x40\x40"
                               "\x00\x00\x80\x40\x00\x00\xa0\x40\x00\x00\xc0\x40",
                               24));
  ASSERT_EQ(expected.size(), 152u);
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  ASSERT_EQ(WriteNpy(Path("x.npy"), {"", DType::kF32, {2, 3}, BytesOf(values)}), absl::OkStatus());
  EXPECT_EQ(Contents(Path("x.npy")), expected);

  const auto file = TensorFile::Open(Store("y.npy", expected));
  ASSERT_TRUE(file.ok()) << file.status();
  const TensorFileEntry& entry = file->entries().at(0);
  EXPECT_EQ(entry.dtype, DType::kF32);
  EXPECT_EQ(entry.dtype_name, "<f4");
  EXPECT_EQ(entry.shape, Shape({2, 3}));
  EXPECT_EQ(entry.strides, Shape({3, 1}));
  EXPECT_EQ(entry.file_offset, 128u);
  EXPECT_EQ(entry.bytes, 24u);
  EXPECT_TRUE(SameBytes(ReadAll(*file, entry), BytesOf(values)));
}

TEST_F(TensorFileTest, WritesOneElementTuplesAsPythonDoes) {
  const std::vector<std::int8_t> values = {1, 2, 3};
  ASSERT_EQ(WriteNpy(Path("x.npy"), {"", DType::kS8, {3}, BytesOf(values)}), absl::OkStatus());
  EXPECT_NE(Contents(Path("x.npy")).find("{'descr': '|i1', 'fortran_order': False, 'shape': (3,), } "),
            std::string::npos);
  ASSERT_EQ(WriteNpy(Path("x.npy"), {"", DType::kS8, {}, BytesOf(values).first(1)}), absl::OkStatus());
  EXPECT_NE(Contents(Path("x.npy")).find("'shape': (), } "), std::string::npos);
}

TEST_F(TensorFileTest, ReadsFortranOrder) {
  // numpy.asfortranarray(...) of 2 x 3 x 4: the first axis varies fastest.
  const std::string header = "{'descr': '<f2', 'fortran_order': True, 'shape': (2, 3, 4), }\n";
  const auto file = TensorFile::Open(Store("f.npy", Npy(header, std::string(48, 'x'))));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->entries()[0].dtype, DType::kF16);
  EXPECT_EQ(file->entries()[0].shape, Shape({2, 3, 4}));
  EXPECT_EQ(file->entries()[0].strides, Shape({1, 2, 6}));
}

TEST_F(TensorFileTest, ReadsEveryNpyVersionAndSpelling) {
  const std::string data(24, 'd');
  for (const std::string_view header : {
           "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }   \n",
           "{\"shape\": (2,3), \"fortran_order\": False, \"descr\": \"<i4\"}",
           "{ 'fortran_order':False,'shape':( 2 , 3 , ),\n'descr':'<i4',}\n",
       }) {
    for (const char major : {'\x01', '\x02', '\x03'}) {
      const auto file = TensorFile::Open(Store("v.npy", Npy(header, data, major)));
      ASSERT_TRUE(file.ok()) << header << file.status();
      EXPECT_EQ(file->entries()[0].dtype, DType::kS32);
      EXPECT_EQ(file->entries()[0].shape, Shape({2, 3}));
      EXPECT_EQ(file->entries()[0].file_offset, (major == 1 ? 10 : 12) + header.size());
    }
  }
}

TEST_F(TensorFileTest, WritesAndReadsWhatSafetensorsWrites) {
  // safetensors.numpy.save({"test": numpy.zeros((2, 2), dtype="<i4")})
  const std::string expected =
      absl::StrCat(std::string("@\0\0\0\0\0\0\0", 8),
                   R"({"test":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}    )", std::string(16, '\0'));
  const std::vector<std::int32_t> values(4);
  ASSERT_EQ(WriteTensorFile(Path("t.safetensors"), {"test", DType::kS32, {2, 2}, BytesOf(values)}), absl::OkStatus());
  EXPECT_EQ(Contents(Path("t.safetensors")), expected);

  const auto file = TensorFile::Open(Store("u.safetensors", expected));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto entry = file->Find("");
  ASSERT_TRUE(entry.ok()) << entry.status();
  EXPECT_EQ(entry->name, "test");
  EXPECT_EQ(entry->dtype, DType::kS32);
  EXPECT_EQ(entry->dtype_name, "I32");
  EXPECT_EQ(entry->strides, Shape({2, 1}));
  EXPECT_EQ(entry->file_offset, 72u);
  EXPECT_EQ(entry->bytes, 16u);
}

TEST_F(TensorFileTest, IgnoresMetadataAndUnknownFields) {
  const std::string header = R"({"__metadata__":{"format":"pt","shape":[1,{"x":null}]},
      "a":{"new":[[true,-1,1.5,"s"],{"dtype":1}],"data_offsets":[0,2],"shape":[2],"dtype":"I8","flag":false}})";
  const auto file = TensorFile::Open(Store("m.safetensors", Safetensors(header, "ab")));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->entries().size(), 1u);
  EXPECT_EQ(file->entries()[0].name, "a");
}

// ---- Names and types ----

TEST_F(TensorFileTest, OtherTypesDoNotHideTheRest) {
  const std::string header = R"({"ids":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},
                                 "w":{"dtype":"BF16","shape":[1],"data_offsets":[16,18]}})";
  const auto file = TensorFile::Open(Store("m.safetensors", Safetensors(header, std::string(18, '\0'))));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->entries()[0].dtype, DType::kUnspecified);
  EXPECT_EQ(file->entries()[0].dtype_name, "I64");
  EXPECT_TRUE(file->Find("w").ok());
  ExpectMalformed(file->Find("ids").status(), "m.safetensors: tensor 'ids': its type 'I64' is not supported");
  ExpectMalformed(file->Find("").status(), "name one of its 2 tensors: 'ids', 'w'");
}

TEST_F(TensorFileTest, FindNamesWhatThereIs) {
  const auto npy = TensorFile::Open(Store("x.npy", NpyOfShape("(1,)", "data")));
  ASSERT_TRUE(npy.ok()) << npy.status();
  ExpectError(npy->Find("w").status(), absl::StatusCode::kNotFound,
              "no tensor 'w'; the file holds one tensor, without");

  const std::vector<std::int8_t> value = {1};
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < 30; ++i) tensors.push_back({absl::StrCat("n", i, "\n"), DType::kS8, {1}, BytesOf(value)});
  ASSERT_EQ(WriteSafetensors(Path("n.safetensors"), tensors), absl::OkStatus());
  const auto many = TensorFile::Open(Path("n.safetensors"));
  ASSERT_TRUE(many.ok()) << many.status();
  ExpectMalformed(many->Find("").status(), "30 tensors: 'n0\\n', 'n1\\n'");
  EXPECT_EQ(MessageOf(many->Find("").status()).find("n20"), std::string::npos);
}

TEST_F(TensorFileTest, ReadNeedsTheExactSize) {
  const auto file = TensorFile::Open(Store("x.npy", NpyOfShape("(1,)", "data")));
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<std::byte> bytes(5);
  ExpectMalformed(file->Read(file->entries()[0], bytes), "it has 4 bytes, the destination 5");
  ExpectMalformed(file->Read(file->entries()[0], std::span(bytes).first(3)), "it has 4 bytes, the destination 3");
  TensorFileEntry forged = file->entries()[0];
  forged.file_offset = ~std::uint64_t{0};
  ExpectMalformed(file->Read(forged, std::span(bytes).first(4)), "beyond any file");
}

TEST_F(TensorFileTest, FileCutAfterOpen) {
  const std::string path = Store("x.npy", NpyOfShape("(1,)", "data"));
  const auto file = TensorFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  std::vector<std::byte> bytes(4);
  ExpectError(file->Read(file->entries()[0], bytes), absl::StatusCode::kDataLoss, path);
}

TEST(TensorFileSpecTest, Splits) {
  const auto expect = [](std::string_view spec, std::string_view path, std::string_view name) {
    const auto parsed = ParseTensorFileSpec(spec);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->path, path);
    EXPECT_EQ(parsed->name, name);
  };
  expect("x.npy", "x.npy", "");
  expect("weights.safetensors:layer0.w", "weights.safetensors", "layer0.w");
  expect("weights.safetensors:a:b.npy:c", "weights.safetensors", "a:b.npy:c");
  expect("/data:1/x.safetensors", "/data:1/x.safetensors", "");
  expect("/data:1/x.safetensors:w", "/data:1/x.safetensors", "w");
  for (const std::string_view spec : {"", "x", "x:w", "x.npz", "x.bin:w"}) {
    ExpectMalformed(ParseTensorFileSpec(spec).status(), "ends with .npy or .safetensors");
  }
  ExpectMalformed(ParseTensorFileSpec("x.safetensors:").status(), "a tensor's name after ':'");
}

// ---- Malformed files ----

TEST_F(TensorFileTest, NotAFile) {
  ExpectError(TensorFile::Open(Path("none.npy")).status(), absl::StatusCode::kNotFound, "none.npy: open: No such file");
  ExpectMalformed(TensorFile::Open(Path("x.txt")).status(), "ends with .npy or .safetensors");
  std::filesystem::create_directory(Path("d.npy"));
  ExpectMalformed(TensorFile::Open(Path("d.npy")).status(), "d.npy: not a regular file");
  ASSERT_EQ(::mkfifo(Path("f.npy").c_str(), 0600), 0);
  ExpectMalformed(TensorFile::Open(Path("f.npy")).status(), "f.npy: not a regular file");
}

TEST_F(TensorFileTest, MalformedNpyFraming) {
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n";
  const std::string good = Npy(header, "data");
  ASSERT_EQ(OpenStatus("x.npy", good), absl::OkStatus());
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_EQ(OpenStatus("x.npy", good.substr(0, length)).code(), absl::StatusCode::kInvalidArgument) << length;
  }
  ExpectMalformed(OpenStatus("x.npy", ""), "x.npy: too short for a .npy file");
  ExpectMalformed(OpenStatus("x.npy", Npy("", "", 2).substr(0, 11)), "too short");
  ExpectMalformed(OpenStatus("x.npy", "PK" + good.substr(2)), "not the magic");
  ExpectMalformed(OpenStatus("x.npy", Npy(header, "data", 4)), "version 4.0");
  ExpectMalformed(OpenStatus("x.npy", Npy(header, "data", 0)), "version 0.0");
  ExpectMalformed(OpenStatus("x.npy", Npy(header, "data", 1, 1)), "version 1.1");
  ExpectMalformed(OpenStatus("x.npy", good + "!"), "needs 4 bytes, but 5 follow");
  ExpectMalformed(OpenStatus("x.npy", good.substr(0, good.size() - 1)), "needs 4 bytes, but 3 follow");
  ExpectMalformed(OpenStatus("x.npy", std::string("\x93NUMPY\x01\x00\xff\xff", 10)), "header of 65535 bytes in a file");
  ExpectMalformed(OpenStatus("x.npy", Npy(header + std::string(kNpyHeaderBytesMax, ' '), "data", 2)), "over the limit");
  const std::string at_limit = header + std::string(kNpyHeaderBytesMax - header.size(), ' ');
  EXPECT_EQ(OpenStatus("x.npy", Npy(at_limit, "data", 3)), absl::OkStatus());
}

TEST_F(TensorFileTest, MalformedNpyHeader) {
  const auto expect = [this](std::string_view header, std::string_view part) {
    SCOPED_TRACE(header);
    ExpectMalformed(OpenStatus("x.npy", Npy(header, "data")), part);
  };
  expect("", "header byte 0: expected '{'");
  expect("[]", "header byte 0: expected '{'");
  expect("{", "expected a key");
  expect("{}", "key 'descr' is missing");
  expect("{,}", "expected a key");
  expect("{'descr': '<f4', 'shape': (1,)}", "key 'fortran_order' is missing");
  expect("{'descr': '<f4', 'fortran_order': False}", "key 'shape' is missing");
  expect("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", "unknown key 'x'");
  expect("{'descr': '<f4', 'descr': '<f4'}", "key 'descr' appears twice");
  expect("{'descr' '<f4'}", "expected ':'");
  expect("{'descr': '<f4' 'shape': (1,)}", "expected ',' or '}'");
  expect("{'descr': '<f4\", 'shape': (1,)}", "expected ',' or '}'");
  expect("{'descr': '<f4", "string without an end");
  expect("{'descr': '\\x3cf4'}", "escape");
  expect("{'descr': '\xc3\xa9'}", "outside ASCII");
  expect("{'descr': 4}", "expected descr, a quoted string");
  expect("{'descr': [('a', '<f4')]}", "structured type");
  expect("{'fortran_order': 0}", "expected True or False");
  expect("{'fortran_order': Falsey}", "expected ',' or '}'");
  expect("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + x", "nothing after '}'");
  expect(std::string_view("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}\0", 56), "nothing after '}'");
  for (const std::string_view descr : {"'<f8'", "'<i8'", "'|V2'", "'<U4'", "'bfloat16'", "''"}) {
    ExpectMalformed(OpenStatus("x.npy", NpyOfShape("(1,)", "data", descr)), "supported are <f4, <f2, |i1, <i4");
  }
  ExpectMalformed(OpenStatus("x.npy", NpyOfShape("(1,)", "data", "'>f4'")), "descr '>f4' is big-endian");
}

TEST_F(TensorFileTest, MalformedNpyShape) {
  const auto expect = [this](std::string_view shape, std::string_view part) {
    SCOPED_TRACE(shape);
    ExpectMalformed(OpenStatus("x.npy", NpyOfShape(shape, "data")), part);
  };
  expect("1", "expected a tuple");
  expect("[1]", "expected a tuple");
  expect("(1)", "needs a comma");
  expect("(,)", "expected a decimal integer");
  expect("(1,,1)", "expected a decimal integer");
  expect("(1 1)", "expected ',' or ')'");
  expect("(1, 1", "expected a decimal integer");
  expect("(-1, -1)", "negative extent");
  expect("(+1,)", "expected a decimal integer");
  expect("(01,)", "leading zero");
  expect("(1.0,)", "expected ',' or ')'");
  expect("(1L,)", "expected ',' or ')'");
  expect("(True,)", "expected a decimal integer");
  expect("(9223372036854775808,)", "over 63 bits");
  expect("(99999999999999999999999999,)", "over 63 bits");
  expect("(9223372036854775807,)", "overflows 63 bits");
  expect("(4294967296, 4294967296)", "overflows 63 bits");
  expect("(0, 4294967296, 4294967296)", "overflows 63 bits");
  expect("(2305843009213693951,)", "needs 9223372036854775804 bytes, but 4 follow");
  expect("(2,)", "needs 8 bytes, but 4 follow");
  expect("(0,)", "needs 0 bytes, but 4 follow");
  std::string deep = "(";
  for (std::size_t i = 0; i <= kTensorFileRankMax; ++i) deep += "1,";
  expect(deep + ")", "more than 64 dimensions");
  expect(std::string(60000, '('), "expected a decimal integer");
}

TEST_F(TensorFileTest, MalformedSafetensorsFraming) {
  const std::string good = SafetensorsOf(R"("dtype":"F32","shape":[2,2],"data_offsets":[0,16])");
  ASSERT_EQ(OpenStatus("t.safetensors", good), absl::OkStatus());
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_EQ(OpenStatus("t.safetensors", good.substr(0, length)).code(), absl::StatusCode::kInvalidArgument) << length;
  }
  ExpectMalformed(OpenStatus("t.safetensors", "1234567"), "t.safetensors: too short");
  ExpectMalformed(OpenStatus("t.safetensors", LittleEndian(0, 8)), "expected '{'");
  ExpectMalformed(OpenStatus("t.safetensors", LittleEndian(3, 8) + "{}"), "header of 3 bytes in a file of 10");
  ExpectMalformed(OpenStatus("t.safetensors", LittleEndian(kSafetensorsHeaderBytesMax + 1, 8) + "{}"),
                  "over the limit");
  ExpectMalformed(OpenStatus("t.safetensors", LittleEndian(~std::uint64_t{0}, 8) + "{}"), "over the limit");
  ExpectMalformed(OpenStatus("t.safetensors", good + "xy"), "2 trailing bytes");
  ExpectMalformed(OpenStatus("t.safetensors", Safetensors("{}", "x")), "1 trailing bytes");
  ExpectMalformed(OpenStatus("t.safetensors", good.substr(0, good.size() - 1)), "lie outside the 15 bytes of data");
  for (const std::string_view header :
       {"{", "{\"a\"", "{}x", "{\"a\":}", "{'a':1}", "{\"\xff\":1}", "{\"a\":1e999999}"}) {
    ExpectMalformed(OpenStatus("t.safetensors", Safetensors(header)), ": not JSON");
  }
  for (const std::string_view header : {"[]", "1", " {}", "\xef\xbb\xbf{}"}) {
    ExpectMalformed(OpenStatus("t.safetensors", Safetensors(header)), "header byte 0: expected '{'");
  }
}

TEST_F(TensorFileTest, MalformedSafetensorsFields) {
  const auto expect = [this](std::string_view fields, std::string_view part) {
    SCOPED_TRACE(fields);
    ExpectMalformed(OpenStatus("t.safetensors", SafetensorsOf(fields)), absl::StrCat("tensor 't': ", Av(part)));
  };
  expect("", "dtype is missing");
  expect(R"("dtype":"F32","data_offsets":[0,16])", "shape is missing");
  expect(R"("dtype":"F32","shape":[4])", "data_offsets is missing");
  expect(R"("dtype":"F32","dtype":"F32")", "dtype appears twice");
  expect(R"("dtype":1)", "dtype: expected a string, found a number");
  expect(R"("dtype":["F32"])", "dtype: expected a string, found a list");
  expect(R"("dtype":{"a":1})", "dtype: expected a string, found an object");
  expect(R"("shape":"4")", "shape: expected a list of non-negative integers, found a string");
  expect(R"("shape":4)", "shape: expected a list of non-negative integers, found a number");
  expect(R"("shape":null)", "shape: expected a list of non-negative integers, found null");
  expect(R"("shape":[-4])", "shape: expected a list of non-negative integers, found a negative number");
  expect(R"("shape":[4.0])", "shape: expected a list of non-negative integers, found a fraction");
  expect(R"("shape":[true])", "shape: expected a list of non-negative integers, found a bool");
  expect(R"("shape":["4"])", "shape: expected a list of non-negative integers, found a string");
  expect(R"("shape":[[4]])", "shape: expected a list of non-negative integers, found a list");
  expect(R"("shape":[{}])", "shape: expected a list of non-negative integers, found an object");
  expect(R"("shape":[9223372036854775808])", "shape: extent over 63 bits");
  expect(R"("shape":[99999999999999999999])", "shape: expected a list of non-negative integers, found a fraction or a");
  expect(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16])",
         "shape [4294967296, 4294967296]: its");
  expect(R"("dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,16])",
         "shape [4611686018427387905]: its size");
  expect(R"("dtype":"I64","shape":[4294967296,4294967296],"data_offsets":[0,16])",
         "shape [4294967296, 4294967296]: its");
  expect(R"("dtype":"F32","shape":[4],"data_offsets":[0])", "data_offsets: expected two numbers");
  expect(R"("dtype":"F32","shape":[4],"data_offsets":[0,16,16])", "data_offsets: more than two numbers");
  expect(R"("dtype":"F32","shape":[4],"data_offsets":[16,0])", "data_offsets [16, 0] end before they begin");
  expect(R"("dtype":"F32","shape":[4],"data_offsets":[0,12])",
         "data_offsets [0, 12] hold 12 bytes, but shape [4] of F32");
  expect(R"("dtype":"F32","shape":[5],"data_offsets":[0,20])", "data_offsets [0, 20] lie outside the 16 bytes of data");
  expect(R"("dtype":"I64","shape":[5],"data_offsets":[0,40])", "data_offsets [0, 40] lie outside the 16 bytes of data");
  expect(R"("dtype":"F32","shape":[4],"data_offsets":[18446744073709551599,18446744073709551615])",
         "data_offsets [18446744073709551599, 18446744073709551615] lie outside");
  expect(R"("dtype":"F32","shape":[2],"data_offsets":[8,16])", "data_offsets [8, 16] leave a hole from 0");
  std::string ones = "1";
  for (std::size_t i = 0; i < kTensorFileRankMax; ++i) ones += ",1";
  expect(absl::StrCat("\"shape\":[", ones, "]"), "shape: more than 64 dimensions");
  for (const std::string_view value : {"1", "\"x\"", "null", "true", "-1", "1.5", "[]"}) {
    const std::string header = absl::StrCat("{\"t\":", Av(value), "}");
    ExpectMalformed(OpenStatus("t.safetensors", Safetensors(header)), "tensor 't': expected an object, found ");
  }
}

TEST_F(TensorFileTest, MalformedSafetensorsLayout) {
  const auto two = [](std::string_view a, std::string_view b, std::string_view second) {
    const std::string_view fields = R"({"dtype":"I8","shape":[4],"data_offsets":)";
    return Safetensors(absl::StrCat("{\"a\":", Av(fields), Av(a), "},\"", Av(second), "\":", Av(fields), Av(b), "}}"),
                       std::string(8, '\0'));
  };
  EXPECT_EQ(OpenStatus("t.safetensors", two("[4,8]", "[0,4]", "b")), absl::OkStatus());
  ExpectMalformed(OpenStatus("t.safetensors", two("[0,4]", "[2,6]", "b")), "tensor 'b': data_offsets [2, 6] overlap");
  ExpectMalformed(OpenStatus("t.safetensors", two("[0,4]", "[0,4]", "b")), "tensor 'b': data_offsets [0, 4] overlap");
  ExpectMalformed(OpenStatus("t.safetensors", two("[0,4]", "[5,9]", "b")),
                  "tensor 'b': data_offsets [5, 9] lie outside");
  ExpectMalformed(OpenStatus("t.safetensors", two("[0,4]", "[4,8]", "a")), "tensor 'a': the name appears twice");
  ExpectMalformed(OpenStatus("t.safetensors", two("[0,4]", "[4,8]", "\\u0061")), "tensor 'a': the name appears twice");
}

TEST_F(TensorFileTest, DeepNestingIsHarmless) {
  constexpr std::size_t kDepth = 2'000'000;
  const std::string open(kDepth, '[');
  const std::string close(kDepth, ']');
  EXPECT_EQ(OpenStatus("d.safetensors", Safetensors("{\"__metadata__\":" + open + close + "}")), absl::OkStatus());
  ExpectMalformed(OpenStatus("d.safetensors", Safetensors("{\"__metadata__\":" + open)), "not JSON");
  ExpectMalformed(OpenStatus("d.safetensors", Safetensors("{\"t\":" + open)), "expected an object, found a list");
  std::string objects = "{\"t\":{\"x\":";
  for (std::size_t i = 0; i < 200'000; ++i) objects += "{\"a\":";
  ExpectMalformed(OpenStatus("d.safetensors", Safetensors(objects)), "not JSON");
}

TEST_F(TensorFileTest, MessagesStayShort) {
  const std::string name(1'000'000, 'n');
  const absl::Status status = OpenStatus("l.safetensors", Safetensors("{\"" + name + "\":" + name));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_LT(status.message().size(), 1000u);
}

// ---- Refused and failed writes ----

TEST_F(TensorFileTest, RefusedWritesTouchNothing) {
  const std::vector<std::uint8_t> data(16);
  const auto tensor = [&](std::string name, DType dtype, Shape shape) {
    return NamedTensor{std::move(name), dtype, std::move(shape), BytesOf(data)};
  };
  const std::string npy = Store("x.npy", "old");
  for (const DType dtype : {DType::kBf16, DType::kE4m3, DType::kE5m2}) {
    const auto elements = static_cast<std::int64_t>(16 / DTypeBytes(dtype));
    ExpectMalformed(WriteNpy(npy, tensor("", dtype, {elements})), "write a .safetensors file instead");
  }
  ExpectMalformed(WriteNpy(npy, tensor("", DType::kUnspecified, {16})), "dtype is unspecified");
  ExpectMalformed(WriteNpy(npy, tensor("", DType::kF32, {3})), "needs 12 bytes, but its data has 16");
  ExpectMalformed(WriteNpy(npy, tensor("", DType::kS8, {-4, -4})), "negative extent");
  ExpectMalformed(WriteNpy(npy, tensor("", DType::kS8, {1LL << 32, 1LL << 32})), "overflows");
  ExpectMalformed(WriteNpy(npy, tensor("", DType::kS8, Shape(65, 1))), "rank 65");
  EXPECT_EQ(Contents(npy), "old");

  const std::string safe = Store("x.safetensors", "old");
  for (const std::string_view name : {"", "__metadata__"}) {
    ExpectMalformed(WriteTensorFile(safe, tensor(std::string(name), DType::kS8, {16})), "cannot hold that name");
  }
  ExpectMalformed(WriteTensorFile(safe, tensor("\xff", DType::kS8, {16})), "not UTF-8");
  ExpectMalformed(WriteTensorFile(safe, tensor("t", DType::kBf16, {16})),
                  "x.safetensors: tensor 't': shape [16] of bf16");
  const std::vector<NamedTensor> twice(2, tensor("t", DType::kS8, {16}));
  ExpectMalformed(WriteSafetensors(safe, twice), "tensor 't': appears twice");
  EXPECT_EQ(Contents(safe), "old");

  ExpectMalformed(WriteTensorFile(Path("x.bin"), tensor("t", DType::kS8, {16})), "ends with .npy or .safetensors");
  EXPECT_EQ(FilesInFolder(), 2u);
}

TEST_F(TensorFileTest, FailedWritesLeaveNothing) {
  const std::vector<std::uint8_t> data(1 << 20);
  const NamedTensor tensor{"t", DType::kS8, {1 << 20}, BytesOf(data)};
  ExpectError(WriteTensorFile(Path("none/x.npy"), tensor), absl::StatusCode::kNotFound, "none/x.npy: create: No such");

  std::filesystem::create_directories(Path("d.npy/full"));
  EXPECT_FALSE(WriteTensorFile(Path("d.npy"), tensor).ok());
  EXPECT_EQ(FilesInFolder(), 1u);

  const std::string path = Store("x.safetensors", "old");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1 << 16, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = WriteTensorFile(path, tensor);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(MessageOf(status).find("x.safetensors: write: "), std::string::npos) << status;
  EXPECT_EQ(Contents(path), "old");
  EXPECT_EQ(FilesInFolder(), 2u);
}

TEST_F(TensorFileTest, WritesInTheCurrentFolder) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder_);
  const std::vector<std::uint8_t> data(4);
  EXPECT_EQ(WriteTensorFile("x.npy", {"", DType::kF32, {}, BytesOf(data)}), absl::OkStatus());
  std::filesystem::current_path(before);
  EXPECT_TRUE(TensorFile::Open(Path("x.npy")).ok());
  EXPECT_EQ(FilesInFolder(), 1u);
}

// ---- Random mutations ----

struct Parts {
  std::string name;
  std::string header;
  std::string data;
};

std::string Framed(const Parts& parts) {
  return parts.name.ends_with(".npy") ? Npy(parts.header, parts.data) : Safetensors(parts.header, parts.data);
}

// A short random edit: bit flips, overwritten, inserted, removed or repeated bytes, a cut.
void Mutate(std::string& bytes, std::mt19937_64& random) {
  constexpr std::string_view kTelling = "{}[](),:'\"-0129\\ \n\xff";
  const auto below = [&](std::size_t limit) {
    return static_cast<std::size_t>(random() % std::max<std::size_t>(limit, 1));
  };
  for (std::size_t edits = 1 + below(2); edits > 0 && !bytes.empty(); --edits) {
    const std::size_t at = below(bytes.size());
    switch (below(6)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes[at] = kTelling[below(kTelling.size())];
        break;
      case 2:
        bytes.insert(at, 1, kTelling[below(kTelling.size())]);
        break;
      case 3:
        bytes.erase(at, 1 + below(8));
        break;
      case 4:
        bytes.insert(at, bytes.substr(below(bytes.size()), below(32)));
        break;
      default:
        bytes.resize(at);
    }
  }
}

// What must hold of every file that opens, whatever its bytes.
void CheckOpened(const TensorFile& file, std::uint64_t file_bytes) {
  constexpr std::size_t kGuardBytes = 64;
  constexpr std::byte kGuard{0xa5};
  for (const TensorFileEntry& entry : file.entries()) {
    ASSERT_LE(entry.bytes, file_bytes);
    ASSERT_LE(entry.file_offset, file_bytes - entry.bytes);
    ASSERT_EQ(entry.strides.size(), entry.shape.size());
    if (IsKnown(entry.dtype)) {
      std::uint64_t bytes = DTypeBytes(entry.dtype);
      for (const std::int64_t extent : entry.shape) bytes *= static_cast<std::uint64_t>(extent);
      ASSERT_EQ(bytes, entry.bytes);
    }
    std::vector<std::byte> room(entry.bytes + 2 * kGuardBytes, kGuard);
    ASSERT_EQ(file.Read(entry, std::span(room).subspan(kGuardBytes, entry.bytes)), absl::OkStatus());
    const auto is_guard = [&](std::byte b) { return b == kGuard; };
    ASSERT_TRUE(std::all_of(room.begin(), room.begin() + kGuardBytes, is_guard));
    ASSERT_TRUE(std::all_of(room.end() - kGuardBytes, room.end(), is_guard));
    ASSERT_EQ(file.Find(entry.name).ok(), IsKnown(entry.dtype) && (!entry.name.empty() || file.entries().size() == 1));
  }
}

// Set TESSERA_TEST_SEED to the printed seed to repeat a run.
TEST_F(TensorFileTest, RandomMutations) {
  constexpr int kMutations = 2000;
  const char* wanted = std::getenv("TESSERA_TEST_SEED");
  const std::uint64_t seed = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937_64 random(seed);

  const std::vector<Parts> valid = {
      {"x.npy", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  \n", std::string(24, 'd')},
      {"x.npy", "{'descr': '|i1', 'fortran_order': True, 'shape': (2, 0, 3)}\n", ""},
      {"x.safetensors", R"({"t":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})", std::string(16, 'd')},
      {"x.safetensors",
       R"({"__metadata__":{"a":"b"},"w":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},)"
       R"("i":{"dtype":"I64","shape":[1],"data_offsets":[8,16]},"e":{"dtype":"F8_E4M3","shape":[0,5],)"
       R"("data_offsets":[16,16]}})",
       std::string(16, 'd')},
  };
  int opened = 0;
  for (int i = 0; i < kMutations; ++i) {
    Parts parts = valid[static_cast<std::size_t>(i) % valid.size()];
    // Half of the files get a length that fits their changed header, so that more of them reach the later checks.
    const bool reframe = random() % 2 == 0;
    if (reframe) Mutate(parts.header, random);
    std::string bytes = Framed(parts);
    if (!reframe) Mutate(bytes, random);
    SCOPED_TRACE(absl::StrCat("seed ", seed, ", mutation ", i));
    const auto file = TensorFile::Open(Store(parts.name, bytes));
    if (file.ok()) {
      ++opened;
      ASSERT_NO_FATAL_FAILURE(CheckOpened(*file, bytes.size()));
    } else {
      ASSERT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << file.status();
    }
  }
  std::cout << opened << " of " << kMutations << " mutated files opened\n";
  EXPECT_GT(opened, 0);
}

}  // namespace
}  // namespace tessera::client
