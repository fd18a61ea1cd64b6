#include "transports/nccl/api.h"

#include <mutex>

#include "base/runtime_library.h"

namespace p2pkv::nccl {
namespace {

RuntimeLibrary library("libnccl", "NCCL 2.17 or later");
Api api;  // guarded by the library's mutex until it is loaded, as is its version
int loaded_version = 0;

bool find_all(std::string* error) {
  return library.find("ncclGetVersion", &api.get_version, error) &&
         library.find("ncclGetUniqueId", &api.get_unique_id, error) &&
         library.find("ncclCommInitRankConfig", &api.comm_init_rank_config, error) &&
         library.find("ncclCommGetAsyncError", &api.comm_get_async_error, error) &&
         library.find("ncclCommAbort", &api.comm_abort, error) &&
         library.find("ncclSend", &api.send, error) && library.find("ncclRecv", &api.recv, error) &&
         library.find("ncclGroupStart", &api.group_start, error) &&
         library.find("ncclGroupEnd", &api.group_end, error) &&
         library.find("ncclGetErrorString", &api.get_error_string, error) &&
         library.find("ncclGetLastError", &api.get_last_error, error);
}

}  // namespace

bool Api::load(const std::string& path, std::string* error) {
  const std::lock_guard lock(library.mutex);
  if (library.is_loaded()) {
    if (library.is_what_is_loaded(path)) return true;
    *error = path + " is asked for, but p2pkv has loaded " + library.path() + " in this process";
    return false;
  }
  if (!library.open(path, error) || !find_all(error)) return false;
  int version = 0;
  if (api.get_version(&version) != kSuccess || version < kOldest) {
    *error = RuntimeLibrary::file_of(reinterpret_cast<void*>(api.get_version)) + " is NCCL " +
             version_text(version) + "; 2.17 or later is needed";
    return false;
  }
  loaded_version = version;
  library.keep(path, reinterpret_cast<void*>(api.get_version));
  return true;
}

const Api& Api::get() {
  return api;
}

std::string Api::path() {
  const std::lock_guard lock(library.mutex);
  return library.path();
}

int Api::version() {
  const std::lock_guard lock(library.mutex);
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
