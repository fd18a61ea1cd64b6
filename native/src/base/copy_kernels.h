// Ways to copy page bytes, of which base/copy_choice.h takes the fastest.
//
// Every kernel promises this, whatever the lengths and alignments are; the regions must not overlap:
// - It copies exactly `nbytes`: it writes no byte beside the destination and loads none beside the source. A
//   prefetch may go beyond the source's end, which never faults.
// - A store after it is seen no earlier than the copied bytes, to the extent that this holds after a memcpy:
//   a kernel that stores past the cache fences its stores (`sfence`, `dmb ishst`) before it returns. So a
//   generation word that `store_word` (page/words.h) makes even afterwards vouches for all of them.
// - Its loads are done when a `load_fence` after it is: it uses ordinary loads only, so that the word that is
//   loaded behind the fence tells of every byte. It may run while another thread or process writes the
//   source: what it delivers then is any mixture of old and new bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/checksum.h"

#if defined(__SANITIZE_THREAD__)
#define P2PKV_TSAN 1
#endif

namespace p2pkv {

struct CopyKernel {
  using Copy = void (*)(void* to, const void* from, size_t nbytes);
  // Copies groups of 32 bytes to a destination aligned to 32 bytes and sums them, by the CPU's CRC32C
  // instructions, on the way.
  using CopyAndSum = void (*)(Checksum::Lanes& lanes, uint8_t* to, const uint8_t* from, size_t n_groups);

  std::string_view name;
  Copy copy;
  CopyAndSum copy_and_sum = nullptr;  // null: bytes are summed block by block before they are copied
};

// Copies that fold the checksum in are measured apart: summing hides some of what memory takes.
enum class Copying { kPlain, kSummed };

// Whether it stores past the cache, as the names of those that do say.
constexpr bool stores_past_cache(const CopyKernel& kernel) {
  return kernel.name.find("_nt") != std::string_view::npos;
}

// The C library's memcpy, which is there everywhere.
const CopyKernel& library_kernel();

// All that run on this CPU, the library's first. Under the thread sanitizer that is the only one: it alone is
// exempt from it.
const std::vector<CopyKernel>& copy_kernels();

// Null if there is none of this name for this CPU.
const CopyKernel* find_copy_kernel(std::string_view name);

// Those of the processor's own, in copy_kernels_x86.cc and copy_kernels_arm.cc.
std::vector<CopyKernel> processor_kernels();

// Copies a head and a tail by memcpy, and what lies between by `kBody`: whole blocks to a destination that is
// aligned to a cache line.
template <void (*kBody)(uint8_t* to, const uint8_t* from, size_t nbytes), size_t kBlock>
void copy_in_blocks(void* to, const void* from, size_t nbytes) {
  constexpr size_t kLine = 64;
  static_assert(kBlock % kLine == 0);
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  const size_t head = -reinterpret_cast<uintptr_t>(out) % kLine;
  const size_t body = nbytes < head ? 0 : (nbytes - head) / kBlock * kBlock;
  if (body == 0) {
    library_kernel().copy(to, from, nbytes);
    return;
  }
  const size_t done = head + body;
  library_kernel().copy(out, in, head);
  kBody(out + head, in + head, body);
  library_kernel().copy(out + done, in + done, nbytes - done);
}

}  // namespace p2pkv
