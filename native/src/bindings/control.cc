#include "bindings.h"

namespace p2pkv {

void bind_control(nanobind::module_& m) {}

}  // namespace p2pkv
