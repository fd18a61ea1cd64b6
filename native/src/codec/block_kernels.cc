#include "codec/block_kernels.h"

#include "codec/block_loops.h"

namespace p2pkv::codec {
namespace {

Window measure_bf16(const uint8_t* block) {
  return measure_loop<Bf16>(block);
}
Window measure_fp16(const uint8_t* block) {
  return measure_loop<Fp16>(block);
}
void pack_bf16(const uint8_t* block, uint8_t base, uint8_t* to, uint8_t* is_escape) {
  pack_bf16_loop(block, base, to, is_escape);
}
void pack_fp16(const uint8_t* block, uint8_t base, uint8_t* to, uint8_t* is_escape) {
  pack_fp16_loop(block, base, to, is_escape);
}
void unpack_bf16(const uint8_t* from, uint8_t base, uint8_t* block) {
  unpack_bf16_loop(from, base, block);
}
void unpack_fp16(const uint8_t* from, uint8_t base, uint8_t* block) {
  unpack_fp16_loop(from, base, block);
}

std::vector<BlockKernel> all_kernels() {
  std::vector<BlockKernel> kernels{{"portable",
                                    {nullptr, measure_bf16, measure_fp16},
                                    {nullptr, pack_bf16, pack_fp16},
                                    {nullptr, unpack_bf16, unpack_fp16}}};
  for (const BlockKernel& kernel : processor_block_kernels()) kernels.push_back(kernel);
  return kernels;
}

}  // namespace

#if !defined(__x86_64__)
std::vector<BlockKernel> processor_block_kernels() {
  return {};
}
#endif

const std::vector<BlockKernel>& block_kernels() {
  static const std::vector<BlockKernel> kernels = all_kernels();
  return kernels;
}

}  // namespace p2pkv::codec
