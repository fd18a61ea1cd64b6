// What tests tell the emulated NCCL, beside the calls of NCCL's. Symbols of libfake_nccl.so, found by dlsym
// or ctypes. Thread-safe. All of it holds for this process alone.
#pragma once

#include <cstdint>

extern "C" {

// From now on the ranks of this process never meet another.
void fake_nccl_never_meet(int on);
// The n-th meeting from now on fails, with this result, after it has begun; 0: none.
void fake_nccl_fail_meeting(int nth, int result);
// The n-th operation (send or receive) from now on fails with this result, told by ncclCommGetAsyncError,
// when half of its bytes are through; its stream goes on. 0: none.
void fake_nccl_fail_operation(int nth, int result);
// Bytes stay unsent until they are let go.
void fake_nccl_hold(int on);
// Each piece of 64 KiB takes this long to be sent.
void fake_nccl_delay(int us);
// An abort takes this long to let go.
void fake_nccl_delay_aborts(int us);
// Takes back all of the above.
void fake_nccl_reset();

struct FakeNcclCounts {
  int64_t communicators;  // that there are now
  int64_t met;            // since the library was loaded; the three below as well
  int64_t aborts;
  int64_t sends;
  int64_t sent_bytes;
};
void fake_nccl_counts(FakeNcclCounts* counts);
}
