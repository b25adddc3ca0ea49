// How the processes of the isolation program tell each other where they are: by files beside a worker's result. A mark
// `go` of the result /x/7.json is the file /x/7.json.go; what a mark says is its content.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/status/status.h"

namespace tessera::gpu_test {

using Json = nlohmann::ordered_json;

// Of CLOCK_MONOTONIC, which all processes of a machine share.
inline std::int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Written under another name first: whoever sees the file finds all of it.
absl::Status WriteJson(const std::string& path, const Json& json);
// Discarded (Json::is_discarded) if there is no such file, or no JSON in it.
Json ReadJson(const std::string& path);

class Marks {
 public:
  explicit Marks(std::string result) : result_(std::move(result)) {}

  absl::Status Set(const std::string& mark, const Json& says = nullptr) const { return WriteJson(File(mark), says); }
  bool IsSet(const std::string& mark) const;
  Json Says(const std::string& mark) const { return ReadJson(File(mark)); }
  // Until it is set: whoever calls this has a watchdog.
  void Await(const std::string& mark) const;

 private:
  std::string File(const std::string& mark) const { return result_ + "." + mark; }
  std::string result_;
};

}  // namespace tessera::gpu_test
