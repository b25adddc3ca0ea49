// What the end-to-end program found: one row for each route of each environment. Also how a client process tells its
// rows to the one that started it.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::gpu_test {

struct Row {
  std::string environment;
  std::string route;
  std::int64_t cases = 0;
  std::int64_t failed = 0;
  std::string detail;                           // the first failures, or a remark
  std::map<std::string, double> measured = {};  // the unit is the name's end

  // One case; `what` says what is wrong if it failed.
  void Check(bool ok, std::string_view what) {
    ++cases;
    if (ok) return;
    ++failed;
    if (failed <= kFailuresKept) Remark(what);
  }

  void Remark(std::string_view what) {
    if (!detail.empty()) detail += "; ";
    detail += what;
  }

  static constexpr std::int64_t kFailuresKept = 4;
};

inline void to_json(nlohmann::ordered_json& json, const Row& row) {  // NOLINT(readability-identifier-naming)
  json = {{"environment", row.environment},
          {"route", row.route},
          {"cases", row.cases},
          {"failed", row.failed},
          {"detail", row.detail}};
  if (!row.measured.empty()) json["measured"] = row.measured;
}

inline void from_json(const nlohmann::ordered_json& json, Row& row) {  // NOLINT(readability-identifier-naming)
  json.at("environment").get_to(row.environment);
  json.at("route").get_to(row.route);
  json.at("cases").get_to(row.cases);
  json.at("failed").get_to(row.failed);
  json.at("detail").get_to(row.detail);
  if (json.contains("measured")) json.at("measured").get_to(row.measured);
}

}  // namespace tessera::gpu_test
