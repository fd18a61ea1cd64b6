// A fixed-size array of zeroed plain values whose memory the kernel hands out as it is first touched.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace p2pkv {

// For tables sized by the worst case (a page in every granule) of which large pages touch a fraction: a
// std::vector would touch, and so occupy, all of it.
template <typename T>
class ZeroedArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  explicit ZeroedArray(size_t size) : values_(static_cast<T*>(std::calloc(size, sizeof(T)))), size_(size) {
    if (!values_ && size > 0) throw std::bad_alloc();
  }

  T& operator[](size_t i) { return values_.get()[i]; }
  const T& operator[](size_t i) const { return values_.get()[i]; }
  size_t size() const { return size_; }

  // Nearly all of it will be touched: the kernel may hand it out by huge pages. A wish, which it grants to
  // memory that it has not handed out yet.
  void expect_filling() {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(values_.get()) + page - 1) & ~(page - 1);
    const uintptr_t end = reinterpret_cast<uintptr_t>(values_.get() + size_) & ~(page - 1);
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }

 private:
  struct Free {
    void operator()(T* values) const { std::free(values); }
  };
  std::unique_ptr<T[], Free> values_;
  size_t size_;
};

}  // namespace p2pkv
