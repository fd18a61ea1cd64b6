// libucp, found at run time: the machine's own (it has the NIC's transports), or the one of a wheel.
//
// Compiled against the headers of a recent UCX and run with 1.13 and later. Three rules keep that sound: only
// functions and field-mask bits of 1.13 are used, so that an older library neither misses nor reads past
// anything; inline functions that call into the library (ucp_init) are not used; and the library is told that
// it is asked for the API of kApiMinor.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace p2pkv::ucx {

struct Api {
  static constexpr unsigned kApiMajor = 1;
  static constexpr unsigned kApiMinor = 13;

  decltype(&ucp_get_version) get_version;
  decltype(&ucp_init_version) init_version;
  decltype(&ucp_cleanup) cleanup;
  decltype(&ucp_config_read) config_read;
  decltype(&ucp_config_modify) config_modify;
  decltype(&ucp_config_release) config_release;
  decltype(&ucp_context_print_info) context_print_info;
  decltype(&ucp_worker_create) worker_create;
  decltype(&ucp_worker_destroy) worker_destroy;
  decltype(&ucp_worker_progress) worker_progress;
  decltype(&ucp_worker_get_efd) worker_get_efd;
  decltype(&ucp_worker_arm) worker_arm;
  decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler;
  decltype(&ucp_worker_get_address) worker_get_address;
  decltype(&ucp_worker_release_address) worker_release_address;
  decltype(&ucp_ep_create) ep_create;
  decltype(&ucp_ep_flush_nbx) ep_flush_nbx;
  decltype(&ucp_ep_close_nbx) ep_close_nbx;
  decltype(&ucp_am_send_nbx) am_send_nbx;
  decltype(&ucp_request_check_status) request_check_status;
  decltype(&ucp_request_free) request_free;
  decltype(&ucs_status_string) status_string;

  // Opens the library at `path`, or by a bare name wherever the loader finds it. A process has one: its
  // libuct and libucs are known to the linker by name alone, so that a second libucp would find the first
  // one's. Once one is loaded, true for that one and false for any other, with the reason in `error`.
  static bool load(const std::string& path, std::string* error);
  // `load` must have succeeded.
  static const Api& get();
  // The file that was loaded; empty before.
  static std::string path();
  // "1.22.0"; empty before.
  static std::string version();
  // Whether what was loaded is 1.`minor` or later.
  static bool is_at_least(unsigned minor);
};

}  // namespace p2pkv::ucx
