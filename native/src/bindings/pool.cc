#include "bindings.h"

namespace p2pkv {

void bind_pool(nanobind::module_& m) {}

}  // namespace p2pkv
