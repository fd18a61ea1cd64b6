// Stands in for the ucx transport where there were no headers of UCX to build it with.
#include "p2pkv/transports.h"

namespace p2pkv {
namespace {

constexpr const char* kMissing =
    "this build of p2pkv has no ucx: install libucx-cu12 (for its headers) and build again";

}  // namespace

std::string ucx_missing(const std::string&) {
  return kMissing;
}

UcxLibrary ucx_library() {
  return {};
}

std::vector<std::string> ucx_resources(const UcxOptions&, std::string* error) {
  *error = kMissing;
  return {};
}

std::shared_ptr<Transport> make_ucx_transport(const UcxOptions&, std::string* error) {
  *error = kMissing;
  return nullptr;
}

}  // namespace p2pkv
