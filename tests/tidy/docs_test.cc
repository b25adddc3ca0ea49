// Documents that are made from tables must equal what the tables say now. TESSERA_UPDATE_GOLDEN=1 rewrites them.

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "server/config/settings.h"
#include "server/telemetry/metrics.h"

namespace tessera::server {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void ExpectDocument(const std::string& name, const std::string& text) {
  const std::string path = std::string(TESSERA_SOURCE_DIR) + "/docs/guides/" + name;
  if (std::getenv("TESSERA_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << text;
  EXPECT_EQ(ReadFile(path), text) << "docs/guides/" << name
                                  << " is not what the table says; TESSERA_UPDATE_GOLDEN=1 rewrites it";
}

TEST(DocsTest, SettingsGuideIsTheTable) {
  ExpectDocument("settings.md", SettingsMarkdown());
}

TEST(DocsTest, MetricsGuideIsTheTable) {
  ExpectDocument("metrics.md", MetricsMarkdown());
}

}  // namespace
}  // namespace tessera::server
