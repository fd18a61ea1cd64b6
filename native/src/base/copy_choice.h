// Which of the kernels of base/copy_kernels.h copies, by a size class of the bytes. It holds for the process:
// what is fastest is a property of the CPU and of its memory.
//
// Everything is copied by memcpy until somebody measures, or names a kernel. What is chosen may change while
// others copy: each copy is by one kernel, and all kernels make the same promises. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/copy_kernels.h"
#include "base/copy_trial.h"

namespace p2pkv {

// Fewer bytes are copied by memcpy: no other kernel is worth its fence there, or its head and tail.
constexpr size_t kLeastChosenFor = 4096;

const CopyKernel& kernel_for(Copying copying, size_t nbytes);

// Copies with this kernel from now on, in every size class; false if this CPU has none of the name.
bool use_copy_kernel(std::string_view name);

// Copies with what is fastest, from now on; the first call of a process measures, which takes about 20 ms.
// Copies within `memory`, whose bytes are anything afterwards, or in memory of its own if that is too little
// to be cold.
void use_fastest_copy_kernels(uint8_t* memory, size_t nbytes);

struct CopyChoice {
  Copying copying;
  const SizeClass* sizes;
  std::string_view kernel;
  double
      of_memcpy;  // its speed when it was measured, memcpy's being 1; 0: it was named, or none is chosen yet
};
std::vector<CopyChoice> copy_choices();

}  // namespace p2pkv
