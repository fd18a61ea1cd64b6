// A fixed-size array of zeroed plain values whose memory the kernel hands out as it is first touched.
#pragma once

#include <cstddef>
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

 private:
  struct Free {
    void operator()(T* values) const { std::free(values); }
  };
  std::unique_ptr<T[], Free> values_;
  size_t size_;
};

}  // namespace p2pkv
