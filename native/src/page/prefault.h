// Memory that is touched before its first use, by as many threads as pay.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace p2pkv {

// Touches every page of the writable mapping `[base, base + nbytes)`, so that a shortage shows here and not
// as a SIGBUS later. False, with errno set, when the memory is not to be had. Ends early, and with true, once
// `stop` is set. `most_threads` 0: as many as the process has processors.
//
// The kernel clears the pages, which takes half a second a GiB and thread. How many threads it pays for is
// another number on every machine (its memory, its NUMA nodes, what else it does), so it is measured on the
// way: rounds have twice the threads of the one before while that makes them faster.
bool prefault_writable(uint8_t* base, size_t nbytes, const std::atomic<bool>& stop,
                       unsigned most_threads = 0);

// Touches every page where the kernel can't be asked to, which it can from 5.14 on. It changes no byte,
// whoever writes there meanwhile: memory that is touched behind its first use may hold pages already.
void touch_by_writing(uint8_t* base, size_t nbytes);

}  // namespace p2pkv
