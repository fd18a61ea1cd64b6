// Bindings of what answers peers: ZAP and the control loop.

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "control/control_loop.h"
#include "control/handshake_monitor.h"
#include "control/refusals.h"
#include "control/zap.h"
#include "directory/server.h"
#include "disk/tier.h"
#include "offers/transfers.h"
#include "pool/guests.h"
#include "transports/transport.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

// Keeps the Python socket alive while a native thread uses it.
template <typename T>
struct WithSocket {
  nb::object socket;
  std::unique_ptr<T> native;
};
using BoundZap = WithSocket<ZapHandler>;
using BoundMonitor = WithSocket<HandshakeMonitor>;
using BoundLoop = WithSocket<ControlLoop>;

void* socket_handle(const nb::object& socket) {
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(socket.attr("underlying")));
}

std::string string_of(const nb::bytes& bytes) {
  return {bytes.c_str(), bytes.size()};
}
nb::bytes bytes_of(const std::string& text) {
  return nb::bytes(text.data(), text.size());
}

std::optional<std::pair<nb::bytes, nb::bytes>> event_of(const std::optional<ControlEvent>& event) {
  if (!event) return std::nullopt;
  return std::pair(bytes_of(event->route), bytes_of(event->body));
}

void bind_zap(nb::module_& m) {
  m.def(
      "load_zmq",
      [](const std::string& path) {
        std::string error;
        if (!ZmqApi::load(path.c_str(), &error)) throw std::runtime_error(error);
      },
      "path"_a);
  nb::class_<Refusals>(m, "Refusals", "Who was not let in. See native/src/control/refusals.h.")
      .def(nb::init<>())
      .def_prop_ro("count", &Refusals::count)
      .def("note", &Refusals::note, "host"_a)
      .def(
          "take",
          [](Refusals& self, double timeout) -> std::optional<std::pair<uint64_t, std::vector<std::string>>> {
            nb::gil_scoped_release release;
            auto report = self.take(timeout);
            if (!report) return std::nullopt;
            return std::pair(report->count, std::move(report->hosts));
          },
          "timeout"_a)
      .def("wake", &Refusals::wake);
  nb::class_<BoundMonitor>(
      m, "HandshakeMonitor",
      "Counts failed handshakes in a thread of its own. See native/src/control/handshake_monitor.h.")
      .def(
          "__init__",
          [](BoundMonitor* self, nb::object socket, std::shared_ptr<Refusals> refusals) {
            void* handle = socket_handle(socket);
            new (self) BoundMonitor{std::move(socket),
                                    std::make_unique<HandshakeMonitor>(handle, std::move(refusals))};
          },
          "socket"_a, "refusals"_a)
      .def("stop",
           [](BoundMonitor& self) {
             nb::gil_scoped_release release;
             self.native->stop();
           })
      .def_ro_static("EVENTS", &HandshakeMonitor::kEvents);
  nb::class_<BoundZap>(m, "ZapHandler",
                       "Decides in a thread of its own whose keys may connect. See native/src/control/zap.h.")
      .def(
          "__init__",
          [](BoundZap* self, nb::object socket, const std::string& domain,
             const std::vector<nb::bytes>& admitted, std::shared_ptr<Refusals> refusals) {
            std::vector<std::string> keys;
            for (const nb::bytes& key : admitted) keys.push_back(string_of(key));
            void* handle = socket_handle(socket);
            new (self) BoundZap{std::move(socket), std::make_unique<ZapHandler>(
                                                       handle, domain, std::move(keys), std::move(refusals))};
          },
          "socket"_a, "domain"_a, "admitted"_a, "refusals"_a)
      .def("stop", [](BoundZap& self) {
        nb::gil_scoped_release release;
        self.native->stop();
      });
}

