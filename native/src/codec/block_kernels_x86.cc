// The loops compiled for AVX2 and for AVX-512, whose instructions are used only where the CPU has them.
#include "codec/block_kernels.h"

#if defined(__x86_64__)

#include "codec/block_loops.h"

namespace p2pkv::codec {
namespace {

#define P2PKV_KERNELS(SUFFIX, TARGET)                                                                      \
  __attribute__((target(TARGET))) Window measure_bf16_##SUFFIX(const uint8_t* block) {                     \
    return measure_loop<Bf16>(block);                                                                      \
  }                                                                                                        \
  __attribute__((target(TARGET))) Window measure_fp16_##SUFFIX(const uint8_t* block) {                     \
    return measure_loop<Fp16>(block);                                                                      \
  }                                                                                                        \
  __attribute__((target(TARGET))) void pack_bf16_##SUFFIX(const uint8_t* block, uint8_t base, uint8_t* to, \
                                                          uint8_t* is_escape) {                            \
    pack_bf16_loop(block, base, to, is_escape);                                                            \
  }                                                                                                        \
  __attribute__((target(TARGET))) void pack_fp16_##SUFFIX(const uint8_t* block, uint8_t base, uint8_t* to, \
                                                          uint8_t* is_escape) {                            \
    pack_fp16_loop(block, base, to, is_escape);                                                            \
  }                                                                                                        \
  __attribute__((target(TARGET))) void unpack_bf16_##SUFFIX(const uint8_t* from, uint8_t base,             \
                                                            uint8_t* block) {                              \
    unpack_bf16_loop(from, base, block);                                                                   \
  }                                                                                                        \
  __attribute__((target(TARGET))) void unpack_fp16_##SUFFIX(const uint8_t* from, uint8_t base,             \
                                                            uint8_t* block) {                              \
    unpack_fp16_loop(from, base, block);                                                                   \
  }                                                                                                        \
  constexpr BlockKernel kKernel_##SUFFIX{#SUFFIX,                                                          \
                                         {nullptr, measure_bf16_##SUFFIX, measure_fp16_##SUFFIX},          \
                                         {nullptr, pack_bf16_##SUFFIX, pack_fp16_##SUFFIX},                \
                                         {nullptr, unpack_bf16_##SUFFIX, unpack_fp16_##SUFFIX}};

P2PKV_KERNELS(avx2, "avx2")
P2PKV_KERNELS(avx512, "avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

}  // namespace

std::vector<BlockKernel> processor_block_kernels() {
  std::vector<BlockKernel> kernels;
  if (__builtin_cpu_supports("avx2")) kernels.push_back(kKernel_avx2);
  const bool has_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_wide) kernels.push_back(kKernel_avx512);
  return kernels;
}

}  // namespace p2pkv::codec

#endif
