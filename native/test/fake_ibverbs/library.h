// The emulated network cards as the native tests use them: loaded once.
#pragma once

#include "../emulated_library.h"
#include "../fake_cuda/library.h"
#include "fake_ibverbs.h"

namespace p2pkv::test {

struct FakeIbverbs {
  decltype(&fake_ibverbs_refuse) refuse;
  decltype(&fake_ibverbs_deceive) deceive;
  decltype(&fake_ibverbs_reset) reset;
  decltype(&fake_ibverbs_counts) read_counts;

  static const FakeIbverbs& get() {
    static const FakeIbverbs loaded;
    return loaded;
  }

  FakeIbverbsCounts counts() const {
    FakeIbverbsCounts counts;
    read_counts(&counts);
    return counts;
  }

 private:
  FakeIbverbs() {
    FakeCuda::get();
    const EmulatedLibrary library(P2PKV_FAKE_IBVERBS);
    library.find("fake_ibverbs_refuse", &refuse);
    library.find("fake_ibverbs_deceive", &deceive);
    library.find("fake_ibverbs_reset", &reset);
    library.find("fake_ibverbs_counts", &read_counts);
  }
};

}  // namespace p2pkv::test
