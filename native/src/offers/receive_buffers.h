// Where rows are kept that came before anybody said where they go: the receive buffer, then the buddy pool;
// and there, those that nobody has taken for a while.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/exact_blocks.h"
#include "offers/row_memories.h"
#include "offers/transfers.h"

namespace p2pkv::offers {

// One piece of host memory, known to every transport.
class Arena {
 public:
  static constexpr uint64_t kGranule = 4096;

  // Null, with the reason in `error`. `is_pinned`: kept in memory, as far as RLIMIT_MEMLOCK allows.
  // `is_readable`: by peers, over the ways that can read any memory.
  static std::unique_ptr<Arena> create(uint64_t nbytes, bool is_pinned, bool is_readable,
                                       const std::vector<Transfers::Way>& ways, std::string* error);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Page-locks it, so that devices can copy from it. False, with the reason in `error`.
  bool lock_for(const std::shared_ptr<cuda::Device>& device, std::string* error);
  // The offset of `nbytes` free bytes, if there are so many in one block.
  std::optional<uint64_t> allocate(uint64_t nbytes);
  void release(uint64_t offset);
  // From here on nothing is read into it, and it has no room. Its memory goes with the last block.
  // Idempotent.
  void close();

  // Its id is set when it is registered, before anybody uses it.
  const std::shared_ptr<const RowMemory>& memory() const { return memory_; }
  void set_memory(std::shared_ptr<const RowMemory> memory) { memory_ = std::move(memory); }
  uint64_t used_nbytes();
  bool is_pinned() const { return is_pinned_; }

 private:
  Arena(uint8_t* base, uint64_t nbytes);

  void unmap_if_unused();

  uint8_t* const base_;
  const uint64_t nbytes_;
  std::shared_ptr<const RowMemory> memory_;
  bool is_pinned_ = false;
  std::shared_ptr<cuda::Device> locked_for_;  // set before anybody copies
  std::mutex mutex_;                          // guards all below
  ExactBlocks blocks_;
  bool is_closed_ = false;
  bool is_mapped_ = true;
};

// A block of an arena, freed when it is destroyed: then nothing may write to it any more.
class Block {
 public:
  Block(std::shared_ptr<Arena> arena, uint64_t offset) : arena_(std::move(arena)), offset_(offset) {}
  ~Block() {
    if (!is_abandoned_) arena_->release(offset_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Has it never be others': a device that is lost may still write to it.
  void abandon() { is_abandoned_ = true; }

  const std::shared_ptr<const RowMemory>& memory() const { return arena_->memory(); }
  uint64_t offset() const { return offset_; }
  uint8_t* bytes() const { return reinterpret_cast<uint8_t*>(memory()->address) + offset_; }

 private:
  const std::shared_ptr<Arena> arena_;
  const uint64_t offset_;
  bool is_abandoned_ = false;
};

// Thread-safe.
class ReceiveBuffers {
 public:
  bool start(const Transfers::Options& options, std::string* error);
  // Room in the buffer, else in the pool, else null.
  std::shared_ptr<Block> allocate(uint64_t nbytes, bool* is_in_pool);
  bool lock_for(const std::shared_ptr<cuda::Device>& device, std::string* error);
  // Null: there is none.
  const std::shared_ptr<Arena>& pool() const { return pool_; }
  void close();
  std::vector<Transfers::Reading> readings();

 private:
  std::shared_ptr<Arena> buffer_;  // null if it is to have no bytes
  std::shared_ptr<Arena> pool_;
};

}  // namespace p2pkv::offers
