#include "cache/touches.h"

#include <algorithm>
#include <map>
#include <unordered_set>

#include "base/clock.h"

namespace p2pkv {

void Touches::note(PeerId peer, const std::vector<Key>& keys, const std::vector<size_t>& rows) {
  if (rows.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    reads_.reserve(kMost);
    n_seen_ += rows.size();
    const size_t n_free = std::min(rows.size(), kMost - reads_.size());
    for (size_t i = n_free; i-- > 0;) reads_.push_back({keys[rows[i]], peer});
    // A reservoir: what comes later takes the place of others, with the chance that each of them had.
    const bool is_kept = n_free == rows.size() || chance_() % n_seen_ < kMost;
    const size_t to = is_kept ? chance_() % kMost : 0;
    const size_t n_rest = std::min(rows.size() - n_free, kMost);
    for (size_t i = 0; is_kept && i < n_rest; ++i) {
      reads_[(to + n_rest - 1 - i) % kMost] = {keys[rows[n_free + i]], peer};
    }
    if (n_seen_ > rows.size()) return;  // who drains was told of those before
  }
  filled_.notify_one();
}

std::vector<Touches::OfPeer> Touches::drain(double timeout) {
  std::vector<Read> reads;
  {
    std::unique_lock lock(mutex_);
    filled_.wait_until(lock, Deadline::after(timeout).at(), [this] { return !reads_.empty() || is_closed_; });
    reads.assign(reads_.begin(), reads_.end());
    reads_.clear();
    n_seen_ = 0;
  }
  std::map<PeerId, OfPeer> by_peer;
  std::unordered_set<Key, KeyHash> seen;
  for (auto read = reads.rbegin(); read != reads.rend(); ++read) {
    if (!seen.insert(read->key).second) continue;
    OfPeer& of_peer = by_peer[read->peer];
    of_peer.peer = read->peer;
    of_peer.keys.push_back(read->key);
  }
  std::vector<OfPeer> drained;
  for (auto& [peer, of_peer] : by_peer) drained.push_back(std::move(of_peer));
  return drained;
}

void Touches::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    reads_.clear();
  }
  filled_.notify_all();
}

}  // namespace p2pkv
