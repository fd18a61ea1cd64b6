#include "page/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace p2pkv {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

std::string describe_error(const char* what, size_t nbytes) {
  return std::string(what) + " " + std::to_string(nbytes) + " bytes: " + std::strerror(errno);
}

// Touches every page, so that the memory is known to exist: a shortage shows here and not as a SIGBUS later.
bool prefault_writable(uint8_t* base, size_t nbytes) {
  if (madvise(base, nbytes, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // kernels before 5.14
  for (size_t at = 0; at < nbytes; at += page) static_cast<volatile uint8_t*>(base)[at] = 0;
  return true;
}

}  // namespace

std::unique_ptr<SharedRegion> SharedRegion::create(size_t nbytes, std::string* error) {
  const int fd = memfd_create("p2pkv-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    *error = describe_error("memfd_create for", nbytes);
    return nullptr;
  }
  void* base = MAP_FAILED;
  // fallocate refuses what the file system's limit or the container's memory can't hold; ftruncate would not.
  if (fallocate(fd, 0, 0, static_cast<off_t>(nbytes)) == 0) {
    base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (base == MAP_FAILED) {
    *error = describe_error("cannot allocate shared memory of", nbytes);
    close(fd);
    return nullptr;
  }
  auto region = std::unique_ptr<SharedRegion>(new SharedRegion(static_cast<uint8_t*>(base), nbytes, fd));
  if (!prefault_writable(region->base(), nbytes)) {
    *error = describe_error("cannot prefault shared memory of", nbytes);
    return nullptr;
  }
  if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    *error = describe_error("cannot seal shared memory of (Linux 5.1 or newer is needed)", nbytes);
    return nullptr;
  }
  // Children must not inherit the pool: a forked child's copy of this mapping would stay writable.
  madvise(base, nbytes, MADV_DONTFORK);
  return region;
}

SharedRegion::~SharedRegion() {
  release();
}

void SharedRegion::release() {
  if (base_ == nullptr) return;
  munmap(std::exchange(base_, nullptr), nbytes_);
  close(std::exchange(fd_, -1));
}

std::unique_ptr<ReadOnlyMapping> ReadOnlyMapping::map(int fd, size_t nbytes, std::string* error) {
  struct stat info;
  if (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) != nbytes) {
    *error = "the peer's shared memory has another size than it announced";
    return nullptr;
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    *error = "the peer's shared memory is not sealed";
    return nullptr;
  }
  void* base = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    *error = describe_error("cannot map a peer's shared memory of", nbytes);
    return nullptr;
  }
  return std::unique_ptr<ReadOnlyMapping>(new ReadOnlyMapping(static_cast<const uint8_t*>(base), nbytes));
}

ReadOnlyMapping::~ReadOnlyMapping() {
  munmap(const_cast<uint8_t*>(base_), nbytes_);
}

void ReadOnlyMapping::prefault(size_t offset, size_t nbytes) const {
  madvise(const_cast<uint8_t*>(base_) + offset, nbytes, MADV_POPULATE_READ);
}

}  // namespace p2pkv
