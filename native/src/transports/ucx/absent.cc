// Stands in for the ucx transport where there were no headers of UCX to build it with.
#include "transports/transports.h"

namespace p2pkv {
namespace {

constexpr const char* kUcxMissing =
    "this p2pkv was built without ucx: pip install libucx-cu12 (for its headers), then install p2pkv again";

}  // namespace

std::string ucx_missing(const std::string&) {
  return kUcxMissing;
}

UcxLibrary ucx_library() {
  return {};
}

std::vector<std::string> ucx_resources(const UcxOptions&, std::string* error) {
  *error = kUcxMissing;
  return {};
}

std::shared_ptr<Transport> make_ucx_transport(const UcxOptions&, std::string* error) {
  *error = kUcxMissing;
  return nullptr;
}

}  // namespace p2pkv
