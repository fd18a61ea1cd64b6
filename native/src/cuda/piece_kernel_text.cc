#include "cuda/piece_kernel_text.h"

#include <string>

namespace p2pkv::cuda {
namespace {

// In PTX, which the driver compiles for the device that it finds: so neither a compiler of CUDA's is needed
// to build this, nor a library of NVIDIA's beside the driver to run it. 8.1 is of CUDA 12.1, the first with
// parameters of more than 4 KiB.
constexpr char kHead[] = R"(
.version 8.1
.target sm_70
.address_size 64
)";

// As in C, of every warp, whose lanes take 16 bytes each:
//
//   for (i = warp; i < slices.n; i += n_warps)
//     for (at = 16 * lane; at < slices.of[i].nbytes; at += 4 * 512)
//       load 16 bytes at `at`, at + 512, at + 1024 and at + 1536, as far as the slice goes; then store them.
//
// Loads are volatile: every line is read over PCIe, none from what a cache has. Four of a lane under way at a
// time, with 32 warps a block, make 64 KiB, more than PCIe holds within the 1 to 2 us of its answer.
constexpr char kBody[] = R"(
{
  .reg .pred %p<5>;
  .reg .b32 %thread, %block, %threads, %blocks, %t, %lane32;
  .reg .b32 %a<4>, %b<4>, %c<4>, %d<4>;
  .reg .b64 %i, %n, %warps, %lane, %at, %slice, %to, %from;
  .reg .s64 %left;

  mov.u32 %thread, %tid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %blocks, %nctaid.x;
  mad.lo.u32 %t, %block, %threads, %thread;
  shr.u32 %t, %t, 5;
  cvt.u64.u32 %i, %t;
  mul.lo.u32 %t, %blocks, %threads;
  shr.u32 %t, %t, 5;
  cvt.u64.u32 %warps, %t;
  and.b32 %lane32, %thread, 31;
  mul.wide.u32 %lane, %lane32, 16;
  ld.param.u64 %n, [slices];

next_slice:
  setp.ge.u64 %p0, %i, %n;
  @%p0 bra done;
  mov.b64 %slice, slices;
  mad.lo.u64 %slice, %i, 24, %slice;
  ld.param.u64 %to, [%slice + 8];
  ld.param.u64 %from, [%slice + 16];
  ld.param.u64 %left, [%slice + 24];
  add.u64 %to, %to, %lane;
  add.u64 %from, %from, %lane;
  sub.s64 %left, %left, %lane;
  add.u64 %i, %i, %warps;

next_round:
  setp.le.s64 %p0, %left, 0;
  @%p0 bra next_slice;
  setp.gt.s64 %p1, %left, 512;
  setp.gt.s64 %p2, %left, 1024;
  setp.gt.s64 %p3, %left, 1536;
  ld.volatile.global.v4.u32 {%a0, %a1, %a2, %a3}, [%from];
  @%p1 ld.volatile.global.v4.u32 {%b0, %b1, %b2, %b3}, [%from + 512];
  @%p2 ld.volatile.global.v4.u32 {%c0, %c1, %c2, %c3}, [%from + 1024];
  @%p3 ld.volatile.global.v4.u32 {%d0, %d1, %d2, %d3}, [%from + 1536];
  st.global.v4.u32 [%to], {%a0, %a1, %a2, %a3};
  @%p1 st.global.v4.u32 [%to + 512], {%b0, %b1, %b2, %b3};
  @%p2 st.global.v4.u32 [%to + 1024], {%c0, %c1, %c2, %c3};
  @%p3 st.global.v4.u32 [%to + 1536], {%d0, %d1, %d2, %d3};
  add.u64 %to, %to, 2048;
  add.u64 %from, %from, 2048;
  sub.s64 %left, %left, 2048;
  bra next_round;

done:
  ret;
}
)";

std::string entry(const char* name, size_t nbytes) {
  return std::string("\n.visible .entry ") + name + "(.param .align 8 .b8 slices[" + std::to_string(nbytes) +
         "])\n.maxntid " + std::to_string(kKernelThreads) + ", 1, 1" + kBody;
}

}  // namespace

const std::string& piece_kernel_text() {
  static const std::string text =
      kHead + entry(kFewSlicesKernel, sizeof(FewSlices)) + entry(kManySlicesKernel, sizeof(ManySlices));
  return text;
}

}  // namespace p2pkv::cuda
