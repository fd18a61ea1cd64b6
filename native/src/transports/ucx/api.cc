#include "transports/ucx/api.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <filesystem>
#include <mutex>
#include <system_error>

namespace p2pkv::ucx {
namespace {

std::mutex loading;  // guards all below until is_loaded
Api api;
bool is_loaded = false;
std::string loaded_as;    // what was asked for when it was loaded
std::string loaded_path;  // the file that it is

// A setting of UCX that counts only while the library is loaded, unless the user has made it himself.
class DefaultSetting {
 public:
  DefaultSetting(const char* name, const char* value) : name_(name), was_unset_(getenv(name) == nullptr) {
    if (was_unset_) setenv(name, value, 1);
  }
  ~DefaultSetting() {
    if (was_unset_) unsetenv(name_);
  }
  DefaultSetting(const DefaultSetting&) = delete;
  DefaultSetting& operator=(const DefaultSetting&) = delete;

 private:
  const char* const name_;
  const bool was_unset_;
};

template <typename Function>
bool find(void* library, const char* name, Function* out, std::string* error) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  if (*out != nullptr) return true;
  *error = std::string("libucp has no ") + name + "; UCX 1.13 or later is needed";
  return false;
}

bool find_all(void* library, std::string* error) {
  return find(library, "ucp_get_version", &api.get_version, error) &&
         find(library, "ucp_init_version", &api.init_version, error) &&
         find(library, "ucp_cleanup", &api.cleanup, error) &&
         find(library, "ucp_config_read", &api.config_read, error) &&
         find(library, "ucp_config_modify", &api.config_modify, error) &&
         find(library, "ucp_config_release", &api.config_release, error) &&
         find(library, "ucp_context_print_info", &api.context_print_info, error) &&
         find(library, "ucp_worker_create", &api.worker_create, error) &&
         find(library, "ucp_worker_destroy", &api.worker_destroy, error) &&
         find(library, "ucp_worker_progress", &api.worker_progress, error) &&
         find(library, "ucp_worker_get_efd", &api.worker_get_efd, error) &&
         find(library, "ucp_worker_arm", &api.worker_arm, error) &&
         find(library, "ucp_worker_set_am_recv_handler", &api.worker_set_am_recv_handler, error) &&
         find(library, "ucp_worker_get_address", &api.worker_get_address, error) &&
         find(library, "ucp_worker_release_address", &api.worker_release_address, error) &&
         find(library, "ucp_ep_create", &api.ep_create, error) &&
         find(library, "ucp_ep_flush_nbx", &api.ep_flush_nbx, error) &&
         find(library, "ucp_ep_close_nbx", &api.ep_close_nbx, error) &&
         find(library, "ucp_am_send_nbx", &api.am_send_nbx, error) &&
         find(library, "ucp_request_check_status", &api.request_check_status, error) &&
         find(library, "ucp_request_free", &api.request_free, error) &&
         find(library, "ucs_status_string", &api.status_string, error);
}

std::string path_of(void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

// Whether what is loaded is what this path or name stands for. Another name is not looked up: the linker
// takes any library of that SONAME for it, and so always the one that is there.
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
    *error = path + " is asked for, but this process has loaded " + loaded_path +
             ", and the dynamic linker can't give it a second libucp";
    return false;
  }
  // UCX would otherwise take over the process's handlers of SIGSEGV and others from its engine.
  const DefaultSetting no_handlers("UCX_HANDLE_ERRORS", "none");
  // And it logs to stdout, which is the engine's, whenever a peer or a stranger misbehaves.
  const DefaultSetting log_file("UCX_LOG_FILE", "stderr");
  const DefaultSetting log_level("UCX_LOG_LEVEL", "fatal");
  // Never closed: its threads and hooks may outlive every use of it.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *error = dlerror();
    return false;
  }
  if (!find_all(library, error)) return false;
  unsigned major, minor, release;
  api.get_version(&major, &minor, &release);
  if (major != kApiMajor || minor < kApiMinor) {
    *error = path_of(reinterpret_cast<void*>(api.get_version)) + " is UCX " + std::to_string(major) + "." +
             std::to_string(minor) + "; 1.13 or a later 1.x is needed";
    return false;
  }
  loaded_as = path;
  loaded_path = path_of(reinterpret_cast<void*>(api.get_version));
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

std::string Api::version() {
  const std::lock_guard lock(loading);
  if (!is_loaded) return {};
  unsigned major, minor, release;
  api.get_version(&major, &minor, &release);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

bool Api::is_at_least(unsigned minor) {
  const std::lock_guard lock(loading);
  if (!is_loaded) return false;
  unsigned major, loaded_minor, release;
  api.get_version(&major, &loaded_minor, &release);
  return loaded_minor >= minor;
}

}  // namespace p2pkv::ucx
