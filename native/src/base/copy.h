// Copies of page bytes. Both kinds may run while another thread or process writes the source: what they
// deliver counts only after the generation word has been checked, so they are exempt from the thread
// sanitizer.
#pragma once

#include <cstddef>

namespace p2pkv {

// Copies `nbytes` with the kernel that is chosen for so many (base/copy_choice.h), and keeps the promises of
// base/copy_kernels.h: a store afterwards is seen after the bytes, and a `load_fence` waits for its loads.
// The regions must not overlap.
void copy_bytes(void* to, const void* from, size_t nbytes);

}  // namespace p2pkv
