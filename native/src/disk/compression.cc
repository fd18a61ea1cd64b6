#include "disk/compression.h"

#include <dlfcn.h>

#include <algorithm>
#include <mutex>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "disk/record.h"

namespace p2pkv::disk {
namespace {

// The fastest of the usual levels: what the higher ones gain on KV values is a few per cent, see
// docs/disk.md.
constexpr int kLevel = 1;
// Every so often a piece of a page is compressed both ways, to see which is better.
constexpr unsigned kTryEvery = 32;
constexpr size_t kSample = 16 << 10;

// The part of libzstd's stable interface that is used here; loaded at run time, so declared by hand.
struct Zstd {
  void* (*create_encoder)();
  size_t (*free_encoder)(void*);
  size_t (*compress)(void*, void*, size_t, const void*, size_t, int);
  void* (*create_decoder)();
  size_t (*free_decoder)(void*);
  size_t (*decompress)(void*, void*, size_t, const void*, size_t);
  unsigned (*is_error)(size_t);
};

std::mutex loading;  // guards the two below until `is_loaded`
Zstd zstd;
bool is_loaded = false;

template <typename Function>
bool find(void* library, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  return *out != nullptr;
}

bool find_all(void* library) {
  return find(library, "ZSTD_createCCtx", &zstd.create_encoder) &&
         find(library, "ZSTD_freeCCtx", &zstd.free_encoder) &&
         find(library, "ZSTD_compressCCtx", &zstd.compress) &&
         find(library, "ZSTD_createDCtx", &zstd.create_decoder) &&
         find(library, "ZSTD_freeDCtx", &zstd.free_decoder) &&
         find(library, "ZSTD_decompressDCtx", &zstd.decompress) &&
         find(library, "ZSTD_isError", &zstd.is_error);
}

// Even bytes to the front half, odd bytes to the back half; an odd last byte stays the last. The high bytes
// of 16-bit floats (sign and exponent) are alike; mixed with the low ones they can't be told to be.
void split_bytes(const uint8_t* from, size_t nbytes, uint8_t* to) {
  const size_t half = nbytes / 2;
  size_t i = 0;
#ifdef __SSE2__
  const __m128i low = _mm_set1_epi16(0xff);
  for (; i + 16 <= half; i += 16) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i + 16));
    const __m128i even = _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low));
    const __m128i odd = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), even);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + half + i), odd);
  }
#endif
  for (; i < half; ++i) {
    to[i] = from[2 * i];
    to[half + i] = from[2 * i + 1];
  }
  if (nbytes % 2 != 0) to[nbytes - 1] = from[nbytes - 1];
}

void join_bytes(const uint8_t* from, size_t nbytes, uint8_t* to) {
  const size_t half = nbytes / 2;
  size_t i = 0;
#ifdef __SSE2__
  for (; i + 16 <= half; i += 16) {
    const __m128i even = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m128i odd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + half + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), _mm_unpacklo_epi8(even, odd));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i + 16), _mm_unpackhi_epi8(even, odd));
  }
#endif
  for (; i < half; ++i) {
    to[2 * i] = from[i];
    to[2 * i + 1] = from[half + i];
  }
  if (nbytes % 2 != 0) to[nbytes - 1] = from[nbytes - 1];
}

}  // namespace

std::string zstd_missing(const char* library) {
  const std::lock_guard lock(loading);
  const bool is_usual = std::string(library) == "libzstd.so.1";
  if (is_usual && is_loaded) return "";
  // never closed: contexts may live until the process ends
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return std::string(library) + " was not found; install it (Debian and Ubuntu: libzstd1, Fedora: libzstd)";
  }
  if (!is_usual) return "";
  is_loaded = find_all(handle);
  return is_loaded ? "" : std::string(library) + " lacks functions of zstd 1.0";
}

PageEncoder::PageEncoder() : context_(zstd_missing().empty() ? zstd.create_encoder() : nullptr) {}

PageEncoder::~PageEncoder() {
  if (context_ != nullptr) zstd.free_encoder(context_);
}

// Whether a piece of the page becomes smaller with its bytes split.
bool PageEncoder::splits(const uint8_t* page, size_t nbytes) {
  const size_t n = std::min(nbytes, kSample);
  sample_.resize(3 * n);
  split_bytes(page, n, sample_.data() + 2 * n);
  const size_t plain = zstd.compress(context_, sample_.data(), 2 * n, page, n, kLevel);
  const size_t split = zstd.compress(context_, sample_.data(), 2 * n, sample_.data() + 2 * n, n, kLevel);
  return zstd.is_error(split) == 0 && (zstd.is_error(plain) != 0 || split < plain);
}

size_t PageEncoder::encode(const uint8_t* page, size_t nbytes, uint8_t* to, uint16_t* flags) {
  *flags = 0;
  if (context_ == nullptr) return 0;
  if (n_encoded_++ % kTryEvery == 0) is_split_ = splits(page, nbytes);
  if (is_split_) {
    split_.resize(nbytes);
    split_bytes(page, nbytes, split_.data());
    page = split_.data();
  }
  const size_t stored = zstd.compress(context_, to, nbytes - nbytes / 8, page, nbytes, kLevel);
  if (zstd.is_error(stored) != 0) return 0;
  *flags = static_cast<uint16_t>(kCompressed | (is_split_ ? kSplit : 0));
  return stored;
}

PageDecoder::PageDecoder() : context_(zstd_missing().empty() ? zstd.create_decoder() : nullptr) {}

PageDecoder::~PageDecoder() {
  if (context_ != nullptr) zstd.free_decoder(context_);
}

const uint8_t* PageDecoder::decode(const uint8_t* from, size_t stored, uint16_t flags, size_t length) {
  if (context_ == nullptr) return nullptr;
  page_.resize(length);
  if (zstd.decompress(context_, page_.data(), length, from, stored) != length) return nullptr;
  if ((flags & kSplit) == 0) return page_.data();
  split_.resize(length);
  join_bytes(page_.data(), length, split_.data());
  return split_.data();
}

}  // namespace p2pkv::disk
