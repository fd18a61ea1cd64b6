#include "attach/engine_shares.h"

#include <algorithm>

namespace p2pkv::attaching {

PoolShare EngineShares::open(uint64_t mark) {
  const std::lock_guard lock(mutex_);
  if (left_.empty()) {
    marks_.push_back(mark);
    return {static_cast<uint32_t>(marks_.size()), share_};
  }
  const auto marked = [this](uint64_t wanted) {
    return std::find_if(left_.begin(), left_.end(), [=](const Left& one) { return one.mark == wanted; });
  };
  auto found = marked(mark);
  if (found == left_.end()) found = marked(0);  // nobody comes back for it
  if (found == left_.end()) found = left_.begin();
  const uint32_t account = found->account;
  left_.erase(found);
  marks_[account - 1] = mark;
  return {account, share_};
}

void EngineShares::leave(const PoolShare& share) {
  const std::lock_guard lock(mutex_);
  left_.push_back({share.account, marks_[share.account - 1]});
}

uint64_t EngineShares::largest_charge() {
  size_t n_accounts = 0;
  {
    const std::lock_guard lock(mutex_);
    n_accounts = marks_.size();
  }
  uint64_t largest = 0;
  for (uint32_t account = 1; account <= n_accounts; ++account)
    largest = std::max(largest, pool_.charged_nbytes(account));
  return largest;
}

}  // namespace p2pkv::attaching
