// What engines say of the pages that their calls find: the host's node brings what is found often into its
// pool, as it does for its own calls (p2pkv/cache/hot_guests.py).
//
// It is hearsay, which costs the node so many places an engine and nothing else: who decides what is brought
// sees to it that an engine that lies does so at its own expense.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "attach/frames.h"
#include "base/clock.h"
#include "page/location.h"

namespace p2pkv::attaching {

// Thread-safe.
class EngineFinds {
 public:
  // Engines say it once a second. Who has not said it for so long has ended, hangs, or finds nothing.
  static constexpr int64_t kLastsNs = 3'000'000'000;

  struct Page {
    Key key;
    Finds finds;
  };
  struct OfEngine {
    uint64_t engine;
    std::vector<Page> pages;  // what is found most comes first
  };

  explicit EngineFinds(int64_t (*now_ns)() = steady_now_ns) : now_ns_(now_ns) {}

  // What this engine finds now, in place of what it said before.
  void take(uint64_t engine, const std::vector<Key>& keys, const std::vector<Finds>& finds);
  // Returns what each engine finds, of the pages that all of them together find `least_rate` times a second
  // and oftener. If these are more than `most`, each engine's first ones count in turns.
  std::vector<OfEngine> list(double least_rate, size_t most);
  // The engine has ended.
  void forget(uint64_t engine);

 private:
  struct Said {
    int64_t at_ns;
    std::vector<Page> pages;
  };

  void forget_old();  // with the lock

  int64_t (*const now_ns_)();
  std::mutex mutex_;  // guards what follows
  std::map<uint64_t, Said> said_;
};

}  // namespace p2pkv::attaching
