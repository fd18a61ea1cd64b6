// What peers make this node remember, bounded: in all, and so that one of them can't have it all.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace p2pkv::offers {

// Thread-safe.
class Shares : public std::enable_shared_from_this<Shares> {
 public:
  // Once `most` bytes are taken, a link gets more only as far as its share of `most` goes. So the sum stays
  // below most * (2 + ln(links)), and who keeps to its share is never refused because of others.
  explicit Shares(uint64_t most) : most_(most) {}

  // Null: refused. Given back when what it returns is destroyed.
  std::shared_ptr<const void> take(uint64_t link, uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    uint64_t& own = by_link_[link];
    if (total_ + nbytes > most_ && own + nbytes > most_ / by_link_.size()) {
      if (own == 0) by_link_.erase(link);
      return nullptr;
    }
    own += nbytes;
    total_ += nbytes;
    return {this, [self = shared_from_this(), link, nbytes](const void*) { self->give_back(link, nbytes); }};
  }

 private:
  void give_back(uint64_t link, uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    total_ -= nbytes;
    const auto own = by_link_.find(link);
    if ((own->second -= nbytes) == 0) by_link_.erase(own);
  }

  const uint64_t most_;
  std::mutex mutex_;  // guards all below
  std::map<uint64_t, uint64_t> by_link_;
  uint64_t total_ = 0;
};

}  // namespace p2pkv::offers
