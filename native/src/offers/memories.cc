#include "offers/memories.h"

#include <algorithm>

#include "base/checked.h"
#include "net/tokens.h"

namespace p2pkv::offers {

bool Memory::is_readable() const {
  if (device) return is_offerable;
  return std::any_of(descriptions.begin(), descriptions.end(),
                     [](const auto& blob) { return !blob.empty(); });
}

bool Memory::holds(const RowSpan& span) const {
  const auto start = static_cast<uint64_t>(span.address);
  const auto length = static_cast<uint64_t>(span.nbytes);
  return span.address >= 0 && span.nbytes > 0 && start >= address &&
         lies_within(start - address, length, nbytes);
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

void PlacedRows::append(const std::shared_ptr<const Memory>& memory, uint64_t offset, uint64_t length) {
  // Neighbouring rows mostly lie in one memory.
  size_t number = rows.empty() ? memories.size() : rows.back().memory;
  if (number == memories.size() || memories[number] != memory) {
    number = static_cast<size_t>(std::find(memories.begin(), memories.end(), memory) - memories.begin());
    if (number == memories.size()) memories.push_back(memory);
  }
  rows.push_back({static_cast<uint32_t>(number), offset, length});
}

Memories::Memories() {
  // So that an offer of an earlier life names nothing in this one.
  fill_random(&next_id_, sizeof next_id_);
}

uint32_t Memories::add(Memory memory) {
  const std::lock_guard lock(mutex_);
  memory.id = ++next_id_;
  const auto at = std::find_if(memories_.begin(), memories_.end(),
                               [&memory](const auto& known) { return known->address > memory.address; });
  memories_.insert(at, std::make_shared<const Memory>(std::move(memory)));
  return next_id_;
}

std::shared_ptr<const Memory> Memories::remove(uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto at =
      std::find_if(memories_.begin(), memories_.end(), [id](const auto& known) { return known->id == id; });
  if (at == memories_.end()) return nullptr;
  auto memory = *at;
  memories_.erase(at);
  memory->is_closed->store(true);
  return memory;
}

std::shared_ptr<const Memory> Memories::at(uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto at =
      std::find_if(memories_.begin(), memories_.end(), [id](const auto& known) { return known->id == id; });
  return at == memories_.end() ? nullptr : *at;
}

PlacedRows Memories::place(const std::vector<RowSpan>& spans, bool for_reading, int64_t* bad_row) {
  PlacedRows placed;
  placed.rows.reserve(spans.size());
  *bad_row = -1;
  const std::lock_guard lock(mutex_);
  std::shared_ptr<const Memory> last;
  for (size_t i = 0; i < spans.size(); ++i) {
    if (!last || !last->holds(spans[i])) {
      const auto after =
          std::upper_bound(memories_.begin(), memories_.end(), static_cast<uint64_t>(spans[i].address),
                           [](uint64_t address, const auto& memory) { return address < memory->address; });
      last = after == memories_.begin() ? nullptr : *std::prev(after);
    }
    if (!last || !last->holds(spans[i]) || !(for_reading ? last->is_readable() : last->is_writable)) {
      *bad_row = static_cast<int64_t>(i);
      return placed;
    }
    placed.append(last, static_cast<uint64_t>(spans[i].address) - last->address,
                  static_cast<uint64_t>(spans[i].nbytes));
  }
  return placed;
}

}  // namespace p2pkv::offers
