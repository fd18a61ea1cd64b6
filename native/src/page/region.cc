#include "page/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "page/prefault.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_HUGETLB
#define MFD_HUGETLB 0x0004U
#endif

namespace p2pkv {
namespace {

constexpr unsigned kHugeSizeShift = 26;  // the kernel's MFD_HUGE_SHIFT: above it is the size's logarithm
constexpr int kKeptSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kSeals = kKeptSeals | F_SEAL_FUTURE_WRITE;
// This mode forbids even this user, unless he changes it, to open another descriptor to write by of one that
// he is handed.
constexpr mode_t kKeptMode = 0400;
constexpr size_t kPopulateStep = size_t{2} << 20;
constexpr size_t kUnmapStep = size_t{1} << 30;  // a multiple of every huge page

std::string describe_error(const char* what, size_t nbytes) {
  return std::string(what) + " " + std::to_string(nbytes) + " bytes: " + std::strerror(errno);
}

std::string count_of(size_t n, const char* what) {
  return std::to_string(n) + " " + what;
}

std::string size_name(size_t nbytes) {
  return nbytes >> 30 ? std::to_string(nbytes >> 30) + " GiB" : std::to_string(nbytes >> 20) + " MiB";
}

// What the kernel says of its huge pages of one size; 0 where it has none of that size.
size_t huge_pages(size_t size, const char* what) {
  const std::string path = "/sys/kernel/mm/hugepages/hugepages-" + std::to_string(size >> 10) + "kB/" + what;
  size_t n = 0;
  std::ifstream(path) >> n;
  return n;
}

std::string no_huge_pages(size_t nbytes, size_t size) {
  const size_t needed = nbytes / size;
  const size_t has = huge_pages(size, "nr_hugepages");
  const size_t free = huge_pages(size, "free_hugepages") -
                      std::min(huge_pages(size, "free_hugepages"), huge_pages(size, "resv_hugepages"));
  const std::string kind = "huge pages of " + size_name(size);
  return "shared memory of " + std::to_string(nbytes) + " bytes needs " + count_of(needed, kind.c_str()) +
         ", and " + std::to_string(free) + " are free; have the machine set them aside, as with `echo " +
         std::to_string(has + needed - std::min(needed, free)) + " > /sys/kernel/mm/hugepages/hugepages-" +
         std::to_string(size >> 10) + "kB/nr_hugepages`";
}

unsigned memfd_flags(size_t huge_page) {
  const unsigned sealable = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if (huge_page == 0) return sealable;
  const auto log = static_cast<unsigned>(__builtin_ctzll(huge_page));
  return sealable | MFD_HUGETLB | log << kHugeSizeShift;
}

}  // namespace

std::unique_ptr<SharedRegion> SharedRegion::create(size_t nbytes, std::string* error,
                                                   const RegionOptions& options) {
  const size_t huge = options.huge_page;
  if (huge != 0) nbytes = (nbytes + huge - 1) / huge * huge;
  const int fd = memfd_create("p2pkv-pool", memfd_flags(huge));
  if (fd < 0) {
    *error = huge != 0 && (errno == ENODEV || errno == EINVAL)
                 ? "this machine has no huge pages of " + size_name(huge)
                 : describe_error("memfd_create for", nbytes);
    return nullptr;
  }
  void* base = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(nbytes)) == 0) {
    base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                0);  // takes the huge pages that it needs
  }
  if (base == MAP_FAILED) {
    *error = huge != 0 && errno == ENOMEM ? no_huge_pages(nbytes, huge)
                                          : describe_error("cannot allocate shared memory of", nbytes);
    close(fd);
    return nullptr;
  }
  auto region = std::unique_ptr<SharedRegion>(new SharedRegion(static_cast<uint8_t*>(base), nbytes, fd));
  if (huge == 0)
    madvise(base, nbytes, MADV_HUGEPAGE);  // a wish, which most kernels don't grant to shared memory
  if (options.is_kept && fchmod(fd, kKeptMode) != 0) {
    *error = describe_error("cannot keep others from shared memory of", nbytes);
    return nullptr;
  }
  if (!options.is_lazy && !options.prefault_behind &&
      !prefault_writable(region->base_, nbytes, region->stop_)) {
    *error = describe_error("cannot prefault shared memory of", nbytes);
    return nullptr;
  }
  if (fcntl(fd, F_ADD_SEALS, options.is_kept ? kKeptSeals : kSeals) != 0) {
    *error = describe_error("cannot seal shared memory of (Linux 5.1 or newer is needed)", nbytes);
    return nullptr;
  }
  // Children must not inherit the pool: a forked child's copy of this mapping would stay writable.
  madvise(base, nbytes, MADV_DONTFORK);
  if (options.prefault_behind) region->prefault_behind();
  return region;
}

