// The emulated driver as the native tests use it: loaded once.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../emulated_library.h"
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
    const EmulatedLibrary library(P2PKV_FAKE_CUDA);
    library.find("fake_cuda_allocate", &allocate);
    library.find("fake_cuda_allocate_virtual", &allocate_virtual);
    library.find("fake_cuda_free", &free);
    library.find("fake_cuda_write", &write);
    library.find("fake_cuda_read", &read);
    library.find("fake_cuda_stream", &stream);
    library.find("fake_cuda_destroy_stream", &destroy_stream);
    library.find("fake_cuda_launch_fill", &launch_fill);
    library.find("fake_cuda_fail", &fail);
    library.find("fake_cuda_lose", &lose);
    library.find("fake_cuda_delay_copies", &delay_copies);
    library.find("fake_cuda_hold", &hold);
    library.find("fake_cuda_let_through", &let_through);
    library.find("fake_cuda_lie_about_events", &lie_about_events);
    library.find("fake_cuda_reset", &reset);
    library.find("fake_cuda_counts", &read_counts);
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
