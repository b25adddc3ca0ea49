#include "planner/tuned_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace tessera::planner {
namespace {

using ::testing::HasSubstr;

DeviceSignature Gpu() {
  return {.device = "NVIDIA H200", .capability = "9.0", .processors = "132", .driver = "570.124.06", .cuda = "12.8"};
}

TunedRow RowOf(std::string text, double us = 12.5, std::int64_t when_ms = 1'766'000'000'123) {
  return {.text = std::move(text),
          .variant = "gemm.sm90a.bf16_bf16.bf16.fast.NT/64x128x64_s6",
          .source_hash = "0123456789abcdef",
          .us = us,
          .when = absl::FromUnixMillis(when_ms)};
}

std::vector<TunedRow> SomeRows() {
  return {RowOf("gemm.sm90a.bf16_bf16.bf16.fast.NT m(0,16] -> 64x128x64_s6 split=4"),
          RowOf("gemm.sm90a.bf16_bf16.bf16.fast.NT m(16,*] -> 64x128x64_s6", 0.1, 0),
          RowOf("c -> r", 0.0, 253'402'300'799'000), RowOf("c n(1,2] -> r", 1e12), RowOf("c n(2,3] -> r", 1.0 / 3.0)};
}

TEST(TunedRowsTest, ReadsWhatItWrote) {
  for (const std::vector<TunedRow>& rows : {SomeRows(), std::vector<TunedRow>()}) {
    for (const TunedRow& row : rows) EXPECT_TRUE(CheckTunedRow(row).ok()) << CheckTunedRow(row);
    const auto file = ParseTunedRows(ToText(Gpu(), rows));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->signature, Gpu());
    EXPECT_EQ(file->rows, rows);
  }
}

TEST(TunedRowsTest, PeopleMayAddCommentsAndBlanks) {
  std::string text = ToText(Gpu(), SomeRows());
  text.insert(text.find("gemm."), "# by hand\n\n   \n");
  EXPECT_EQ(ParseTunedRows(text)->rows, SomeRows());
}

TEST(TunedRowsTest, AFileCutAnywhereIsNone) {
  const std::string text = ToText(Gpu(), SomeRows());
  for (std::size_t length = 0; length < text.size(); ++length) {
    EXPECT_FALSE(ParseTunedRows(text.substr(0, length)).ok()) << length;
  }
  EXPECT_FALSE(ParseTunedRows(text + "\n").ok());
  EXPECT_FALSE(ParseTunedRows(text + text).ok());
}

TEST(TunedRowsTest, NoByteThatIsChangedMakesARowThatCannotBeWritten) {
  const std::string text = ToText(Gpu(), SomeRows());
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (const char c : {'\0', '\n', ' ', '#', '-', '9', '=', '\x80', '\xff'}) {
      std::string changed = text;
      changed[at] = c;
      const auto file = ParseTunedRows(changed);
      if (!file.ok()) continue;
      const auto again = ParseTunedRows(ToText(file->signature, file->rows));
      ASSERT_TRUE(again.ok()) << at << " " << again.status();
      EXPECT_EQ(again->rows, file->rows);
      EXPECT_EQ(again->signature, file->signature);
    }
  }
}

