// Memory that peers on the same host can map: a sealed memfd.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fd.h"
#include "base/thread.h"
#include "page/page_taker.h"

namespace p2pkv {

struct RegionOptions {
  // Bytes of the huge pages it is made of, which the machine must have set aside; 0: normal pages, or
  // transparent huge ones where the kernel gives them to shared memory.
  size_t huge_page = 0;
  // Touch the memory behind the caller's back instead of before `create` returns. A shortage then shows as
  // the death of the process, as it does for most programs.
  bool prefault_behind = false;
  // Whether a process that comes after this one is to write to it as well, so that the kernel can't keep all
  // others from it: readers are given descriptors that can only be read (`open_read_only`).
  bool is_kept = false;
  // Don't touch it at all: it comes as it is used.
  bool is_lazy = false;
};

// A memfd mapped writable by its owner only. After `create` it is prefaulted and sealed (SHRINK, GROW,
// FUTURE_WRITE, SEAL; a kept one not against FUTURE_WRITE): nobody, the owner included, can resize it, and
// nobody else can map it writable, write to it or punch holes. `release` unmaps and closes it, as the
// destructor does; readers' mappings live on until they unmap.
class SharedRegion {
 public:
  // Null, with the reason in `error`, when the memory is not to be had. Rounds `nbytes` up to whole huge
  // pages.
  static std::unique_ptr<SharedRegion> create(size_t nbytes, std::string* error,
                                              const RegionOptions& options = {});
  // A kept one of exactly `nbytes` that another process has made, which must be known to write to it no more.
  // Its content stays, and is mapped in as it is used. Null, with the reason in `error`. The caller keeps
  // `fd`.
  static std::unique_ptr<SharedRegion> adopt(int fd, size_t nbytes, std::string* error);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Has all that is there already mapped in, behind the caller's back; at most once.
  void map_behind();

  // Idempotent. Nobody may use the memory any more; `base` is null and `fd` -1 from then on.
  void release();

  uint8_t* base() const { return base_; }
  size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }
  // As MappedBytes says.
  Kept& kept() const { return kept_; }

 private:
  SharedRegion(uint8_t* base, size_t nbytes, int fd) : base_(base), nbytes_(nbytes), fd_(fd) {}
  void prefault_behind();

  uint8_t* base_;
  size_t nbytes_;
  int fd_;
  std::atomic<bool> stop_{false};
  NamedThread prefaulting_;
  mutable Kept kept_;
};

// Another descriptor of a memfd, through which it can be read only. Nothing, with errno set, if there is none
// to be had.
UniqueFd open_read_only(int fd);

// Another descriptor of a memfd to hand to readers: of one that can't be written to but through mappings that
// its owner has made already, or one through which it can be read only. Nothing, with errno set, if there is
// none to be had.
UniqueFd for_readers(int fd);

// A reader's read-only mapping of a peer's memfd. `map` refuses a descriptor that is not sealed or has
// another size: a peer that could shrink it would kill the reader with SIGBUS.
class ReadOnlyMapping {
 public:
  // Null, with the reason in `error`. The caller keeps `fd`.
  static std::unique_ptr<ReadOnlyMapping> map(int fd, size_t nbytes, std::string* error);
  ~ReadOnlyMapping();
  ReadOnlyMapping(const ReadOnlyMapping&) = delete;
  ReadOnlyMapping& operator=(const ReadOnlyMapping&) = delete;

  const uint8_t* base() const { return base_; }
  size_t nbytes() const { return nbytes_; }
  // As MappedBytes says.
  Kept& kept() const { return kept_; }

  // Maps `[offset, offset + nbytes)` in ahead of its first use; a hint, so failures are of no consequence.
  void prefault(size_t offset, size_t nbytes) const;

 private:
  ReadOnlyMapping(const uint8_t* base, size_t nbytes) : base_(base), nbytes_(nbytes) {}
  const uint8_t* base_;
  size_t nbytes_;
  mutable Kept kept_;
};

}  // namespace p2pkv
