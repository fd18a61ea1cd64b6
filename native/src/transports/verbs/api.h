// libibverbs, loaded at run time: a machine without it runs everything but verbs.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>

namespace p2pkv::verbs {

// The functions that are not inline in the header. Two are declared here since the header hides them behind
// macros or private names.
struct Api {
  decltype(&::ibv_fork_init) fork_init;
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  ssize_t (*query_gid_table)(ibv_context*, ibv_gid_entry*, size_t, uint32_t, size_t);
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  decltype(&::ibv_dereg_mr) dereg_mr;
  // Null before rdma-core 34.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t offset, size_t nbytes, uint64_t address, int fd, int access);
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_wc_status_str) wc_status_str;

  // Of that library: a path, or a name that the loader knows. Each is loaded once a process, for good. Null,
  // with what is missing in `error`.
  static const Api* get(const std::string& library, std::string* error);
};

// Works with every libibverbs that Api accepts; 0 or an errno.
int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes);

}  // namespace p2pkv::verbs
