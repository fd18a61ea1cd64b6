// In place of the verbs transport, where its headers were not there when p2pkv was built.
#include "transports/transports.h"

namespace p2pkv {
namespace {

constexpr const char* kVerbsMissing =
    "this p2pkv was built without verbs: apt-get install libibverbs-dev (1.11.32 or newer), then install "
    "p2pkv again";

}  // namespace

bool has_verbs() {
  return false;
}

std::vector<VerbsPort> verbs_ports(const std::string&, std::string* error) {
  *error = kVerbsMissing;
  return {};
}

std::shared_ptr<Transport> make_verbs_transport(const VerbsOptions&, std::string* error) {
  *error = kVerbsMissing;
  return nullptr;
}

}  // namespace p2pkv
