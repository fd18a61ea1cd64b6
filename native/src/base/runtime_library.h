// A library that is found at run time, so that nobody needs it who does not use it. A process has one of its
// kind, for good: what such libraries start outlives every use of them, and the dynamic linker takes any of
// one SONAME for the one that is there.
#pragma once

#include <dlfcn.h>

#include <mutex>
#include <string>

namespace p2pkv {

// Whoever calls anything but `mutex` holds that mutex.
class RuntimeLibrary {
 public:
  // As in "libucp has no ucp_init; UCX 1.13 or later is needed".
  RuntimeLibrary(const char* name, const char* needed) : name_(name), needed_(needed) {}

  std::mutex mutex;

  bool is_loaded() const { return !asked_for_.empty(); }
  // Whether what is loaded is what this path or name stands for. Another name is not looked up.
  bool is_what_is_loaded(const std::string& path) const;
  // The file that is loaded; empty before.
  const std::string& path() const { return path_; }

  // Opens the library at `path`, or by a bare name wherever the loader finds it. It is closed by nobody, and
  // not taken for loaded before `keep`. False, with the reason in `error`.
  bool open(const std::string& path, std::string* error);
  // A function of the library that `open` has opened. False if it has none of that name.
  template <typename Function>
  bool find(const char* symbol, Function* out, std::string* error) const {
    *out = reinterpret_cast<Function>(dlsym(opened_, symbol));
    if (*out != nullptr) return true;
    *error = std::string(name_) + " has no " + symbol + "; " + needed_ + " is needed";
    return false;
  }
  // The library that was opened fits, and stays loaded. `function` is one of its own.
  void keep(const std::string& asked_for, void* function);
  // The file that a function comes from.
  static std::string file_of(void* function);

 private:
  const char* const name_;
  const char* const needed_;
  void* opened_ = nullptr;
  std::string asked_for_;
  std::string path_;
};

}  // namespace p2pkv
