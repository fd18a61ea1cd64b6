// Every way to copy keeps the promises of base/copy_kernels.h.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/copy_kernels.h"
#include "check.h"
#include "page/words.h"
#include "seed.h"

namespace {

using p2pkv::copy_kernels;
using p2pkv::CopyKernel;

constexpr uint8_t kUntouched = 0xee;

// Bytes of which each differs from those around it, and never is `kUntouched`.
std::vector<uint8_t> telling_bytes(size_t nbytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(nbytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() % kUntouched);
  return bytes;
}

bool is_untouched(const uint8_t* from, const uint8_t* to) {
  return std::all_of(from, to, [](uint8_t byte) { return byte == kUntouched; });
}

void check_copy(const CopyKernel& kernel, std::vector<uint8_t>& room, size_t to, const uint8_t* from,
                size_t nbytes) {
  std::fill(room.begin(), room.end(), kUntouched);
  kernel.copy(room.data() + to, from, nbytes);
  const bool is_right = std::memcmp(room.data() + to, from, nbytes) == 0 &&
                        is_untouched(room.data(), room.data() + to) &&
                        is_untouched(room.data() + to + nbytes, room.data() + room.size());
  if (!is_right) {
    p2pkv::test::fail(__FILE__, __LINE__, "a copy is not exact",
                      ": " + std::string(kernel.name) + ", " + std::to_string(nbytes) + " bytes to offset " +
                          std::to_string(to));
  }
}

// Memory that ends, and begins, where nothing is mapped.
class Fenced {
 public:
  explicit Fenced(size_t nbytes)
      : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), nbytes_((nbytes + page_ - 1) / page_ * page_) {
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, nbytes_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(base_ != MAP_FAILED);
    CHECK_EQ(mprotect(begin(), nbytes_, PROT_READ | PROT_WRITE), 0);
  }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;
  ~Fenced() { munmap(base_, nbytes_ + 2 * page_); }

  uint8_t* begin() const { return base_ + page_; }
  uint8_t* end() const { return begin() + nbytes_; }

 private:
  const size_t page_;
  const size_t nbytes_;
  uint8_t* base_;
};

TEST(copy_kernels_are_called_differently_and_memcpy_is_the_first) {
  CHECK(copy_kernels().front().name == "memcpy");
  for (const CopyKernel& kernel : copy_kernels()) CHECK(p2pkv::find_copy_kernel(kernel.name) == &kernel);
  CHECK(p2pkv::find_copy_kernel("none") == nullptr);
#if defined(__x86_64__) && !defined(P2PKV_TSAN)
  CHECK((p2pkv::find_copy_kernel("avx2") != nullptr) == (__builtin_cpu_supports("avx2") != 0));
  CHECK((p2pkv::find_copy_kernel("avx512_nt") != nullptr) == (__builtin_cpu_supports("avx512f") != 0));
#endif
}

TEST(copy_kernels_copy_exactly_the_bytes_whatever_length_and_alignment) {
  const std::vector<uint8_t> source = telling_bytes(800, 1);
  std::vector<uint8_t> room(800);
  for (const CopyKernel& kernel : copy_kernels()) {
    for (size_t nbytes = 0; nbytes <= 600; ++nbytes) {
      for (const size_t offset : {0, 1, 31, 33, 63}) {
        check_copy(kernel, room, offset, source.data(), nbytes);
        check_copy(kernel, room, 7, source.data() + offset, nbytes);
      }
    }
  }
}

TEST(copy_kernels_copy_exactly_the_bytes_of_any_piece) {
  std::mt19937_64 random(p2pkv::test::seed("copy_kernels_copy_exactly_the_bytes_of_any_piece"));
  constexpr size_t kMost = 300000;
  const std::vector<uint8_t> source = telling_bytes(kMost + 128, random());
  std::vector<uint8_t> room(kMost + 256);
  for (const CopyKernel& kernel : copy_kernels()) {
    for (int round = 0; round < 20; ++round) {
      const size_t most = round % 2 == 0 ? kMost : 20000;
      check_copy(kernel, room, random() % 128, source.data() + random() % 128, random() % most);
    }
  }
}

TEST(copy_kernels_touch_nothing_beyond_either_end) {
  const Fenced source(8192), room(8192);
  const std::vector<uint8_t> bytes = telling_bytes(8192, 2);
  std::memcpy(source.begin(), bytes.data(), bytes.size());
  for (const CopyKernel& kernel : copy_kernels()) {
    for (size_t nbytes = 1; nbytes <= 600; nbytes += nbytes < 130 ? 1 : 37) {
      kernel.copy(room.end() - nbytes, source.end() - nbytes, nbytes);
      CHECK(std::memcmp(room.end() - nbytes, source.end() - nbytes, nbytes) == 0);
      kernel.copy(room.begin(), source.end() - nbytes, nbytes);
      CHECK(std::memcmp(room.begin(), source.end() - nbytes, nbytes) == 0);
      kernel.copy(room.end() - nbytes, source.begin(), nbytes);
      CHECK(std::memcmp(room.end() - nbytes, source.begin(), nbytes) == 0);
    }
    kernel.copy(room.begin(), source.begin(), 8192);
    CHECK(std::memcmp(room.begin(), source.begin(), 8192) == 0);
  }
}

// The writer fills one place after the other and says so by an ordinary store; the reader looks at what was
// said last. Only x86 keeps ordinary stores in order by itself: elsewhere `store_fence` is what readers rely
// on.
TEST(copy_kernels_let_no_later_store_overtake_the_bytes) {
#if defined(__x86_64__)
  constexpr size_t kPlace = 1024, kPlaces = 4096;
  constexpr uint64_t kRounds = 300000;
  // aligned, so that nothing is left for a tail that is stored otherwise
  const std::unique_ptr<uint8_t, decltype(&std::free)> memory(
      static_cast<uint8_t*>(std::aligned_alloc(64, kPlace * kPlaces)), std::free);
  uint8_t* places = memory.get();
  std::memset(places, 0, kPlace * kPlaces);
  for (const CopyKernel& kernel : copy_kernels()) {
    std::atomic<uint64_t> said{0};
    std::atomic<uint64_t> n_overtaken{0};
    std::thread reader([&] {
      for (uint64_t seen = 0; seen < kRounds;) {
        const uint64_t now = said.load(std::memory_order_acquire);
        if (now == seen) continue;
        seen = now;
        uint64_t last;
        p2pkv::load_fence();
        std::memcpy(&last, places + seen % kPlaces * kPlace + kPlace - 2 * sizeof last, sizeof last);
        if (last < seen) ++n_overtaken;  // larger where the writer has come round again
      }
    });
    std::vector<uint64_t> words(kPlace / sizeof(uint64_t));
    for (uint64_t round = 1; round <= kRounds; ++round) {
      std::fill(words.begin(), words.end(), round);
      kernel.copy(places + round % kPlaces * kPlace, words.data(), kPlace);
      said.store(round, std::memory_order_release);
    }
    reader.join();
    CHECK_EQ(n_overtaken.load(), 0u);
  }
#endif
}

}  // namespace
