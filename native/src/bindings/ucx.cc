// Python's view of the ucx transport. p2pkv/transports/ucx.py adapts it to the interface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "transports/transports.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {

void bind_ucx(nb::module_& m) {
  m.def("ucx_missing", &ucx_missing, "library"_a);
  m.def("ucx_library", [] {
    const UcxLibrary library = ucx_library();
    return std::pair(library.path, library.version);
  });
  m.def(
      "ucx_resources",
      [](const std::string& host, bool trusts_network) {
        std::string error;
        auto resources = ucx_resources({host, "", trusts_network}, &error);
        if (resources.empty()) throw std::runtime_error(error);
        return resources;
      },
      "host"_a, "trusts_network"_a);
  m.def(
      "ucx_transport",
      [](const std::string& host, const std::string& advertise, bool trusts_network) {
        std::string error;
        std::shared_ptr<Transport> transport;
        {
          const nb::gil_scoped_release unlocked;  // UCX looks at every device
          transport = make_ucx_transport({host, advertise, trusts_network}, &error);
        }
        if (!transport) throw std::runtime_error(error);
        return transport;
      },
      "host"_a, "advertise"_a, "trusts_network"_a);
}

}  // namespace p2pkv
