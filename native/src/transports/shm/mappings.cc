#include "transports/shm/mappings.h"

#include <algorithm>

namespace p2pkv::shm {

bool Mappings::start(std::string* error) {
  dying_->is_served = unmapping_.start("p2pkv-shm-unmap", [dying = dying_] { unmap(*dying); });
  if (dying_->is_served && thread_.start("p2pkv-shm-touch", [this] { run(); })) return true;
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
  {
    const std::lock_guard lock(dying_->mutex);
    dying_->is_closing = true;
    dying_->changed.notify_all();
  }
  unmapping_.join();
}

// Ends when there is nothing left to unmap.
void Mappings::unmap(Dying& dying) {
  std::unique_lock lock(dying.mutex);
  for (;;) {
    dying.changed.wait(lock, [&] { return dying.is_closing || !dying.mappings.empty(); });
    if (dying.mappings.empty()) break;
    auto mapping = std::move(dying.mappings.front());
    dying.mappings.pop_front();
    lock.unlock();
    mapping.reset();
    lock.lock();
  }
  dying.is_served = false;
}

void Mappings::end(Dying& dying, std::unique_ptr<ReadOnlyMapping> mapping) {
  if (!mapping->kept().has()) return;
  const std::lock_guard lock(dying.mutex);
  if (!dying.is_served) return;
  dying.mappings.push_back(std::move(mapping));
  dying.changed.notify_one();
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
  auto fresh = ReadOnlyMapping::map(fd, nbytes, error);
  if (!fresh) return nullptr;
  mapping = std::shared_ptr<ReadOnlyMapping>(fresh.release(), [dying = dying_](ReadOnlyMapping* dead) {
    end(*dying, std::unique_ptr<ReadOnlyMapping>(dead));
  });
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