TEST(TunedRowsTest, RefusesWithTheLine) {
  const std::string head = ToText(Gpu(), {}).substr(0, ToText(Gpu(), {}).find("#! end"));
  const std::string row = "c -> r #! variant=v hash=0123456789abcdef us=1 when=2026-01-01T00:00:00.000Z\n";
  ASSERT_TRUE(ParseTunedRows(head + row + "#! end\n").ok());
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string line = row;
    return line.replace(line.find(from), from.size(), to);
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {changed("us=1", "us=nan"), "us"},
      {changed("us=1", "us=-1"), "us"},
      {changed("us=1", "us=inf"), "us"},
      {changed("us=1", "us=1e13"), "us"},
      {changed("us=1", "us="), "us"},
      {changed("us=1", "us=1x"), "us"},
      {changed("us=1", "us=0x1"), "us"},
      {changed("us=1 ", ""), "us"},
      {changed("2026", "1969"), "when"},
      {changed("2026-01", "2026-13"), "when"},
      {changed("hash=0123456789abcdef", "hash=0123"), "hash"},
      {changed("hash=0123456789abcdef", "hash=0123456789ABCDEF"), "hash"},
      {changed("variant=v", "variant="), "variant"},
      {changed(" -> ", " "), "text"},
      {changed("#! variant", "variant"), "expected a row"},
      {changed("000Z", "000Z more"), "unexpected"},
      {changed("c ", "\xff "), "printable"},
      {changed("c ", "\xc3\xa4 "), "printable"},
      {std::string(5000, 'x') + "\n", "too long"}};
  for (const auto& [line, reason] : cases) {
    const auto file = ParseTunedRows(absl::StrCat(head, row, line, "#! end\n"));
    ASSERT_FALSE(file.ok()) << line;
    EXPECT_THAT(MessageOf(file.status()), ::testing::AllOf(HasSubstr("line 8"), HasSubstr(reason))) << line;
  }
}

TEST(TunedRowsTest, RefusesMoreRowsThanItTakes) {
  std::vector<TunedRow> rows(kTunedRowsLimit, RowOf("c -> r"));
  EXPECT_TRUE(ParseTunedRows(ToText(Gpu(), rows)).ok());
  rows.push_back(rows[0]);
  EXPECT_FALSE(ParseTunedRows(ToText(Gpu(), rows)).ok());
}

TEST(TunedRowsTest, RowsThatCannotBeWrittenAreRefused) {
  const auto refused = [](const TunedRow& row) { return absl::IsInvalidArgument(CheckTunedRow(row)); };
  for (const char* text : {"", "c", "-> r", "c  -> r", " c -> r", "c -> r # x", "c\n -> r", "c -> r\xff"}) {
    EXPECT_TRUE(refused(RowOf(text))) << text;
  }
  EXPECT_TRUE(refused(RowOf("c -> " + std::string(2000, 'r'))));
  for (const double us :
       {-1.0, 2e12, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(refused(RowOf("c -> r", us))) << us;
  }
  TunedRow row = RowOf("c -> r");
  row.when += absl::Microseconds(1);
  EXPECT_TRUE(refused(row));
  row.when = absl::InfiniteFuture();
  EXPECT_TRUE(refused(row));
  for (const char* variant : {"", "a b", "a=b", "a#b", "a\n"}) {
    row = RowOf("c -> r");
    row.variant = variant;
    EXPECT_TRUE(refused(row)) << variant;
  }
}

TEST(DeviceSignatureTest, AnyFieldMakesAnotherFile) {
  const DeviceSignature gpu = Gpu();
  const std::string name = FileStemOf(gpu);
  EXPECT_THAT(name, ::testing::StartsWith("nvidia-h200-"));
  for (std::string DeviceSignature::*field :
       {&DeviceSignature::device, &DeviceSignature::capability, &DeviceSignature::processors, &DeviceSignature::driver,
        &DeviceSignature::cuda}) {
    DeviceSignature other = gpu;
    other.*field += "1";
    EXPECT_NE(FileStemOf(other), name);
    other.*field = " ";
    EXPECT_TRUE(absl::IsInvalidArgument(CheckedSignature(other).status()));
    other.*field = std::string(200, 'x');
    EXPECT_TRUE(absl::IsInvalidArgument(CheckedSignature(other).status()));
  }
}

TEST(DeviceSignatureTest, NamesOfDevicesLeadNowhere) {
  for (const char* device : {"../../etc/passwd", "a\\b", "/", "\xff\n", "...", "Intel(R) Xeon(R) @ 2.0GHz"}) {
    DeviceSignature raw = Gpu();
    raw.device = device;
    const auto checked = CheckedSignature(raw);
    ASSERT_TRUE(checked.ok()) << checked.status();
    const std::string name = FileStemOf(*checked);
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-"), std::string::npos) << name;
    EXPECT_LE(name.size(), 80U);
  }
}

}  // namespace
}  // namespace tessera::planner
