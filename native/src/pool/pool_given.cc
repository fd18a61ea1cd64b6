// The way of pages into the pool that somebody else brings: rounds of them, each summed here while the next
// one is on its way.
#include <functional>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/copy_team.h"
#include "pool/pool.h"

namespace p2pkv {

// Kept memory has a successor, which takes over as soon as this process is dead: a device may write on then.
// A pool that is shown to engines has the same records, and so it takes none either. A page that is packed
// has to be read before it is known where it goes.
bool Pool::takes_given() const {
  return kept_ == nullptr && options_.packing == Packing::kOff;
}

// Has a giver fill the blocks of the pages that have one. kNotTried becomes of those that it could not bring.
void Pool::have_given(const PageBatch& batch, PageGiver& giver, std::vector<Draft>* drafts,
                      PoolStatus* statuses, const Deadline& deadline) {
  size_t next = 0;
  const auto begin = [&] {
    std::vector<GivenPage> wanted;
    uint64_t nbytes = 0;
    for (; next < batch.n_pages && nbytes < options_.given_at_once; ++next) {
      if (statuses[next] != PoolStatus::kStored) continue;
      wanted.push_back({next, data_at((*drafts)[next].granule), (*drafts)[next].length});
      nbytes += (*drafts)[next].length;
    }
    const bool is_late = deadline.passed();
    for (const GivenPage& given : wanted) {
      statuses[given.page] = is_late ? PoolStatus::kTimedOut : PoolStatus::kNotTried;
      if (is_late) note_refused(batch.keys[given.page], PoolStatus::kTimedOut);
    }
    if (is_late || wanted.empty()) return std::vector<GivenPage>{};
    auto begun = giver.begin(wanted, {region_->base(), region_->nbytes(), false, region_->kept()});
    for (const GivenPage& given : begun) statuses[given.page] = PoolStatus::kStored;
    return begun;
  };
  const auto end = [&](const std::vector<GivenPage>& pages) {
    if (pages.empty()) return;
    const PageGiver::Outcome outcome = giver.wait();
    uint64_t nbytes = 0;
    for (const GivenPage& given : pages) {
      nbytes += (*drafts)[given.page].length;
      if (outcome != PageGiver::Outcome::kBrought) statuses[given.page] = PoolStatus::kNotTried;
      // Its block stays reserved for good.
      if (outcome == PageGiver::Outcome::kLost) (*drafts)[given.page].granule = PageBlocks::kNone;
    }
    if (outcome != PageGiver::Outcome::kBrought) return;
    const auto sum = [&](size_t i) {
      Draft& draft = (*drafts)[pages[i].page];
      draft.checksum = checksum(pages[i].to, draft.length);
    };
    make_copies({pages.size(), nbytes, std::ref(sum)}, [] { return false; });
  };
  std::vector<GivenPage> before = begin();
  while (!before.empty() || next < batch.n_pages) {
    std::vector<GivenPage> round = begin();
    end(before);
    before = std::move(round);
  }
}

}  // namespace p2pkv
