#include "disk/arena.h"

#include <sys/mman.h>

#include "disk/files.h"
#include "disk/waiting.h"

namespace p2pkv::disk {

std::unique_ptr<Arena> Arena::create(uint64_t nbytes) {
  void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  // a read of 2 MiB is one piece of memory instead of 512
  madvise(base, nbytes, MADV_HUGEPAGE);
  // a child that writes here after fork() must not make the kernel copy pages that the disk is writing to
  madvise(base, nbytes, MADV_DONTFORK);
  return std::unique_ptr<Arena>(new Arena(static_cast<uint8_t*>(base), nbytes));
}

Arena::~Arena() {
  munmap(base_, nbytes_);
}

Arena::Buffer Arena::try_take(uint64_t nbytes) {
  nbytes = round_up(nbytes, kBlock);
  const std::lock_guard lock(mutex_);
  const uint64_t offset = extents_.allocate(nbytes);
  return offset == Extents::kNone ? Buffer() : Buffer(this, offset, nbytes);
}

Arena::Buffer Arena::take(uint64_t nbytes, const Deadline& deadline) {
  nbytes = round_up(nbytes, kBlock);
  if (nbytes > nbytes_) return {};
  uint64_t offset = Extents::kNone;
  std::unique_lock lock(mutex_);
  wait_until(freed_, lock, deadline, [&] { return (offset = extents_.allocate(nbytes)) != Extents::kNone; });
  return offset == Extents::kNone ? Buffer() : Buffer(this, offset, nbytes);
}

void Arena::free(uint64_t offset, uint64_t nbytes) {
  {
    const std::lock_guard lock(mutex_);
    extents_.free(offset, nbytes);
  }
  freed_.notify_all();
}

}  // namespace p2pkv::disk
