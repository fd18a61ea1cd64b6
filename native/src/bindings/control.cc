// Bindings of what answers and plans: ZAP, the control loop, the shard, and the per-page work of a call.

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "arrays.h"
#include "bindings.h"
#include "p2pkv/control_loop.h"
#include "p2pkv/page_plan.h"
#include "p2pkv/zap.h"

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

nb::object event_of(const std::optional<ControlEvent>& event) {
  if (!event) return nb::none();
  return nb::make_tuple(bytes_of(event->route), bytes_of(event->body));
}

void bind_zap(nb::module_& m) {
  m.def(
      "load_zmq",
      [](const std::string& path) {
        std::string error;
        if (!ZmqApi::load(path.c_str(), &error)) throw std::runtime_error(error);
      },
      "path"_a);
  nb::class_<BoundZap>(m, "ZapHandler")
      .def(
          "__init__",
          [](BoundZap* self, nb::object socket, const std::string& domain,
             const std::vector<nb::bytes>& admitted) {
            std::vector<std::string> keys;
            for (const nb::bytes& key : admitted) keys.push_back(string_of(key));
            void* handle = socket_handle(socket);
            new (self)
                BoundZap{std::move(socket), std::make_unique<ZapHandler>(handle, domain, std::move(keys))};
          },
          "socket"_a, "domain"_a, "admitted"_a)
      .def("stop",
           [](BoundZap& self) {
             nb::gil_scoped_release release;
             self.native->stop();
           })
      .def_prop_ro("refused", [](BoundZap& self) { return self.native->refused(); });
}

void bind_shard(nb::module_& m) {
  nb::class_<Shard>(m, "Shard")
      .def(nb::init<uint64_t>(), "max_entries"_a)
      .def(
          "get",
          [](Shard& self, const AnyArray& keys) {
            const Key* rows = require_keys(keys);
            const size_t n = keys.shape(0);
            std::vector<uint8_t> found(n);
            std::vector<Location> locations(n);
            {
              nb::gil_scoped_release release;
              self.get(rows, n, found.data(), locations.data());
            }
            return nb::make_tuple(give<uint8_t>(std::move(found), {n}),
                                  give<uint8_t>(std::move(locations), {n, sizeof(Location)}));
          },
          "keys"_a)
      .def(
          "put",
          [](Shard& self, const nb::bytes& entries) {
            if (entries.size() % sizeof(wire::PutEntry) != 0)
              throw nb::value_error("entries have a wrong length");
            std::vector<wire::PutEntry> copies(entries.size() / sizeof(wire::PutEntry));
            std::memcpy(static_cast<void*>(copies.data()), entries.c_str(), entries.size());
            nb::gil_scoped_release release;
            return self.put(copies.data(), copies.size(), steady_seconds());
          },
          "entries"_a)
      .def(
          "drop",
          [](Shard& self, const nb::bytes& entries) {
            if (entries.size() % sizeof(wire::DropEntry) != 0)
              throw nb::value_error("entries have a wrong length");
            std::vector<wire::DropEntry> copies(entries.size() / sizeof(wire::DropEntry));
            std::memcpy(static_cast<void*>(copies.data()), entries.c_str(), entries.size());
            nb::gil_scoped_release release;
            self.drop(copies.data(), copies.size(), steady_seconds());
          },
          "entries"_a)
      .def(
          "set_view",
          [](Shard& self, const std::vector<uint64_t>& owners, const std::vector<uint64_t>& boots) {
            if (owners.size() != boots.size()) throw nb::value_error("owners and boots differ in length");
            self.set_view(owners.data(), boots.data(), owners.size());
          },
          "owners"_a, "boots"_a)
      .def("stats", [](Shard& self) {
        const auto stats = self.stats();
        nb::dict out;
        out["entries"] = stats.entries;
        out["tombstones"] = stats.tombstones;
        out["nbytes"] = stats.nbytes;
        return out;
      });
}

void bind_loop(nb::module_& m) {
  nb::class_<BoundLoop>(m, "ControlLoop")
      .def(
          "__init__",
          [](BoundLoop* self, nb::object socket, std::shared_ptr<Shard> shard) {
            void* handle = socket_handle(socket);
            new (self) BoundLoop{std::move(socket), std::make_unique<ControlLoop>(handle, std::move(shard))};
          },
          "socket"_a, "shard"_a)
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
          "serve",
          [](BoundLoop& self, const std::string& name, std::shared_ptr<Transport> transport,
             const nb::bytes& regions) {
            self.native->serve(name, std::move(transport), string_of(regions));
          },
          "name"_a, "transport"_a.none(), "regions"_a)
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
      .def("stats", [](BoundLoop& self) {
        const auto stats = self.native->stats();
        nb::dict out;
        out["requests"] = stats.requests;
        out["malformed"] = stats.malformed;
        out["dropped_events"] = stats.dropped_events;
        return out;
      });
}

