// What a build without the headers of verbs or UCX says of the transports it lacks. Empty where it has both.
#include <string>

#include "check.h"
#include "transports/transports.h"

using namespace p2pkv;

namespace {

[[maybe_unused]] bool says(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

#ifdef P2PKV_WITHOUT_VERBS
TEST(verbs_that_was_built_without_says_so_and_what_to_install) {
  CHECK(!has_verbs());
  std::string error;
  CHECK(verbs_ports(kVerbsLibrary, &error).empty());
  CHECK(says(error, "built without verbs") && says(error, "libibverbs-dev"));
  error.clear();
  CHECK(!make_verbs_transport({}, &error));
  CHECK(says(error, "built without verbs"));
}
#endif

#ifdef P2PKV_WITHOUT_UCX
TEST(ucx_that_was_built_without_says_so_and_what_to_install) {
  CHECK(says(ucx_missing("libucp.so.0"), "built without ucx") && says(ucx_missing(""), "libucx-cu12"));
  std::string error;
  CHECK(ucx_resources({}, &error).empty());
  CHECK(says(error, "built without ucx"));
  error.clear();
  CHECK(!make_ucx_transport({}, &error));
  CHECK(says(error, "built without ucx"));
}
#endif
