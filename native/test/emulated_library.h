// An emulated library as the native tests use it, beside those who load it as the real one.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <iostream>

namespace p2pkv::test {

class EmulatedLibrary {
 public:
  explicit EmulatedLibrary(const char* path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ != nullptr) return;
    std::cerr << dlerror() << "\n";
    abort();
  }
  template <typename Function>
  void find(const char* name, Function* out) const {
    *out = reinterpret_cast<Function>(dlsym(library_, name));
    if (*out == nullptr) abort();
  }

 private:
  void* const library_;  // for good
};

}  // namespace p2pkv::test
