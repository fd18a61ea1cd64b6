#include "transports/ucx/api.h"

#include <stdlib.h>

#include <mutex>

#include "base/runtime_library.h"

namespace p2pkv::ucx {
namespace {

RuntimeLibrary library("libucp", "UCX 1.13 or later");
Api api;  // guarded by the library's mutex until it is loaded

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

bool find_all(std::string* error) {
  return library.find("ucp_get_version", &api.get_version, error) &&
         library.find("ucp_init_version", &api.init_version, error) &&
         library.find("ucp_cleanup", &api.cleanup, error) &&
         library.find("ucp_config_read", &api.config_read, error) &&
         library.find("ucp_config_modify", &api.config_modify, error) &&
         library.find("ucp_config_release", &api.config_release, error) &&
         library.find("ucp_context_print_info", &api.context_print_info, error) &&
         library.find("ucp_worker_create", &api.worker_create, error) &&
         library.find("ucp_worker_destroy", &api.worker_destroy, error) &&
         library.find("ucp_worker_progress", &api.worker_progress, error) &&
         library.find("ucp_worker_get_efd", &api.worker_get_efd, error) &&
         library.find("ucp_worker_arm", &api.worker_arm, error) &&
         library.find("ucp_worker_set_am_recv_handler", &api.worker_set_am_recv_handler, error) &&
         library.find("ucp_worker_get_address", &api.worker_get_address, error) &&
         library.find("ucp_worker_release_address", &api.worker_release_address, error) &&
         library.find("ucp_ep_create", &api.ep_create, error) &&
         library.find("ucp_ep_flush_nbx", &api.ep_flush_nbx, error) &&
         library.find("ucp_ep_close_nbx", &api.ep_close_nbx, error) &&
         library.find("ucp_am_send_nbx", &api.am_send_nbx, error) &&
         library.find("ucp_request_check_status", &api.request_check_status, error) &&
         library.find("ucp_request_free", &api.request_free, error) &&
         library.find("ucs_status_string", &api.status_string, error);
}

}  // namespace

bool Api::load(const std::string& path, std::string* error) {
  const std::lock_guard lock(library.mutex);
  if (library.is_loaded()) {
    if (library.is_what_is_loaded(path)) return true;
    *error = path + " is asked for, but this process has loaded " + library.path() +
             ", and the dynamic linker can't give it a second libucp";
    return false;
  }
  // UCX would otherwise take over the process's handlers of SIGSEGV and others from its engine.
  const DefaultSetting no_handlers("UCX_HANDLE_ERRORS", "none");
  // And it logs to stdout, which is the engine's, whenever a peer or a stranger misbehaves.
  const DefaultSetting log_file("UCX_LOG_FILE", "stderr");
  const DefaultSetting log_level("UCX_LOG_LEVEL", "fatal");
  if (!library.open(path, error) || !find_all(error)) return false;
  unsigned major, minor, release;
  api.get_version(&major, &minor, &release);
  if (major != kApiMajor || minor < kApiMinor) {
    *error = RuntimeLibrary::file_of(reinterpret_cast<void*>(api.get_version)) + " is UCX " +
             std::to_string(major) + "." + std::to_string(minor) + "; 1.13 or a later 1.x is needed";
    return false;
  }
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

std::string Api::version() {
  const std::lock_guard lock(library.mutex);
  if (!library.is_loaded()) return {};
  unsigned major, minor, release;
  api.get_version(&major, &minor, &release);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

bool Api::is_at_least(unsigned minor) {
  const std::lock_guard lock(library.mutex);
  if (!library.is_loaded()) return false;
  unsigned major, loaded_minor, release;
  api.get_version(&major, &loaded_minor, &release);
  return loaded_minor >= minor;
}

}  // namespace p2pkv::ucx
