#include "disk/layout.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <new>

namespace p2pkv::disk {
namespace {

// How long an eviction waits for readers: longer than any read takes, unless the disk hangs.
constexpr double kReaderPatience = 1;

}  // namespace

void Layout::delete_due(const Deadline& deadline) {
  if (disk_.is_lost) return;
  for (Unit* unit : disk_.catalog.take_deletable(deadline)) {
    remove(*unit);
    disk_.catalog.forget(unit);
  }
}

int Layout::evict_one() {
  const bool is_retired = disk_.catalog.retire_next();
  const uint64_t before = disk_.catalog.used();
  delete_due(Deadline::after(is_retired ? 0 : kReaderPatience));
  return is_retired || disk_.catalog.used() < before ? 0 : -ENOBUFS;
}

int Layout::make_room(uint64_t nbytes) {
  while (disk_.catalog.used() + nbytes + disk_.overhead > disk_.options.capacity) {
    if (const int evicted = evict_one(); evicted < 0) return evicted;
  }
  return 0;
}

int Layout::open_data(const std::string& path, int flags) const {
  return disk_.files.open(path, flags | (disk_.is_direct ? O_DIRECT : 0));
}

AlignedBytes::AlignedBytes(uint64_t nbytes)
    : nbytes_(round_up(nbytes, kBlock)),
      bytes_(static_cast<uint8_t*>(std::aligned_alloc(kBlock, round_up(nbytes, kBlock)))) {
  if (!bytes_) throw std::bad_alloc();
  std::memset(bytes_.get(), 0, nbytes_);
}

}  // namespace p2pkv::disk
