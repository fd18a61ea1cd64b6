// Where in the pool the pages are old: sums over 256 stretches of it, kept as pages come, go and are used.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

namespace p2pkv {

// Not thread-safe. Stamps, ages and `now` are those of SizeQueues.
class AgeMap {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // A run of granules of the pool.
  struct Run {
    uint32_t begin;
    uint32_t length;
  };

  explicit AgeMap(uint32_t n_granules);

  // Pages that came, from the time on when they are written; went, with nobody who holds them; or were used:
  // then `stamp` was theirs until now.
  void add(const Run& page, uint64_t stamp);
  void remove(const Run& page, uint64_t stamp);
  void touch(const Run& page, uint64_t stamp, uint64_t now);
  // Pages that must stay from now on, or need no longer.
  void hold(const Run& page);
  void let_go(const Run& page);

  // Where pages are oldest on average, over at least `n_granules`; kNone if there is no such place where
  // nobody is. Free granules count as older than all pages, held ones as very young. A stretch that has held
  // pages is not named again until `rest` has been committed, for it will mostly have been named in vain.
  uint32_t oldest_stretch(uint32_t n_granules, uint64_t eldest_stamp, uint64_t now, uint64_t n_committed,
                          uint64_t rest);
  // Somebody is at work there: it is not named while `oldest_stretch` is asked.
  void close(uint32_t begin, uint32_t end);
  void open_all() { is_closed_.fill(false); }

  uint32_t unit() const { return 1u << unit_bits_; }

 private:
  static constexpr uint32_t kMostUnits = 256;

  struct Unit {
    uint64_t stamps = 0;  // of its pages, times their granules here; wraps, as differences do not care
    uint32_t n_live = 0;  // granules of pages
    uint32_t n_held = 0;  // granules of held ones
    uint64_t named = 0;   // what had been committed when it was named last
  };

  template <typename Change>
  void for_each_unit(const Run& page, Change change);

  const uint32_t n_granules_;
  const uint32_t unit_bits_;
  const uint32_t n_units_;
  std::array<Unit, kMostUnits> units_{};
  std::array<bool, kMostUnits> is_closed_{};
};

}  // namespace p2pkv
