#include "transports/shm/mappings.h"

#include <algorithm>

namespace p2pkv::shm {

bool Mappings::start(std::string* error) {
  if (thread_.start("p2pkv-shm-touch", [this] { run(); })) return true;
  *error = "cannot start a thread for the shm transport";
  return false;
}

void Mappings::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

std::shared_ptr<ReadOnlyMapping> Mappings::get(const std::string& socket_name, uint32_t region, int fd,
                                               size_t nbytes, std::string* error) {
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
  auto& known = known_[{socket_name, region}];
  auto mapping = known.lock();
  if (mapping) {
    if (mapping->nbytes() == nbytes) return mapping;
    *error = "the peer announced another size for a region that is mapped already";
    return nullptr;
  }
  mapping = ReadOnlyMapping::map(fd, nbytes, error);
  if (!mapping) return nullptr;
  known = mapping;
  to_prefault_.push_back(mapping);
  changed_.notify_one();
  return mapping;
}

void Mappings::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return is_closing_ || !to_prefault_.empty(); });
    if (is_closing_) return;
    const auto next = std::move(to_prefault_.front());
    to_prefault_.pop_front();
    size_t offset = 0;
    while (!is_closing_) {
      lock.unlock();
      {
        const auto mapping = next.lock();  // held for one step only: the last endpoint's end unmaps it
        if (mapping && offset < mapping->nbytes()) {
          const size_t step = std::min(kPrefaultStep, mapping->nbytes() - offset);
          mapping->prefault(offset, step);
          offset += step;
        } else {
          offset = SIZE_MAX;
        }
      }
      lock.lock();
      if (offset == SIZE_MAX) break;
    }
  }
}

}  // namespace p2pkv::shm
