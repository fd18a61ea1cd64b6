#include "page/page_history.h"

#include <algorithm>
#include <ctime>

namespace p2pkv {
namespace {

// Records that are looked at before those who note are let in: 30 us.
constexpr uint64_t kLookedAtOnce = 4096;
// Of one page and kind: more than anybody reads.
constexpr size_t kMostFound = 16;
// Besides, of what happened before and differs from all of those: who asks for a page again and again does
// not bury the one reason why it went.
constexpr size_t kMostOthers = 16;

// To four milliseconds, which nobody minds here, for a fifth of what the exact time costs.
uint64_t now_micros() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
}

size_t kind_of(PageEvent event) {
  return static_cast<size_t>(event) / 16;
}

}  // namespace

PageHistory::PageHistory(size_t capacity)
    : capacity_(std::max<size_t>(capacity, 1)),
      began_(now_micros()),
      rings_{Ring(capacity_), Ring(capacity_), Ring(capacity_), Ring(capacity_)} {}

void PageHistory::note(const Key& key, PageEvent event, uint64_t owner) {
  Ring& ring = rings_[std::min(kind_of(event), kKinds - 1)];
  const Record record{key, owner, now_micros() << 8 | static_cast<uint64_t>(event)};
  const std::lock_guard lock(ring.mutex);
  ring.records[ring.n_noted % capacity_] = record;
  ++ring.n_noted;
}

std::vector<PageHistory::Record> PageHistory::find(const Key& key) const {
  std::vector<Record> found;
  for (const Ring& ring : rings_) {
    const std::vector<Record> of_kind = find_in(ring, capacity_, key, kMostFound, kMostOthers);
    found.insert(found.end(), of_kind.begin(), of_kind.end());
  }
  return found;
}

uint64_t PageHistory::stored_at(const Key& key) const {
  const std::vector<Record> found = find_in(rings_[kind_of(PageEvent::kStored)], capacity_, key, 1, 0);
  return found.empty() ? 0 : found.front().micros();
}

std::vector<PageHistory::Record> PageHistory::find_in(const Ring& ring, size_t capacity, const Key& key,
                                                      size_t most, size_t most_others) {
  std::vector<Record> found;
  std::unique_lock lock(ring.mutex);
  const uint64_t end = ring.n_noted;
  for (uint64_t age = 1; age <= std::min<uint64_t>(end, capacity) && found.size() < most + most_others;
       ++age) {
    if (age % kLookedAtOnce == 0) {
      lock.unlock();
      lock.lock();
    }
    if (ring.n_noted - (end - age) > capacity) break;  // written over meanwhile, as are all that are older
    const Record& record = ring.records[(end - age) % capacity];
    if (!(record.key == key)) continue;
    const bool is_another = std::none_of(found.begin(), found.end(), [&](const Record& known) {
      return known.event() == record.event() && known.owner == record.owner;
    });
    if (found.size() < most || is_another) found.push_back(record);
  }
  return found;
}

std::array<uint64_t, PageHistory::kKinds> PageHistory::reach() const {
  std::array<uint64_t, kKinds> since{};
  for (size_t kind = 0; kind < kKinds; ++kind) {
    const Ring& ring = rings_[kind];
    const std::lock_guard lock(ring.mutex);
    const bool is_whole = ring.n_noted <= capacity_;
    since[kind] = is_whole ? began_ : ring.records[ring.n_noted % capacity_].micros();
  }
  return since;
}

}  // namespace p2pkv
