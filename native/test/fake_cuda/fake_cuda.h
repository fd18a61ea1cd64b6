// What tests tell the emulated driver, beside the calls of CUDA's. Symbols of libfake_cuda.so, found by dlsym
// or ctypes. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Device memory, at an address that no processor can read or write; 0 if there is none. Other processes map
// it by a handle, as cudaMalloc's; the second kind by a descriptor, as cuMemCreate's.
uint64_t fake_cuda_allocate(int device, size_t nbytes);
uint64_t fake_cuda_allocate_virtual(int device, size_t nbytes);
// Has host memory count as device memory of the second kind, until it is disowned: for suites that look at
// it. `fd` is the memfd behind it, from its start, or -1.
int fake_cuda_adopt(int device, uint64_t address, size_t nbytes, int fd);
int fake_cuda_disown(uint64_t address);
// Around the driver: what a kernel would have written, or reads now.
int fake_cuda_write(uint64_t to, const void* from, size_t nbytes);
int fake_cuda_read(void* to, uint64_t from, size_t nbytes);
int fake_cuda_free(uint64_t address);

// A stream of the test's own, as an engine has them, and work for it: a kernel that takes its time and then
// fills memory with a byte.
uint64_t fake_cuda_stream(int device);
int fake_cuda_destroy_stream(uint64_t stream);
int fake_cuda_launch_fill(uint64_t stream, uint64_t to, uint8_t value, size_t nbytes, int delay_us);

// The n-th next call of that name (1: the next) and, if `stays`, all that follow give `result`; n = 0 heals
// all.
void fake_cuda_fail(const char* call, int n, int result, int stays);
// Nothing of this device works any more: every call gives 719, copies under way end in the middle.
void fake_cuda_lose(int device);
// Each copy takes this long, beside the time that its bytes take.
void fake_cuda_delay_copies(int us);
// Copies, or kernels, stay unbegun until they are let go.
void fake_cuda_hold(int copies, int kernels);
// So many of the copies that are held, or will be, are let go.
void fake_cuda_let_through(int copies);
// Events say that they are done at once: whoever believes them does not wait. Breaks the safeguard on
// purpose.
void fake_cuda_lie_about_events(int is_lying);
// Takes back all of the above; lost devices work again.
void fake_cuda_reset();

struct FakeCudaCounts {
  int64_t contexts;  // retained
  int64_t streams;
  int64_t events;
  int64_t locked_bytes;
  int64_t copies_to_device;  // since the library was loaded; the two below as well
  int64_t copies_to_host;
  int64_t copied_bytes;
  int64_t queued;              // copies and kernels not done yet
  int64_t mappings;            // of other processes' memory, here and now
  int64_t copies_within;       // since the library was loaded; the two below as well
  int64_t launches;            // since then too: calls that queued copies, one or many
  int64_t exports;             // since then too: descriptors of memory for other devices, as it is
  int64_t exports_over_pcie;   // and those that were asked for over PCIe
  int64_t modules;             // loaded
  int64_t kernel_slices;       // since the library was loaded: that kernels were launched for
  int64_t freed_while_mapped;  // memory that was freed while another process mapped it by its handle
};
void fake_cuda_counts(FakeCudaCounts* counts);
}
