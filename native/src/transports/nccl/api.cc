#include "transports/nccl/api.h"

#include <dlfcn.h>

#include <filesystem>
#include <mutex>
#include <system_error>

namespace p2pkv::nccl {
namespace {

std::mutex loading;  // guards all below until is_loaded
Api api;
bool is_loaded = false;
int loaded_version = 0;
std::string loaded_as;    // what was asked for when it was loaded
std::string loaded_path;  // the file that it is

template <typename Function>
bool find(void* library, const char* name, Function* out, std::string* error) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  if (*out != nullptr) return true;
  *error = std::string("libnccl has no ") + name + "; NCCL 2.17 or later is needed";
  return false;
}

bool find_all(void* library, std::string* error) {
  return find(library, "ncclGetVersion", &api.get_version, error) &&
         find(library, "ncclGetUniqueId", &api.get_unique_id, error) &&
         find(library, "ncclCommInitRankConfig", &api.comm_init_rank_config, error) &&
         find(library, "ncclCommGetAsyncError", &api.comm_get_async_error, error) &&
         find(library, "ncclCommAbort", &api.comm_abort, error) &&
         find(library, "ncclSend", &api.send, error) && find(library, "ncclRecv", &api.recv, error) &&
         find(library, "ncclGroupStart", &api.group_start, error) &&
         find(library, "ncclGroupEnd", &api.group_end, error) &&
         find(library, "ncclGetErrorString", &api.get_error_string, error) &&
         find(library, "ncclGetLastError", &api.get_last_error, error);
}

std::string path_of(void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

bool is_what_is_loaded(const std::string& path) {
  std::error_code error;
  return path == loaded_as ||
         (path.find('/') != std::string::npos && std::filesystem::equivalent(path, loaded_path, error));
}

}  // namespace

bool Api::load(const std::string& path, std::string* error) {
  const std::lock_guard lock(loading);
  if (is_loaded) {
    if (is_what_is_loaded(path)) return true;
    *error = path + " is asked for, but p2pkv has loaded " + loaded_path + " in this process";
    return false;
  }
  // Never closed: its threads outlive every use of it.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *error = dlerror();
    return false;
  }
  if (!find_all(library, error)) return false;
  const std::string file = path_of(reinterpret_cast<void*>(api.get_version));
  int version = 0;
  if (api.get_version(&version) != kSuccess || version < kOldest) {
    *error = file + " is NCCL " + version_text(version) + "; 2.17 or later is needed";
    return false;
  }
  loaded_as = path;
  loaded_path = file;
  loaded_version = version;
  is_loaded = true;
  return true;
}

const Api& Api::get() {
  return api;
}

std::string Api::path() {
  const std::lock_guard lock(loading);
  return loaded_path;
}

int Api::version() {
  const std::lock_guard lock(loading);
  return loaded_version;
}

std::string Api::describe(const char* call, Result error, Handle comm) const {
  const char* text = get_error_string(error);
  const char* last = get_last_error(comm);
  std::string said = std::string(call) + ": " + (text != nullptr ? text : std::to_string(error).c_str());
  if (last != nullptr && *last != '\0') said += std::string(" (") + last + ")";
  return said;
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace p2pkv::nccl
