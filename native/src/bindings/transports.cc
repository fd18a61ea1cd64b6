// Python's view of the native transports and of shared memory. p2pkv/transports/native.py adapts it to the
// interface.
#include "transports/transports.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "page/region.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using SpanArray = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using WordArray = nb::ndarray<const uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using StatusArray = nb::ndarray<nb::numpy, uint8_t, nb::shape<-1>, nb::c_contig>;
using ByteArray = nb::ndarray<nb::numpy, uint8_t, nb::shape<-1>, nb::c_contig>;

static_assert(sizeof(Span) == 3 * sizeof(int64_t) && sizeof(Word) == 2 * sizeof(uint64_t) &&
                  sizeof(Status) == 1,
              "rows of the arrays are copied as they are");

template <typename Row, typename Array>
std::vector<Row> to_rows(const Array& array) {
  std::vector<Row> rows(array.shape(0));
  if (!rows.empty()) std::memcpy(rows.data(), array.data(), rows.size() * sizeof(Row));
  return rows;
}

// Every refusal of the core is a RuntimeError with its reason; the adapter says what kind it is.
template <typename T>
T or_raise(T value, const std::string& error) {
  if (!value) throw std::runtime_error(error);
  return value;
}

nb::bytes to_bytes(const std::string& text) {
  return nb::bytes(text.data(), text.size());
}

std::string_view view(const nb::bytes& bytes) {
  return {static_cast<const char*>(bytes.data()), bytes.size()};
}

void bind_shared_region(nb::module_& m) {
  nb::class_<SharedRegion>(m, "SharedRegion", nb::is_final(),
                           "Memory that processes of this host and user can map to read it: a sealed memfd. "
                           "It goes with its last reference.\n\nPublic as ``p2pkv.SharedRegion``.")
      .def_static(
          "create",
          [](size_t nbytes) {
            std::string error;
            std::unique_ptr<SharedRegion> region;
            {
              const nb::gil_scoped_release unlocked;
              region = SharedRegion::create(nbytes, &error);
            }
            if (!region) {
              PyErr_SetString(PyExc_OSError, error.c_str());
              throw nb::python_error();
            }
            return region;
          },
          "nbytes"_a,
          "Make one of ``nbytes``, all touched; raise ``OSError`` if the memory is not to be had.")
      .def_prop_ro("address",
                   [](const SharedRegion& self) { return reinterpret_cast<uintptr_t>(self.base()); })
      .def_prop_ro("nbytes", &SharedRegion::nbytes)
      .def_prop_ro("fd", &SharedRegion::fd, "The memfd. It stays this object's.")
      .def_prop_ro(
          "array",
          [](nb::object self) {
            const auto& region = nb::cast<const SharedRegion&>(self);
            return ByteArray(region.base(), {region.nbytes()}, self);  // keeps the region alive
          },
          "``(nbytes,)``, writable; keeps this object alive.");
}

void bind_transfer(nb::module_& m) {
  nb::class_<Transfer>(m, "Transfer", nb::is_final(),
                       "A read that is under way. See p2pkv/transports/base.py.")
      .def("done", &Transfer::done, nb::call_guard<nb::gil_scoped_release>())
      .def("advance", &Transfer::advance, "timeout"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "wait",
          [](Transfer& self, double timeout) {
            {
              const nb::gil_scoped_release unlocked;
              self.wait(timeout);
            }
            const auto& statuses = self.statuses();
            auto* copy = new uint8_t[statuses.size()];
            if (!statuses.empty()) std::memcpy(copy, statuses.data(), statuses.size());
            nb::capsule owner(copy, [](void* at) noexcept { delete[] static_cast<uint8_t*>(at); });
            return StatusArray(copy, {statuses.size()}, owner);
          },
          "timeout"_a);
}

