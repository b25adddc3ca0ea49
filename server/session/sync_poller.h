// Sees what changes in the daemon's memory without a call: values that clients and GPUs write, and events of other
// processes. Looks only while somebody waits for one of them.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::server {

class Pollable {
 public:
  virtual ~Pollable() = default;
  // Looks, and wakes whom it may concern, on the poller's thread. False: nobody waits for it any more, and it is
  // forgotten until it is added again.
  virtual bool Poll() = 0;
};

// Thread-safe. Its thread starts with the first Add.
class SyncPoller {
 public:
  SyncPoller() = default;
  SyncPoller(const SyncPoller&) = delete;
  SyncPoller& operator=(const SyncPoller&) = delete;
  ~SyncPoller();  // not on its own thread

  void Add(std::weak_ptr<Pollable> pollable);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Pollable>> new_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tessera::server
