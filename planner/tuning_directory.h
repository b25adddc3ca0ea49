// Where tuned rows are kept when several places are possible. A pure function, so that every environment can be tested.
#pragma once

#include <string>
#include <string_view>

namespace tessera::planner {

struct TuningDirectory {
  std::string path;  // empty: nowhere
  bool off = false;  // which is as somebody wants it
};

// The first that is usable of: `setting`, `xdg_cache_home`/tessera, `home`/.cache/tessera; arguments are empty where
// the setting or variable is not set. A `setting` is taken as it is, "off" means nowhere. The variables count only if
// they are absolute, as the XDG specification has it, and no root directory: a user that a container made up has
// HOME=/, and a cache belongs into no image's root.
TuningDirectory ChooseTuningDirectory(std::string_view setting, std::string_view xdg_cache_home, std::string_view home);

}  // namespace tessera::planner
