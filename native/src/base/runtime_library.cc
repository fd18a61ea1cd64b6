#include "base/runtime_library.h"

#include <filesystem>
#include <system_error>

namespace p2pkv {

bool RuntimeLibrary::is_what_is_loaded(const std::string& path) const {
  std::error_code error;
  return path == asked_for_ ||
         (path.find('/') != std::string::npos && std::filesystem::equivalent(path, path_, error));
}

bool RuntimeLibrary::open(const std::string& path, std::string* error) {
  opened_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened_ == nullptr) *error = dlerror();
  return opened_ != nullptr;
}

void RuntimeLibrary::keep(const std::string& asked_for, void* function) {
  asked_for_ = asked_for;
  path_ = file_of(function);
}

std::string RuntimeLibrary::file_of(void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

}  // namespace p2pkv
