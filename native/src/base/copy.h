// Copies of page bytes. Both kinds may run while another thread or process writes the source: what they
// deliver counts only after the generation word has been checked, so they are exempt from the thread
// sanitizer.
#pragma once

#include <cstddef>

namespace p2pkv {

// Copies `nbytes`, past the cache when the copy is large enough for that to pay. The regions must not
// overlap. Non-temporal stores are fenced before it returns, so a plain store afterwards is seen after the
// bytes.
void copy_bytes(void* to, const void* from, size_t nbytes);

}  // namespace p2pkv
