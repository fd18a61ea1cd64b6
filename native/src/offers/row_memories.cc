#include "offers/row_memories.h"

#include <algorithm>

#include "net/tokens.h"

namespace p2pkv::offers {

bool RowMemory::is_readable() const {
  if (device) return is_offerable;
  return std::any_of(descriptions.begin(), descriptions.end(),
                     [](const auto& blob) { return !blob.empty(); });
}

bool RowMemory::takes_directly() const {
  return device &&
         std::any_of(regions.begin(), regions.end(), [](const auto& region) { return region != nullptr; });
}

bool PlacedRows::lie_in(uint32_t memory_id) const {
  return std::any_of(memories.begin(), memories.end(),
                     [memory_id](const auto& memory) { return memory->id == memory_id; });
}

bool PlacedRows::lie_in_closed_memory() const {
  return std::any_of(memories.begin(), memories.end(),
                     [](const auto& memory) { return memory->is_closed->load(); });
}

bool PlacedRows::lie_on_devices() const {
  return std::any_of(memories.begin(), memories.end(),
                     [](const auto& memory) { return memory->device != nullptr; });
}

uint64_t PlacedRows::nbytes() const {
  uint64_t total = 0;
  for (const Row& row : rows) total += row.length;
  return total;
}

void PlacedRows::append(const std::shared_ptr<const RowMemory>& memory, uint64_t offset, uint64_t length) {
  // Neighbouring rows mostly lie in one memory.
  size_t number = rows.empty() ? memories.size() : rows.back().memory;
  if (number == memories.size() || memories[number] != memory) {
    number = static_cast<size_t>(std::find(memories.begin(), memories.end(), memory) - memories.begin());
    if (number == memories.size()) memories.push_back(memory);
  }
  rows.push_back({static_cast<uint32_t>(number), offset, length});
}

PlacedRows PlacedRows::part(size_t first, size_t n) const {
  PlacedRows some;
  some.rows.reserve(n);
  for (size_t i = first; i < first + n; ++i)
    some.append(memories[rows[i].memory], rows[i].offset, rows[i].length);
  return some;
}

RowMemories::RowMemories() {
  // So that an offer of an earlier life names nothing in this one.
  fill_random(&next_id_, sizeof next_id_);
}

uint32_t RowMemories::add(RowMemory memory) {
  const std::lock_guard lock(mutex_);
  memory.id = ++next_id_;
  const auto at = std::find_if(memories_.begin(), memories_.end(),
                               [&memory](const auto& known) { return known->address > memory.address; });
  memories_.insert(at, std::make_shared<const RowMemory>(std::move(memory)));
  return next_id_;
}

std::shared_ptr<const RowMemory> RowMemories::remove(uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto at =
      std::find_if(memories_.begin(), memories_.end(), [id](const auto& known) { return known->id == id; });
  if (at == memories_.end()) return nullptr;
  auto memory = *at;
  memories_.erase(at);
  memory->is_closed->store(true);
  return memory;
}

std::shared_ptr<const RowMemory> RowMemories::at(uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto at =
      std::find_if(memories_.begin(), memories_.end(), [id](const auto& known) { return known->id == id; });
  return at == memories_.end() ? nullptr : *at;
}

PlacedRows RowMemories::place(const std::vector<RowSpan>& spans, bool for_reading, int64_t* bad_row) {
  PlacedRows placed;
  placed.rows.reserve(spans.size());
  *bad_row = -1;
  const std::lock_guard lock(mutex_);
  const auto extent_of = [](const auto& memory) { return memory->extent(); };
  auto holder = memories_.cend();
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto [address, nbytes] = spans[i];
    // Neighbouring rows mostly lie in one memory.
    if (holder == memories_.cend() || !holds((*holder)->extent(), address, nbytes))
      holder = find_holder(memories_, address, nbytes, extent_of);
    if (holder == memories_.cend() || nbytes <= 0 ||
        !(for_reading ? (*holder)->is_readable() : (*holder)->is_writable)) {
      *bad_row = static_cast<int64_t>(i);
      return placed;
    }
    const auto& memory = *holder;
    placed.append(memory, static_cast<uint64_t>(address) - memory->address, static_cast<uint64_t>(nbytes));
  }
  return placed;
}

}  // namespace p2pkv::offers
