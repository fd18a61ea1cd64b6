#include "attach/engine_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

namespace p2pkv::attaching {
namespace {

constexpr auto kHugetlbfs = 0x958458f6;  // HUGETLBFS_MAGIC

}  // namespace

std::shared_ptr<MappedMemory> MappedMemory::map(int fd, uint64_t nbytes, MemoryStatus* status) {
  struct stat info{};
  struct statfs system{};
  const int seals = fcntl(fd, F_GET_SEALS);
  *status = MemoryStatus::kNotSealed;
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return nullptr;
  *status = MemoryStatus::kOtherSize;
  if (fstat(fd, &info) != 0 || nbytes == 0 || static_cast<uint64_t>(info.st_size) < nbytes) return nullptr;
  *status = MemoryStatus::kHugePages;
  if (fstatfs(fd, &system) != 0 || static_cast<uint64_t>(system.f_type) == kHugetlbfs) return nullptr;
  *status = MemoryStatus::kNotMapped;
  void* base = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return nullptr;
  madvise(base, nbytes, MADV_DONTFORK);
  *status = MemoryStatus::kTaken;
  return std::shared_ptr<MappedMemory>(new MappedMemory(static_cast<const uint8_t*>(base), nbytes));
}

MappedMemory::~MappedMemory() {
  munmap(const_cast<uint8_t*>(base_), nbytes_);
}

MemoryStatus EngineMemories::add(uint32_t number, int fd, uint64_t nbytes) {
  MemoryStatus status;
  auto mapped = MappedMemory::map(fd, nbytes, &status);
  if (!mapped) return status;
  const std::lock_guard lock(mutex_);
  if (by_number_.size() >= kMost && by_number_.count(number) == 0) return MemoryStatus::kTooMany;
  by_number_[number].swap(mapped);
  return MemoryStatus::kTaken;
}

std::shared_ptr<MappedMemory> EngineMemories::forget(uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = by_number_.find(number);
  if (found == by_number_.end()) return nullptr;
  auto forgotten = std::move(found->second);
  by_number_.erase(found);
  return forgotten;
}

std::shared_ptr<MappedMemory> EngineMemories::find(uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = by_number_.find(number);
  return found == by_number_.end() ? nullptr : found->second;
}

uint64_t EngineMemories::nbytes() {
  uint64_t total = 0;
  const std::lock_guard lock(mutex_);
  for (const auto& [number, memory] : by_number_) total += memory->nbytes();
  return total;
}

}  // namespace p2pkv::attaching
