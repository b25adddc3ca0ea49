#include "planner/tuning_directory.h"

namespace tessera::planner {
namespace {

bool NamesADirectory(std::string_view path) {
  return path.starts_with('/') && path.find_first_not_of('/') != std::string_view::npos;
}

std::string Below(std::string_view directory, std::string_view name) {
  const std::size_t end = directory.find_last_not_of('/');
  return std::string(directory.substr(0, end + 1)).append(name);
}

}  // namespace

TuningDirectory ChooseTuningDirectory(std::string_view setting, std::string_view xdg_cache_home,
                                      std::string_view home) {
  if (setting == "off") return {.off = true};
  if (!setting.empty()) return {.path = std::string(setting)};
  if (NamesADirectory(xdg_cache_home)) return {.path = Below(xdg_cache_home, "/tessera")};
  if (NamesADirectory(home)) return {.path = Below(home, "/.cache/tessera")};
  return {};
}

}  // namespace tessera::planner