void bind_loop(nb::module_& m) {
  nb::class_<BoundLoop>(
      m, "ControlLoop",
      "Answers peers' control messages in a thread of its own. See native/src/control/control_loop.h.")
      .def(
          "__init__",
          [](BoundLoop* self, nb::object socket, std::shared_ptr<Shard> shard,
             std::shared_ptr<NamespaceEpochs> epochs) {
            void* handle = socket_handle(socket);
            new (self) BoundLoop{std::move(socket),
                                 std::make_unique<ControlLoop>(handle, std::move(shard), std::move(epochs))};
          },
          "socket"_a, "shard"_a, "epochs"_a)
      .def("start", [](BoundLoop& self) { self.native->start(); })
      .def("stop",
           [](BoundLoop& self) {
             nb::gil_scoped_release release;
             self.native->stop();
           })
      .def(
          "announce",
          [](BoundLoop& self, uint64_t node_key, uint64_t boot) { self.native->announce(node_key, boot); },
          "node_key"_a, "boot"_a)
      .def("withdraw", [](BoundLoop& self) { self.native->withdraw(); })
      .def(
          "set_view",
          [](BoundLoop& self, const nb::bytes& view, uint64_t digest) {
            self.native->set_view(string_of(view), digest);
          },
          "view"_a, "digest"_a)
      .def(
          "set_routers",
          [](BoundLoop& self, const nb::bytes& routers) { self.native->set_routers(string_of(routers)); },
          "routers"_a)
      .def(
          "serve",
          [](BoundLoop& self, const std::string& name, std::shared_ptr<Transport> transport,
             const nb::bytes& regions) {
            self.native->serve(name, std::move(transport), string_of(regions));
          },
          "name"_a, "transport"_a.none(), "regions"_a)
      .def(
          "serve_directory",
          [](BoundLoop& self, std::shared_ptr<DirectoryServer> server) {
            self.native->serve_directory(std::move(server));
          },
          "server"_a)
      .def(
          "serve_transfers",
          [](BoundLoop& self, std::shared_ptr<Transfers> transfers) {
            self.native->serve("transfers", std::move(transfers), {});
          },
          "transfers"_a)
      .def(
          "serve_promotions",
          [](BoundLoop& self, std::shared_ptr<Tier> tier) { self.native->serve_promotions(std::move(tier)); },
          "tier"_a.none())
      .def(
          "serve_guests",
          [](BoundLoop& self, std::shared_ptr<Guests> guests) {
            self.native->serve_guests(std::move(guests));
          },
          "guests"_a.none())
      .def("await_guests", [](BoundLoop& self) { self.native->await_guests(); })
      .def(
          "unbind",
          [](BoundLoop& self, const std::string& address) {
            nb::gil_scoped_release release;
            return self.native->unbind(address);
          },
          "address"_a)
      .def(
          "bind",
          [](BoundLoop& self, const std::string& address) {
            nb::gil_scoped_release release;
            return self.native->bind(address);
          },
          "address"_a)
      .def(
          "take",
          [](BoundLoop& self, uint16_t kind, double timeout) {
            std::optional<ControlEvent> event;
            {
              nb::gil_scoped_release release;
              event = self.native->take(static_cast<wire::Kind>(kind), timeout);
            }
            return event_of(event);
          },
          "kind"_a, "timeout"_a)
      .def(
          "wake", [](BoundLoop& self, uint16_t kind) { self.native->wake(static_cast<wire::Kind>(kind)); },
          "kind"_a)
      .def(
          "reply",
          [](BoundLoop& self, const nb::bytes& route, uint32_t status, const nb::bytes& body) {
            self.native->reply(string_of(route), static_cast<wire::ReplyStatus>(status), string_of(body));
          },
          "route"_a, "status"_a, "body"_a)
      .def("stats", [](BoundLoop& self) -> Counts {
        const auto stats = self.native->stats();
        nb::dict out;
        out["requests"] = stats.requests;
        out["malformed"] = stats.malformed;
        out["dropped_events"] = stats.dropped_events;
        out["queued_events"] = stats.queued_events;
        return out;
      });
}

}  // namespace

void bind_control(nb::module_& m) {
  bind_zap(m);
  bind_loop(m);
}

}  // namespace p2pkv
