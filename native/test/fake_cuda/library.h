// The emulated driver as the native tests use it: loaded once.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "fake_cuda.h"

namespace p2pkv::test {

struct FakeCuda {
  decltype(&fake_cuda_allocate) allocate;
  decltype(&fake_cuda_allocate_virtual) allocate_virtual;
  decltype(&fake_cuda_free) free;
  decltype(&fake_cuda_write) write;
  decltype(&fake_cuda_read) read;
  decltype(&fake_cuda_stream) stream;
  decltype(&fake_cuda_destroy_stream) destroy_stream;
  decltype(&fake_cuda_launch_fill) launch_fill;
  decltype(&fake_cuda_fail) fail;
  decltype(&fake_cuda_lose) lose;
  decltype(&fake_cuda_delay_copies) delay_copies;
  decltype(&fake_cuda_hold) hold;
  decltype(&fake_cuda_let_through) let_through;
  decltype(&fake_cuda_lie_about_events) lie_about_events;
  decltype(&fake_cuda_reset) reset;
  decltype(&fake_cuda_counts) read_counts;

  static const FakeCuda& get() {
    static const FakeCuda loaded;
    return loaded;
  }

  FakeCudaCounts counts() const {
    FakeCudaCounts counts;
    read_counts(&counts);
    return counts;
  }

 private:
  FakeCuda() {
    std::string error;
    cuda::use_library(P2PKV_FAKE_CUDA, &error);
    void* library = dlopen(P2PKV_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      std::cerr << dlerror() << "\n";
      abort();
    }
    find(library, "fake_cuda_allocate", &allocate);
    find(library, "fake_cuda_allocate_virtual", &allocate_virtual);
    find(library, "fake_cuda_free", &free);
    find(library, "fake_cuda_write", &write);
    find(library, "fake_cuda_read", &read);
    find(library, "fake_cuda_stream", &stream);
    find(library, "fake_cuda_destroy_stream", &destroy_stream);
    find(library, "fake_cuda_launch_fill", &launch_fill);
    find(library, "fake_cuda_fail", &fail);
    find(library, "fake_cuda_lose", &lose);
    find(library, "fake_cuda_delay_copies", &delay_copies);
    find(library, "fake_cuda_hold", &hold);
    find(library, "fake_cuda_let_through", &let_through);
    find(library, "fake_cuda_lie_about_events", &lie_about_events);
    find(library, "fake_cuda_reset", &reset);
    find(library, "fake_cuda_counts", &read_counts);
  }

  template <typename Function>
  static void find(void* library, const char* name, Function* out) {
    *out = reinterpret_cast<Function>(dlsym(library, name));
    if (*out == nullptr) abort();
  }
};

// Device memory that goes with the test.
class OnDevice {
 public:
  explicit OnDevice(size_t nbytes, int device = 0)
      : fake_(FakeCuda::get()), nbytes_(nbytes), address_(fake_.allocate(device, nbytes)) {}
  ~OnDevice() { fake_.free(address_); }
  uint64_t address() const { return address_; }
  std::vector<uint8_t> bytes() const {
    std::vector<uint8_t> bytes(nbytes_);
    fake_.read(bytes.data(), address_, nbytes_);
    return bytes;
  }
  void fill(uint8_t value) {
    const std::vector<uint8_t> bytes(nbytes_, value);
    fake_.write(address_, bytes.data(), nbytes_);
  }

 private:
  const FakeCuda& fake_;
  const size_t nbytes_;
  const uint64_t address_;
};

}  // namespace p2pkv::test
