#include "tests/gpu/isolation_files.h"

#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"

namespace tessera::gpu_test {

absl::Status WriteJson(const std::string& path, const Json& json) {
  const std::string part = path + ".part";
  std::ofstream file(part);
  // A message of the system's need not be UTF-8.
  file << json.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
  file.close();
  std::error_code error;
  if (!file.fail()) std::filesystem::rename(part, path, error);
  if (file.fail() || error) return absl::InternalError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

Json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return Json::parse(file, nullptr, /*allow_exceptions=*/false);
}

bool Marks::IsSet(const std::string& mark) const {
  std::error_code error;
  return std::filesystem::exists(File(mark), error);
}

void Marks::Await(const std::string& mark) const {
  while (!IsSet(mark)) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

}  // namespace tessera::gpu_test
