// Aligned memory that the disk reads into and writes from: bounded, and registered with the kernel once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "disk/extents.h"

namespace p2pkv::disk {

// Thread-safe. Outlives its buffers.
class Arena {
 public:
  // A stretch of the arena, given back by its destructor.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
      std::swap(arena_, other.arena_);
      std::swap(offset_, other.offset_);
      std::swap(nbytes_, other.nbytes_);
      return *this;
    }
    ~Buffer() {
      if (arena_ != nullptr) arena_->free(offset_, nbytes_);
    }
    explicit operator bool() const { return arena_ != nullptr; }
    uint8_t* data() const { return arena_->base_ + offset_; }
    uint64_t nbytes() const { return nbytes_; }

   private:
    friend class Arena;
    Buffer(Arena* arena, uint64_t offset, uint64_t nbytes)
        : arena_(arena), offset_(offset), nbytes_(nbytes) {}
    Arena* arena_ = nullptr;
    uint64_t offset_ = 0;
    uint64_t nbytes_ = 0;
  };

  // Null when the memory is not to be had. `nbytes` is a multiple of kBlock.
  static std::unique_ptr<Arena> create(uint64_t nbytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // `nbytes` is rounded up to whole blocks. No buffer when there is no room at once.
  Buffer try_take(uint64_t nbytes);
  // The same, but waits for room.
  Buffer take(uint64_t nbytes, const Deadline& deadline);

  uint8_t* base() const { return base_; }
  uint64_t nbytes() const { return nbytes_; }

 private:
  Arena(uint8_t* base, uint64_t nbytes) : base_(base), nbytes_(nbytes), extents_(nbytes) {}
  void free(uint64_t offset, uint64_t nbytes);

  uint8_t* const base_;
  const uint64_t nbytes_;
  std::mutex mutex_;  // guards `extents_`
  std::condition_variable freed_;
  Extents extents_;
};

}  // namespace p2pkv::disk
