// The memory that rows lie in: what a node has registered, as offers and grants use it, and their own
// buffers. docs/architecture.md, Registered memory, says why fetches have another list.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "offers/transfers.h"
#include "page/page_checks.h"

namespace p2pkv::offers {

struct RowMemory {
  uint32_t id;  // 0: a buffer of the node's own, which nobody registered
  uint64_t address;
  uint64_t nbytes;
  bool is_writable;
  std::vector<std::shared_ptr<MemoryRegion>> regions;  // one a way; null where it has none
  std::vector<std::string> descriptions;               // one a way; empty where peers can't read it
  // Of device memory: ways that read devices know it, and its rows go through staging over all others.
  std::shared_ptr<cuda::Device> device = nullptr;
  bool is_offerable = false;
  // Set when it is removed: a call that had found it before must not begin anything with it any more.
  std::shared_ptr<std::atomic<bool>> is_closed = std::make_shared<std::atomic<bool>>(false);

  bool is_readable() const;
  // Whether rows may come to it from other devices, without staging.
  bool takes_directly() const;
  Registered extent() const { return {static_cast<int64_t>(address), static_cast<int64_t>(nbytes)}; }
};

// Where rows lie. `memories` are kept, so that their regions can be used: a closed one refuses.
struct PlacedRows {
  struct Row {
    uint32_t memory;  // a number in `memories`
    uint64_t offset;
    uint64_t length;
  };
  std::vector<std::shared_ptr<const RowMemory>> memories;
  std::vector<Row> rows;

  bool lie_in(uint32_t memory_id) const;
  // Some of them. Asked under the lock that whoever ends what lies in a closed memory takes after the
  // closing.
  bool lie_in_closed_memory() const;
  const std::shared_ptr<cuda::Device>& device_of(const Row& row) const {
    return memories[row.memory]->device;
  }
  uint64_t address_of(const Row& row) const { return memories[row.memory]->address + row.offset; }
  bool lie_on_devices() const;
  uint64_t nbytes() const;
  // Appends a row of memory that may be known already.
  void append(const std::shared_ptr<const RowMemory>& memory, uint64_t offset, uint64_t length);
  // Returns `n` of the rows from `first` on.
  PlacedRows part(size_t first, size_t n) const;
};

// What is registered, by address and by the number that peers know it by. Offers outlive the calls that made
// them, so that a memory which is removed is marked for whoever has found it. Thread-safe.
class RowMemories {
 public:
  RowMemories();
  uint32_t add(RowMemory memory);
  std::shared_ptr<const RowMemory> remove(uint32_t id);
  std::shared_ptr<const RowMemory> at(uint32_t id);
  // Finds each span's memory. `bad_row`, -1 at best, is the first that lies in none, or in none that is
  // readable or writable.
  PlacedRows place(const std::vector<RowSpan>& spans, bool for_reading, int64_t* bad_row);

 private:
  std::mutex mutex_;                                        // guards all below
  std::vector<std::shared_ptr<const RowMemory>> memories_;  // by address; they don't overlap
  uint32_t next_id_;
};

}  // namespace p2pkv::offers
