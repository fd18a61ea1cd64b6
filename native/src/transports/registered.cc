#include "transports/registered.h"

#include <unistd.h>

#include <vector>

#include "net/frames.h"

namespace p2pkv {

RegisteredRegion::RegisteredRegion(Options options, std::shared_ptr<RegionTable> table, uint32_t id)
    : options_(std::move(options)), table_(std::move(table)), id_(id) {}

std::string RegisteredRegion::describe() const {
  if (!options_.readable) return {};
  return to_blob(RegionBlob{options_.blob_magic, kFrameVersion, 0, id_, 0, options_.nbytes}) + options_.keys;
}

void RegisteredRegion::close() {
  if (getpid() != pid_) {
    // Whoever used it, or had the table locked, at the fork is a thread of the parent, which never leaves
    // here.
    if ((uses_.fetch_or(kClosed, std::memory_order_acq_rel) & kClosed) == 0) options_.fd.reset();
    return;
  }
  uint32_t uses = uses_.fetch_or(kClosed, std::memory_order_acq_rel);
  const bool is_first = (uses & kClosed) == 0;
  if (is_first && options_.on_closing) options_.on_closing(*this);
  for (uses |= kClosed; uses != kClosed; uses = uses_.load(std::memory_order_acquire)) {
    uses_.wait(uses, std::memory_order_acquire);
  }
  if (!is_first) return;
  table_->remove(id_);
  options_.fd.reset();
  options_.registration.reset();
  if (options_.on_closed) options_.on_closed(id_);
}

bool RegisteredRegion::enter() {
  if ((uses_.fetch_add(1, std::memory_order_acq_rel) & kClosed) == 0) return true;
  leave();
  return false;
}

void RegisteredRegion::leave() {
  if (uses_.fetch_sub(1, std::memory_order_acq_rel) - 1 == kClosed) uses_.notify_all();
}

std::shared_ptr<RegisteredRegion> RegionTable::add(RegisteredRegion::Options options) {
  const bool readable = options.readable;
  const std::lock_guard lock(mutex_);
  if (is_closed_) return nullptr;
  uint32_t id;
  do {
    fill_random(&id, sizeof id);
  } while (id == 0 || entries_.contains(id));  // 0 names no region
  auto region = std::make_shared<RegisteredRegion>(std::move(options), shared_from_this(), id);
  entries_[id] = {region, readable};
  return region;
}

std::shared_ptr<RegisteredRegion> RegionTable::find(uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto at = entries_.find(id);
  return at == entries_.end() || !at->second.readable ? nullptr : at->second.region.lock();
}

void RegionTable::remove(uint32_t id) {
  const std::lock_guard lock(mutex_);
  entries_.erase(id);
}

void RegionTable::close() {
  std::vector<std::shared_ptr<RegisteredRegion>> regions;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    for (auto& [id, entry] : entries_) {
      if (auto region = entry.region.lock()) regions.push_back(std::move(region));
    }
  }
  for (auto& region : regions) region->close();
}

}  // namespace p2pkv
