// The emulated network cards as the native tests use them: loaded once.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <iostream>

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
    void* library = dlopen(P2PKV_FAKE_IBVERBS, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      std::cerr << dlerror() << "\n";
      abort();
    }
    find(library, "fake_ibverbs_refuse", &refuse);
    find(library, "fake_ibverbs_deceive", &deceive);
    find(library, "fake_ibverbs_reset", &reset);
    find(library, "fake_ibverbs_counts", &read_counts);
  }

  template <typename Function>
  static void find(void* library, const char* name, Function* out) {
    *out = reinterpret_cast<Function>(dlsym(library, name));
    if (*out == nullptr) abort();
  }
};

}  // namespace p2pkv::test
