// Python's view of the nccl transport. p2pkv/transports/nccl.py adapts it to the interface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "transports/transports.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {

void bind_nccl(nb::module_& m) {
  m.def("nccl_missing", &nccl_missing, "library"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("nccl_library", [] {
    const NcclLibrary library = nccl_library();
    return std::pair(library.path, library.version);
  });
  m.def(
      "nccl_transport",
      [](const std::string& host, const std::string& advertise, Ports ports, int device, int channels,
         int communicators) {
        std::string error;
        std::shared_ptr<Transport> transport;
        {
          const nb::gil_scoped_release unlocked;  // the driver sets up a context
          const ListenAt listen{host, advertise, {ports.first, ports.second}};
          transport = make_nccl_transport({listen, device, channels, communicators}, &error);
        }
        if (!transport) throw std::runtime_error(error);
        return transport;
      },
      "host"_a, "advertise"_a, "ports"_a, "device"_a, "channels"_a, "communicators"_a);
}

}  // namespace p2pkv
