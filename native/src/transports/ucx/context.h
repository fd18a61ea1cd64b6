// A UCX context: which transports and devices are used. Shared by the workers of one transport.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transports/ucx/api.h"

namespace p2pkv::ucx {

// Settings of UCX by their names without UCX_.
using Settings = std::vector<std::pair<std::string, std::string>>;

class Context {
 public:
  // Null, with the reason in `error`.
  static std::shared_ptr<Context> make(const Settings& settings, std::string* error);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  ucp_context_h get() const { return context_; }
  // What UCX says of itself.
  std::string report() const;

 private:
  explicit Context(ucp_context_h context) : context_(context) {}
  const ucp_context_h context_;
};

}  // namespace p2pkv::ucx
