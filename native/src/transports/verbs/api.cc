#include "transports/verbs/api.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

namespace p2pkv::verbs {
namespace {

struct Loaded {
  Api api{};
  std::string error;
};

template <typename Function>
void find(void* library, const char* name, Function* function, std::string* error) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && error->empty()) {
    *error = std::string("has no ") + name + "; install rdma-core 32 or newer";
  }
}

Loaded load(const std::string& name) {
  Loaded loaded;
  Api& api = loaded.api;
  std::string* error = &loaded.error;
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *error = name + " not found; apt-get install libibverbs1 ibverbs-providers (rdma-core)";
    return loaded;
  }
  find(library, "ibv_fork_init", &api.fork_init, error);
  find(library, "ibv_get_device_list", &api.get_device_list, error);
  find(library, "ibv_free_device_list", &api.free_device_list, error);
  find(library, "ibv_get_device_name", &api.get_device_name, error);
  find(library, "ibv_open_device", &api.open_device, error);
  find(library, "ibv_close_device", &api.close_device, error);
  find(library, "ibv_query_device", &api.query_device, error);
  find(library, "_ibv_query_gid_table", &api.query_gid_table, error);
  find(library, "ibv_alloc_pd", &api.alloc_pd, error);
  find(library, "ibv_dealloc_pd", &api.dealloc_pd, error);
  find(library, "ibv_reg_mr", &api.reg_mr, error);
  find(library, "ibv_dereg_mr", &api.dereg_mr, error);
  std::string ignored;
  find(library, "ibv_reg_dmabuf_mr", &api.reg_dmabuf_mr, &ignored);
  find(library, "ibv_create_comp_channel", &api.create_comp_channel, error);
  find(library, "ibv_destroy_comp_channel", &api.destroy_comp_channel, error);
  find(library, "ibv_create_cq", &api.create_cq, error);
  find(library, "ibv_destroy_cq", &api.destroy_cq, error);
  find(library, "ibv_get_cq_event", &api.get_cq_event, error);
  find(library, "ibv_ack_cq_events", &api.ack_cq_events, error);
  find(library, "ibv_create_qp", &api.create_qp, error);
  find(library, "ibv_modify_qp", &api.modify_qp, error);
  find(library, "ibv_destroy_qp", &api.destroy_qp, error);
  find(library, "ibv_wc_status_str", &api.wc_status_str, error);
  if (!error->empty()) *error = name + " " + *error;
  // Before anything else of the library. Without it a fork() of this process makes its memory and what the
  // device writes to part ways: reads would be called good whose bytes never arrived.
  if (error->empty() && api.fork_init() != 0) {
    *error = std::string("ibv_fork_init failed: ") + std::strerror(errno);
  }
  return loaded;
}

}  // namespace

const Api* Api::get(const std::string& library, std::string* error) {
  static std::mutex loading;  // guards what follows, whose entries stay where they are
  static auto& known = *new std::map<std::string, Loaded>;
  const std::lock_guard lock(loading);
  auto at = known.find(library);
  if (at == known.end()) at = known.emplace(library, load(library)).first;
  if (at->second.error.empty()) return &at->second.api;
  *error = at->second.error;
  return nullptr;
}

int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  verbs_context* extended = verbs_get_ctx_op(context, query_port);
  return extended ? extended->query_port(context, port, attributes, sizeof *attributes) : ENOSYS;
}

}  // namespace p2pkv::verbs
