// Which pages were read from whom lately, for their owners to be told.
//
// A page that is pulled leaves no trace in its owner's pool, which would evict what others use and keep what
// nobody does. So readers tell owners, from time to time and within bounds, what they have read.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include "page/location.h"
#include "peers/connection.h"

namespace p2pkv {

// Thread-safe. One mutex, taken once for an owner's part of a fetch; nothing is allocated after the first
// read.
class Touches {
 public:
  // So many reads are kept between two drains. Of more, each fetch's are kept with the same chance.
  static constexpr size_t kMost = 4096;

  // Pages of one peer, each once; those that were read last come first, and of one fetch its first ones.
  struct OfPeer {
    PeerId peer;
    std::vector<Key> keys;
  };

  // The pages `keys[rows[...]]` were read from this peer.
  void note(PeerId peer, const std::vector<Key>& keys, const std::vector<size_t>& rows);
  // Takes what has been noted since; waits at most `timeout` seconds while there is nothing.
  std::vector<OfPeer> drain(double timeout);
  // Wakes who drains; nobody waits from now on, and nothing is noted.
  void close();

 private:
  struct Read {
    Key key;
    PeerId peer;
  };

  std::mutex mutex_;  // guards all below
  std::condition_variable filled_;
  std::vector<Read> reads_;  // a fetch's last page first, so that all of it is in order from the end
  uint64_t n_seen_ = 0;      // since the last drain
  std::minstd_rand chance_{std::random_device{}()};
  bool is_closed_ = false;
};

}  // namespace p2pkv
