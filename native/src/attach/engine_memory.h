// The memory that an engine lets its host's node read: mapped read-only, never written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "attach/frames.h"

namespace p2pkv::attaching {

class MappedMemory {
 public:
  // Null, with the reason in `status`. Memory that could be made shorter, or whose holes can't be filled when
  // they are read, is refused: reading it would end the process. The caller keeps `fd`.
  static std::shared_ptr<MappedMemory> map(int fd, uint64_t nbytes, MemoryStatus* status);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  const uint8_t* base() const { return base_; }
  uint64_t nbytes() const { return nbytes_; }

 private:
  MappedMemory(const uint8_t* base, uint64_t nbytes) : base_(base), nbytes_(nbytes) {}

  const uint8_t* base_;
  uint64_t nbytes_;
};

// All of one engine's. Thread-safe. Who has found one keeps it mapped for as long as it is needed, whatever
// the engine says meanwhile.
class EngineMemories {
 public:
  static constexpr size_t kMost = 1024;

  MemoryStatus add(uint32_t number, int fd, uint64_t nbytes);
  // Returns what was forgotten, which the caller lets go of; null: nothing.
  std::shared_ptr<MappedMemory> forget(uint32_t number);
  std::shared_ptr<MappedMemory> find(uint32_t number);
  uint64_t nbytes();

 private:
  std::mutex mutex_;  // guards what follows
  std::map<uint32_t, std::shared_ptr<MappedMemory>> by_number_;
};

}  // namespace p2pkv::attaching
