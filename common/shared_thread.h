// Threads that serve many at once, such as the one that sees completions, say so: what runs there for one of them may
// not wait for long, and looks whether it is there.
#pragma once

namespace tessera {

inline thread_local bool on_shared_thread = false;

}  // namespace tessera
