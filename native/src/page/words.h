// Generation words: how a reader proves that nobody overwrote what it read.
//
// A readable region may hold a table of 64-bit words, one per smallest block (docs/design.md, "Generation
// words"). A word is even only while a committed page starts at its block. Owners store words with
// `store_word`; readers, often through a read-only mapping in another process, load them with
// `load_word_after_bytes`.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace p2pkv {

// What a reader expects of the word that vouches for a span.
struct Word {
  uint64_t offset;  // of the word in the remote region, 8-byte aligned; kNoWord: the span is read unvalidated
  uint64_t value;
};
constexpr uint64_t kNoWord = UINT64_MAX;

constexpr bool is_committed(uint64_t word) {
  return (word & 1) == 0;
}

inline uint64_t load_word(const void* at) {
  auto* word = static_cast<uint64_t*>(const_cast<void*>(at));
  return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
}

// Every earlier load of this thread is done before anything later: call it when the last byte has been
// copied.
inline void load_fence() {
  std::atomic_thread_fence(std::memory_order_acquire);
#if defined(__x86_64__)
  // Loads are ordered on x86 except for non-temporal ones from write-combining memory; free beside a page's
  // copy.
  _mm_lfence();
#endif
}

inline uint64_t load_word_after_bytes(const void* at) {
  load_fence();
  return load_word(at);
}

// Makes earlier stores, non-temporal ones included, visible before any later store of this thread, to other
// processors and to devices that read the memory.
inline void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#elif defined(__aarch64__)
  // The fence below orders for processors (`dmb ish`); a NIC is outside of their shareable domain.
  __asm__ volatile("dmb osh" ::: "memory");
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Stores a word that others must see before what is stored later: call `store_fence` in between.
inline void store_word_ahead(void* at, uint64_t value) {
  std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(at)).store(value, std::memory_order_release);
}

// Stores the word between two fences: earlier bytes become visible before it, and it before later bytes.
inline void store_word(void* at, uint64_t value) {
  store_fence();
  store_word_ahead(at, value);
  store_fence();
}

}  // namespace p2pkv