// BLAKE2b of (namespace digest, key string). None where libsodium is not bundled: Python then falls back to
// hashlib.
nb::object hash_keys(const nb::bytes& prefix, nb::sequence keys) {
  const ZmqApi& zmq = ZmqApi::get();
  if (zmq.generichash == nullptr) return nb::none();
  const size_t n = nb::len(keys);
  std::vector<Key> out(n);
  std::string message(prefix.c_str(), prefix.size());
  for (size_t i = 0; i < n; ++i) {
    const nb::object key = keys[i];
    message.resize(prefix.size());
    Py_ssize_t size = 0;
    if (PyUnicode_Check(key.ptr())) {
      const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
      if (text == nullptr) throw nb::python_error();
      message.append(text, static_cast<size_t>(size));
    } else if (PyBytes_Check(key.ptr())) {
      message.append(PyBytes_AS_STRING(key.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(key.ptr())));
    } else {
      throw nb::type_error(("key " + std::to_string(i) + " is neither str nor bytes").c_str());
    }
    zmq.generichash(out[i].bytes, sizeof(Key), reinterpret_cast<const unsigned char*>(message.data()),
                    message.size(), nullptr, 0);
  }
  return nb::cast(give<uint8_t>(std::move(out), {n, sizeof(Key)}));
}

nb::tuple locate(const AnyArray& pieces, const AnyArray& regions) {
  const auto* of_pages =
      reinterpret_cast<const Piece*>(require<int64_t>(pieces, "pieces", {kAnySize, kAnySize, 2}));
  const auto* rows = reinterpret_cast<const Registered*>(require<int64_t>(regions, "regions", {kAnySize, 2}));
  const size_t n = pieces.shape(0);
  std::vector<int32_t> region_of(n);
  std::vector<int64_t> length_of(n);
  locate_pages(of_pages, n, pieces.shape(1), {rows, rows + regions.shape(0)}, region_of.data(),
               length_of.data());
  return nb::make_tuple(give<int32_t>(std::move(region_of), {n}), give<int64_t>(std::move(length_of), {n}));
}

nb::tuple plan(const AnyArray& pieces, const AnyArray& locations, const AnyArray& rows, int64_t base) {
  const auto* of_pages =
      reinterpret_cast<const Piece*>(require<int64_t>(pieces, "pieces", {kAnySize, kAnySize, 2}));
  const auto* where = reinterpret_cast<const Location*>(
      require<uint8_t>(locations, "locations", {kAnySize, static_cast<int64_t>(sizeof(Location))}));
  const auto* chosen = require<int64_t>(rows, "rows", {kAnySize});
  if (locations.shape(0) != pieces.shape(0)) throw nb::value_error("pieces and locations differ in length");
  const std::vector<int64_t> pages(chosen, chosen + rows.shape(0));
  for (const int64_t page : pages) {
    if (page < 0 || static_cast<size_t>(page) >= pieces.shape(0)) throw nb::index_error("row out of range");
  }
  const size_t n_spans = pages.size() * pieces.shape(1);
  std::vector<Span> spans(n_spans);
  std::vector<Word> words(n_spans);
  plan_reads(of_pages, pieces.shape(1), where, pages, base, spans.data(), words.data());
  return nb::make_tuple(give<int64_t>(std::move(spans), {n_spans, 3}),
                        give<uint64_t>(std::move(words), {n_spans, 2}));
}

void bind_page_plan(nb::module_& m) {
  m.def("hash_keys", &hash_keys, "prefix"_a, "keys"_a);
  m.def(
      "find_duplicate",
      [](const AnyArray& keys) { return find_duplicate(require_keys(keys), keys.shape(0)); }, "keys"_a);
  m.def("locate_pages", &locate, "pieces"_a, "regions"_a);
  m.def("plan_reads", &plan, "pieces"_a, "locations"_a, "rows"_a, "base"_a);
}

}  // namespace

void bind_control(nb::module_& m) {
  bind_zap(m);
  bind_shard(m);
  bind_loop(m);
  bind_page_plan(m);
}

}  // namespace p2pkv
