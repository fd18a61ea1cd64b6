// The kernel that copies pieces (piece_kernel.h), as the driver takes it, and what it is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/device.h"

namespace p2pkv::cuda {

// What one launch copies, as a parameter of the kernel: the driver takes it along, and so nobody has to keep
// it until the copies have ended. Both addresses and the length are multiples of 16.
template <size_t kMost>
struct Slices {
  uint64_t n;
  InnerCopy of[kMost];
};
// As much as fits the 4 KiB that parameters have had always, and the 32,764 bytes of CUDA 12.1: a launch
// costs more the larger they are.
using FewSlices = Slices<170>;
using ManySlices = Slices<1364>;
static_assert(sizeof(InnerCopy) == 24 && sizeof(FewSlices) <= 4096 && sizeof(ManySlices) <= 32764);

constexpr char kFewSlicesKernel[] = "p2pkv_copy_few_slices";
constexpr char kManySlicesKernel[] = "p2pkv_copy_many_slices";
constexpr unsigned kKernelThreads = 1024;  // of a block: 32 warps, each with a slice of its own
constexpr unsigned kWarp = 32;             // threads

// The source of both kernels in PTX.
const std::string& piece_kernel_text();

}  // namespace p2pkv::cuda
