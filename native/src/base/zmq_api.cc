#include "base/zmq_api.h"

#include <dlfcn.h>

namespace p2pkv {
namespace {

ZmqApi api;

template <typename Function>
bool find(void* library, const char* name, Function* out, std::string* error) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  if (*out != nullptr) return true;
  *error = std::string("the libzmq of pyzmq has no ") + name;
  return false;
}

}  // namespace

bool ZmqApi::load(const char* path, std::string* error) {
  // Never closed: the functions are used until the process ends.
  void* library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(path, RTLD_NOW);
  if (library == nullptr) {
    *error = std::string("cannot open ") + path + ": " + dlerror();
    return false;
  }
  api.generichash = reinterpret_cast<decltype(api.generichash)>(dlsym(library, "crypto_generichash"));
  api.aead_seal =
      reinterpret_cast<decltype(api.aead_seal)>(dlsym(library, "crypto_aead_chacha20poly1305_ietf_encrypt"));
  api.aead_open =
      reinterpret_cast<decltype(api.aead_open)>(dlsym(library, "crypto_aead_chacha20poly1305_ietf_decrypt"));
  return find(library, "zmq_msg_init", &api.msg_init, error) &&
         find(library, "zmq_msg_init_size", &api.msg_init_size, error) &&
         find(library, "zmq_msg_data", &api.msg_data, error) &&
         find(library, "zmq_msg_size", &api.msg_size, error) &&
         find(library, "zmq_msg_close", &api.msg_close, error) &&
         find(library, "zmq_msg_more", &api.msg_more, error) &&
         find(library, "zmq_msg_recv", &api.msg_recv, error) &&
         find(library, "zmq_msg_send", &api.msg_send, error) && find(library, "zmq_poll", &api.poll, error) &&
         find(library, "zmq_bind", &api.bind, error) && find(library, "zmq_unbind", &api.unbind, error) &&
         find(library, "zmq_errno", &api.zmq_errno, error);
}

const ZmqApi& ZmqApi::get() {
  return api;
}

}  // namespace p2pkv
