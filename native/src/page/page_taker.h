// Pages that are taken where they lie in memory that this process maps, by somebody who can reach it there: a
// device, which needs no copy of them in the host memory of the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace p2pkv {

// Something that is kept with mapped memory, and goes before it is unmapped. Thread-safe.
class Kept {
 public:
  // Returns what is kept, which `make` makes if there is nothing yet; null if it can't.
  std::shared_ptr<void> get(const std::function<std::shared_ptr<void>()>& make) {
    const std::lock_guard lock(mutex_);
    if (!kept_) kept_ = make();
    return kept_;
  }
  bool has() {
    const std::lock_guard lock(mutex_);
    return kept_ != nullptr;
  }
  void drop() {
    std::shared_ptr<void> dropped;  // which goes without the lock
    const std::lock_guard lock(mutex_);
    dropped = std::move(kept_);
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<void> kept_;
};

// Memory that this process maps; for the time of a call.
struct MappedBytes {
  const uint8_t* base;
  uint64_t nbytes;
  bool is_read_only;
  Kept& kept;
};

// A call has its pages taken by one of these.
class PageTaker {
 public:
  virtual ~PageTaker() = default;
  // Notes where a page lies. Its bytes may change until they have been taken, and then they are worth
  // nothing, which is for the caller to find out. Several threads, but one a page.
  virtual void take(size_t page, const uint8_t* from) = 0;
  // Takes what was noted since; all of it lies in `memory`. When it returns nobody reads there any more. One
  // thread at a time.
  virtual void land(const MappedBytes& memory) = 0;
  // Whether a page was taken, since it was noted last. The others are to be brought in another way.
  virtual bool has(size_t page) const = 0;
};

}  // namespace p2pkv