std::unique_ptr<SharedRegion> SharedRegion::adopt(int fd, size_t nbytes, std::string* error) {
  struct stat info{};
  if (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) != nbytes) {
    *error = "what was left has " + std::to_string(info.st_size) +
             " bytes, and with these settings it would be " + std::to_string(nbytes) +
             "; was pool_size changed?";
    return nullptr;
  }
  if (fcntl(fd, F_GET_SEALS) != kKeptSeals) {
    *error = "it is no memory that a node has left";
    return nullptr;
  }
  UniqueFd own(fcntl(fd, F_DUPFD_CLOEXEC, 3));
  void* base = own ? mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, own.get(), 0) : MAP_FAILED;
  if (base == MAP_FAILED) {
    *error = describe_error("cannot map", nbytes);
    return nullptr;
  }
  auto region =
      std::unique_ptr<SharedRegion>(new SharedRegion(static_cast<uint8_t*>(base), nbytes, own.release()));
  madvise(base, nbytes, MADV_HUGEPAGE);
  madvise(base, nbytes, MADV_DONTFORK);
  return region;
}

void SharedRegion::map_behind() {
  // It changes no byte, unlike touching by hand.
  prefaulting_.start("p2pkv-prefault", [this] {
    for (size_t at = 0; at < nbytes_ && !stop_.load(std::memory_order_relaxed); at += kPopulateStep)
      madvise(base_ + at, std::min(kPopulateStep, nbytes_ - at), MADV_POPULATE_WRITE);
  });
}

void SharedRegion::prefault_behind() {
  // One thread, which leaves the others' processors alone; without a thread the memory comes as it is used.
  prefaulting_.start("p2pkv-prefault", [this] { prefault_writable(base_, nbytes_, stop_, 1); });
}

SharedRegion::~SharedRegion() {
  release();
}

void SharedRegion::release() {
  if (base_ == nullptr) return;
  stop_ = true;
  prefaulting_.join();
  kept_.drop();
  munmap(std::exchange(base_, nullptr), nbytes_);
  close(std::exchange(fd_, -1));
}

UniqueFd open_read_only(int fd) {
  return UniqueFd(open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC));
}

UniqueFd for_readers(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool is_sealed_for_writers = seals >= 0 && (seals & F_SEAL_FUTURE_WRITE) != 0;
  return is_sealed_for_writers ? UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 3)) : open_read_only(fd);
}

std::unique_ptr<ReadOnlyMapping> ReadOnlyMapping::map(int fd, size_t nbytes, std::string* error) {
  struct stat info;
  if (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) != nbytes) {
    *error = "the peer's shared memory has another size than it announced";
    return nullptr;
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kKeptSeals) != kKeptSeals) {
    *error = "the peer's shared memory is not sealed";
    return nullptr;
  }
  void* base = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    *error = describe_error("cannot map a peer's shared memory of", nbytes);
    return nullptr;
  }
  // A forked child, which reads nothing, would hold the memory of an owner that has gone.
  madvise(base, nbytes, MADV_DONTFORK);
  return std::unique_ptr<ReadOnlyMapping>(new ReadOnlyMapping(static_cast<const uint8_t*>(base), nbytes));
}

ReadOnlyMapping::~ReadOnlyMapping() {
  kept_.drop();
  // In steps, so that what else this process maps meanwhile does not wait for all of it.
  for (size_t at = 0; at < nbytes_; at += kUnmapStep)
    munmap(const_cast<uint8_t*>(base_) + at, std::min(kUnmapStep, nbytes_ - at));
}

void ReadOnlyMapping::prefault(size_t offset, size_t nbytes) const {
  madvise(const_cast<uint8_t*>(base_) + offset, nbytes, MADV_POPULATE_READ);
}

}  // namespace p2pkv
