// Shared memory that is touched before its first use, or behind its user's back, and made of huge pages.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "page/prefault.h"
#include "page/region.h"

using namespace p2pkv;

namespace {

constexpr size_t kMiB = size_t{1} << 20;

size_t resident(const uint8_t* base, size_t nbytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(nbytes / page);
  CHECK_EQ(mincore(const_cast<uint8_t*>(base), nbytes, pages.data()), 0);
  size_t n = 0;
  for (const unsigned char is_there : pages) n += is_there & 1;
  return n * page;
}

struct Mapped {
  explicit Mapped(size_t n) : nbytes(n) {
    base = static_cast<uint8_t*>(mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    CHECK(base != MAP_FAILED);
  }
  ~Mapped() { munmap(base, nbytes); }
  uint8_t* base;
  size_t nbytes;
};

}  // namespace

TEST(every_page_is_touched_however_many_threads_share_the_work) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const unsigned threads : {1u, 2u, 3u, 8u}) {
    // neither whole parts nor whole rounds
    const Mapped memory(200 * kMiB + 3 * page);
    const std::atomic<bool> stop{false};
    CHECK(prefault_writable(memory.base, memory.nbytes, stop, threads));
    CHECK_EQ(resident(memory.base, memory.nbytes), memory.nbytes);
  }
}

// Of memory that is in use already, as of a pool that is touched behind its first pages.
TEST(touching_by_writing_changes_nothing) {
  const Mapped memory(kMiB);
  std::fill(memory.base, memory.base + kMiB / 2, uint8_t{0xA5});
  touch_by_writing(memory.base, memory.nbytes);
  CHECK_EQ(resident(memory.base, memory.nbytes), memory.nbytes);
  CHECK(std::all_of(memory.base, memory.base + kMiB / 2, [](uint8_t byte) { return byte == 0xA5; }));
}

TEST(touching_that_is_stopped_ends_without_an_error) {
  const Mapped memory(256 * kMiB);
  const std::atomic<bool> stop{true};
  CHECK(prefault_writable(memory.base, memory.nbytes, stop));
  CHECK_EQ(resident(memory.base, memory.nbytes), size_t{0});
}

TEST(memory_that_can_not_be_touched_is_an_error) {
  const Mapped memory(kMiB);
  CHECK_EQ(mprotect(memory.base, memory.nbytes, PROT_READ), 0);
  const std::atomic<bool> stop{false};
  CHECK(!prefault_writable(memory.base, memory.nbytes, stop));
}

TEST(a_region_is_whole_when_it_is_made_or_soon_after) {
  std::string error;
  const auto now = SharedRegion::create(96 * kMiB, &error);
  CHECK(now != nullptr);
  CHECK_EQ(resident(now->base(), now->nbytes()), now->nbytes());
  const auto behind = SharedRegion::create(96 * kMiB, &error, {0, true});
  CHECK(behind != nullptr);
  behind->base()[50 * kMiB] = 7;  // whoever comes first touches it
  while (resident(behind->base(), behind->nbytes()) != behind->nbytes()) std::this_thread::yield();
  CHECK_EQ(behind->base()[50 * kMiB], 7);
}

TEST(a_region_that_goes_while_it_is_touched_goes_whole) {
  for (int i = 0; i < 20; ++i) {
    std::string error;
    const auto region = SharedRegion::create(256 * kMiB, &error, {0, true});
    CHECK(region != nullptr);
    region->base()[0] = 1;
  }
}

TEST(a_region_of_huge_pages_is_whole_ones_or_says_how_many_are_missing) {
  std::string error;
  constexpr size_t kHuge = 2 * kMiB;
  const auto region = SharedRegion::create(3 * kMiB, &error, {kHuge, false});
  if (region == nullptr) {
    const bool is_told = error.find("needs 2 huge pages of 2 MiB, and ") != std::string::npos ||
                         error.find("this machine has no huge pages of 2 MiB") != std::string::npos;
    CHECK(is_told);
    return;
  }
  CHECK_EQ(region->nbytes(), 2 * kHuge);
  CHECK(ReadOnlyMapping::map(region->fd(), region->nbytes(), &error) != nullptr);
  // nobody has a million of them
  CHECK(SharedRegion::create(kHuge << 20, &error, {kHuge, false}) == nullptr);
  CHECK(error.find("needs 1048576 huge pages of 2 MiB") != std::string::npos);
  CHECK(error.find("nr_hugepages`") != std::string::npos);
}
