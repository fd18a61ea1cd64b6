#include "bindings.h"

namespace p2pkv {

void bind_transports(nanobind::module_& m) {}

}  // namespace p2pkv
