// Bringing pages of the disk tier back into the pool, as peers and the data path ask for it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/clock.h"
#include "page/location.h"

namespace p2pkv {

class Promoter {
 public:
  // By key, in the order of the question: 1 for what can be read from the pool now, and where it lies.
  using Done = std::function<void(std::vector<uint8_t> found, std::vector<Location> locations)>;

  // A lease says how long pages are to stay in the pool. `id` is the reader's, drawn at random; 0: it can't
  // be released. `asker` is who may pin no more than a share of the pool with all its leases, and whose end
  // ends them.
  struct Lease {
    double seconds = 0;
    uint64_t id = 0;
    uint64_t asker = 0;
  };

  virtual ~Promoter() = default;
  // Loads pages into the pool and keeps them there for the lease. Never blocks. `done` is called exactly
  // once, on any thread, with what is there: as soon as that is settled, and at `answer_by` at the latest.
  // Loading goes on after that. An `answer_by` that has passed asks for nothing but to begin.
  virtual void promote(std::vector<Key> keys, Lease lease, Deadline answer_by, Done done) = 0;
  // Ends a lease: its reader has read, or given up. What is still loaded for it is not kept either.
  virtual void release(uint64_t lease) = 0;
  // Ends all leases of an asker that is gone.
  virtual void leave(uint64_t asker) = 0;
};

}  // namespace p2pkv
