// Log lines as an operator's collector reads them.
#include "server/telemetry/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <functional>
#include <string>

namespace tessera::server {
namespace {

using testing::MatchesRegex;

const std::string kTime = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z";

std::string StderrOf(const std::function<void()>& act) {
  testing::internal::CaptureStderr();
  act();
  return testing::internal::GetCapturedStderr();
}

TEST(LogTest, TextIsOneLineAMessage) {
  ASSERT_TRUE(InitLogging("info", "text").ok());
  EXPECT_THAT(StderrOf([] { spdlog::info("serving on {}", "a\nb\x1b[31m\"\\"); }),
              MatchesRegex(kTime + " info \\[[0-9]+\\] serving on a\\\\nb\\\\u001b\\[31m\"\\\\\n"));
}

TEST(LogTest, JsonIsEscaped) {
  ASSERT_TRUE(InitLogging("warn", "json").ok());
  EXPECT_THAT(StderrOf([] { spdlog::error("quote \" slash \\ tab \t line \n umlaut \xC3\xA4 nul {}", '\0'); }),
              MatchesRegex("\\{\"time\":\"" + kTime +
                           "\",\"level\":\"error\",\"thread\":[0-9]+,\"message\":\"quote \\\\\" slash \\\\\\\\ tab "
                           "\\\\u0009 line \\\\n umlaut \xC3\xA4 nul \\\\u0000\"\\}\n"));
}

TEST(LogTest, BrokenUtf8IsReplaced) {
  ASSERT_TRUE(InitLogging("info", "json").ok());
  const std::string replaced = "\xEF\xBF\xBD";
  const auto message = [](const std::string& text) {
    const std::string line = StderrOf([&] { spdlog::info("{}", text); });
    const std::size_t begin = line.find("\"message\":\"") + 11;
    return line.substr(begin, line.size() - begin - 3);
  };
  EXPECT_EQ(message("a\xFFz"), "a" + replaced + "z");
  EXPECT_EQ(message("cut \xE2\x82"), "cut " + replaced + replaced);
  EXPECT_EQ(message("\xC0\xAF"), replaced + replaced);                 // overlong
  EXPECT_EQ(message("\xED\xA0\x80"), replaced + replaced + replaced);  // a surrogate
  EXPECT_EQ(message("\xF4\x90\x80\x80"), replaced + replaced + replaced + replaced);
  EXPECT_EQ(message("\xE2\x82\xAC \xF0\x9F\x99\x82"), "\xE2\x82\xAC \xF0\x9F\x99\x82");
}

TEST(LogTest, LevelsFilterAndChange) {
  ASSERT_TRUE(InitLogging("warn", "text").ok());
  EXPECT_EQ(LogLevel(), "warn");
  EXPECT_EQ(StderrOf([] { spdlog::info("hidden"); }), "");
  EXPECT_EQ(SetLogLevel("debug").value(), "warn");
  EXPECT_EQ(LogLevel(), "debug");
  EXPECT_NE(StderrOf([] { spdlog::debug("shown"); }), "");
  EXPECT_EQ(SetLogLevel("off").value(), "debug");
  EXPECT_EQ(StderrOf([] { spdlog::critical("hidden"); }), "");
}

TEST(LogTest, UnknownNamesChangeNothing) {
  ASSERT_TRUE(InitLogging("info", "text").ok());
  EXPECT_EQ(SetLogLevel("loud").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(InitLogging("", "text").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(InitLogging("error", "xml").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LogLevel(), "info");
}

}  // namespace
}  // namespace tessera::server