void bind_endpoint(nb::module_& m) {
  nb::class_<MemoryRegion>(m, "MemoryRegion", nb::is_final(),
                           "Memory of this process that a transport knows. See p2pkv/transports/base.py.")
      .def_prop_ro("address",
                   [](const MemoryRegion& self) { return reinterpret_cast<uintptr_t>(self.base()); })
      .def_prop_ro("nbytes", &MemoryRegion::nbytes)
      .def("describe", [](const MemoryRegion& self) { return to_bytes(self.describe()); })
      .def("close", &MemoryRegion::close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<RemoteRegion>(m, "RemoteRegion", nb::is_final(),
                           "A peer's memory, attached to an endpoint. See p2pkv/transports/base.py.")
      .def_prop_ro("nbytes", &RemoteRegion::nbytes);

  nb::class_<Endpoint>(m, "Endpoint", nb::is_final(),
                       "One end of a link to a peer, which reads from it. See p2pkv/transports/base.py.")
      .def("describe",
           [](Endpoint& self) {
             std::string blob, failure;
             {
               const nb::gil_scoped_release unlocked;
               blob = self.describe();
               if (blob.empty()) failure = self.failure();
             }
             if (!failure.empty()) throw std::runtime_error(failure);
             return to_bytes(blob);
           })
      .def(
          "bind",
          [](Endpoint& self, const nb::bytes& remote) {
            std::string error;
            bool is_bound;
            {
              const std::string_view blob = view(remote);
              const nb::gil_scoped_release unlocked;
              is_bound = self.bind(blob, &error);
            }
            or_raise(is_bound, error);
          },
          "remote"_a)
      .def(
          "attach",
          [](Endpoint& self, const nb::bytes& region) {
            std::string error;
            return or_raise(self.attach(view(region), &error), error);
          },
          "region"_a)
      .def(
          "read",
          [](Endpoint& self, std::shared_ptr<MemoryRegion> local, std::shared_ptr<RemoteRegion> remote,
             const SpanArray& spans, const std::optional<WordArray>& words) {
            auto span_rows = to_rows<Span>(spans);
            auto word_rows = words ? to_rows<Word>(*words) : std::vector<Word>();
            if (words && word_rows.size() != span_rows.size())
              throw nb::value_error("one word per span is needed");
            const nb::gil_scoped_release unlocked;
            return self.read(std::move(local), std::move(remote), std::move(span_rows), std::move(word_rows));
          },
          "local"_a, "remote"_a, "spans"_a.noconvert(), "words"_a.noconvert().none())
      .def("close", [](Endpoint& self) {
        const nb::gil_scoped_release unlocked;
        self.close();
      });
}

void bind_transport(nb::module_& m) {
  nb::class_<RailTotals>(m, "RailTotals", nb::is_final(), "What became of reads over a rail.")
      .def_ro("n_bytes", &RailTotals::n_bytes)
      .def_ro("n_broken", &RailTotals::n_broken)
      .def_ro("n_silent", &RailTotals::n_silent)
      .def_ro("n_late", &RailTotals::n_late)
      .def_ro("n_retried_bytes", &RailTotals::n_retried_bytes);

  nb::class_<Transport>(m, "Transport",
                        "A way to read from peers; refusals are RuntimeErrors with the reason. See "
                        "p2pkv/transports/base.py.")
      .def_prop_ro("domain", &Transport::domain)
      .def(
          "register_memory",
          [](Transport& self, uintptr_t address, uint64_t nbytes, int fd, bool readable) {
            std::string error;
            std::shared_ptr<MemoryRegion> region;
            {
              const nb::gil_scoped_release unlocked;  // locking gigabytes takes seconds
              region =
                  self.register_memory(reinterpret_cast<uint8_t*>(address), nbytes, fd, readable, &error);
            }
            return or_raise(std::move(region), error);
          },
          "address"_a, "nbytes"_a, "fd"_a, "readable"_a)
      .def("open", &Transport::open, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "accept",
          [](Transport& self, const nb::bytes& remote) {
            std::string error, blob;
            {
              const std::string_view half = view(remote);
              const nb::gil_scoped_release unlocked;
              blob = self.accept(half, &error);
            }
            if (blob.empty()) throw std::runtime_error(error);
            return to_bytes(blob);
          },
          "remote"_a)
      .def("rail_totals", &Transport::rail_totals)
      .def("n_forged", &Transport::n_forged)
      .def("close", &Transport::close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<TcpTransportBase, Transport>(m, "TcpTransport", nb::is_final(),
                                          "The one that listens at a TCP port.")
      .def_prop_ro("port", &TcpTransportBase::port);

  m.def("cuda_ipc_missing", &cuda_ipc_missing, nb::call_guard<nb::gil_scoped_release>());
  m.def("cuda_ipc_refusal", &cuda_ipc_refusal,
        "Why this process could not map a peer's device memory the last time; empty: that has not happened.");
  m.def("cuda_ipc_transport", [] {
    std::string error;
    return or_raise(make_cuda_ipc_transport(&error), error);
  });
  m.def("shm_transport", [] {
    std::string error;
    return or_raise(make_shm_transport(&error), error);
  });
  m.def(
      "tcp_transport",
      [](const std::string& host, Ports ports, uint32_t streams, const std::string& advertise,
         const std::vector<std::string>& addresses, bool encrypts, uint64_t rekey_after) {
        std::string error;
        std::shared_ptr<TcpTransportBase> transport;
        {
          const nb::gil_scoped_release unlocked;  // a host name may take its time
          const ListenAt listen{host, advertise, {ports.first, ports.second}};
          transport = make_tcp_transport({listen, streams, addresses, encrypts, rekey_after}, &error);
        }
        return or_raise(std::move(transport), error);
      },
      "host"_a = "127.0.0.1", "ports"_a = Ports{0, 0}, "streams"_a = 0, "advertise"_a = "",
      "addresses"_a = std::vector<std::string>(), "encrypts"_a = false,
      "rekey_after"_a = RecordCipher::kRekeyAfter);
  m.def("encryption_missing", &encryption_missing);
  m.def("encryption_library", &encryption_library);
}

void bind_verbs(nb::module_& m) {
  nb::class_<VerbsPort>(m, "VerbsPort", nb::is_final(),
                        "One port of an RDMA device; ``missing`` is empty if it can be used.")
      .def_ro("device", &VerbsPort::device)
      .def_ro("port", &VerbsPort::port)
      .def_ro("link", &VerbsPort::link)
      .def_ro("state", &VerbsPort::state)
      .def_ro("gid", &VerbsPort::gid)
      .def_ro("mtu", &VerbsPort::mtu)
      .def_ro("numa_node", &VerbsPort::numa_node)
      .def_ro("missing", &VerbsPort::missing);

  m.attr("HAS_VERBS") = has_verbs();
  m.attr("VERBS_LIBRARY") = kVerbsLibrary;
  m.def(
      "verbs_ports",
      [](const std::string& library) {
        std::string error;
        std::vector<VerbsPort> ports;
        {
          const nb::gil_scoped_release unlocked;
          ports = verbs_ports(library, &error);
        }
        or_raise(!ports.empty(), error);
        return ports;
      },
      "library"_a);
  m.def(
      "verbs_transport",
      [](const std::vector<std::string>& devices, const std::string& library, bool reaches_devices) {
        std::string error;
        std::shared_ptr<Transport> transport;
        {
          const nb::gil_scoped_release unlocked;
          transport = make_verbs_transport({devices, library, reaches_devices}, &error);
        }
        return or_raise(std::move(transport), error);
      },
      "devices"_a, "library"_a, "reaches_devices"_a,
      "Raises ``RuntimeError`` in a build without verbs, where ``HAS_VERBS`` is false: its headers were "
      "missing.");
}

}  // namespace

void bind_transports(nb::module_& m) {
  bind_shared_region(m);
  bind_transfer(m);
  bind_endpoint(m);
  bind_transport(m);
  bind_verbs(m);
}

}  // namespace p2pkv
