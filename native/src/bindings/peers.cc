// Bindings of the peer layer: its connections, and the local memory that is read into. Opening a connection
// calls back into Python, where handshakes and logs are; nothing else of a read does, but for transports that
// are written there.
#include "bindings/peers.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python_transport.h"
#include "peers/peer_connections.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

// The opener is told of an exception that no call waits for.
void tell_failed(const HeldObject& opener, std::exception_ptr error) {
  const nb::gil_scoped_acquire locked;
  nb::object raised;
  try {
    std::rethrow_exception(std::move(error));
  } catch (nb::python_error& python) {
    raised = nb::borrow(python.value());
  } catch (const std::exception& native) {
    raised = nb::borrow(PyExc_RuntimeError)(native.what());
  }
  try {
    opener.get().attr("failed")(raised);
  } catch (nb::python_error& python) {
    python.discard_as_unraisable("logging that a peer can't be connected to");
  }
}

PeerConnections::Hooks hooks_of(nb::object object) {
  const auto opener = std::make_shared<HeldObject>(std::move(object));
  PeerConnections::Hooks hooks;
  hooks.open = [opener](PeerId peer, size_t way, const Deadline& deadline) -> Opened {
    const nb::gil_scoped_acquire locked;
    const std::chrono::duration<double> left = deadline.at() - Deadline::Clock::now();
    const nb::object opened = opener->get().attr("open")(peer.key, peer.boot, way, left.count());
    if (opened.is_none()) return {};
    const auto pair = nb::cast<nb::tuple>(opened);
    return as_opened(pair[0], pair[1]);
  };
  hooks.scratch = [opener](size_t way) {
    const nb::gil_scoped_acquire locked;
    return as_region(nb::object(opener->get().attr("scratch")(way)));
  };
  hooks.fell_back = [opener](PeerId peer, size_t way, PeerConnections::FallBack why, bool is_first) {
    const nb::gil_scoped_acquire locked;
    opener->get().attr("fell_back")(peer.key, way, static_cast<int>(why), is_first);
  };
  hooks.failed = [opener](std::exception_ptr error) { tell_failed(*opener, std::move(error)); };
  return hooks;
}

// Python alone holds the connections. They wait for threads that may want the interpreter, and a forked child
// has none of the threads.
struct DeletePeers {
  pid_t pid = getpid();
  void operator()(PeerConnections* peers) const {
    if (getpid() != pid) return;
    const nb::gil_scoped_release unlocked;
    delete peers;
  }
};

using LocalMemoryTuple = std::tuple<int64_t, int64_t, bool, std::vector<nb::object>>;
using MemberTuple = std::tuple<uint64_t, uint64_t, bool, std::vector<size_t>>;

void change(PeerConnections& self, const std::vector<MemberTuple>& changed,
            const std::vector<uint64_t>& gone) {
  std::vector<PeerConnections::Member> members;
  for (const auto& [key, boot, is_healthy, ways] : changed) {
    for (const size_t way : ways) {
      if (way >= self.n_ways()) throw nb::index_error("there is no transport of that number");
    }
    members.push_back({{key, boot}, is_healthy, ways});
  }
  const nb::gil_scoped_release unlocked;
  self.change(members, gone);
}

// Of each peer and transport: its key, the transport's number, pages, bytes, seconds, and late reads.
using PeerTraffic = std::tuple<uint64_t, size_t, uint64_t, uint64_t, double, uint64_t>;

std::vector<PeerTraffic> traffic(const PeerConnections& self) {
  std::vector<PeerTraffic> all;
  const nb::gil_scoped_release unlocked;
  for (const auto& [peer, way, amount] : self.traffic()) {
    all.emplace_back(peer, way, amount.n_pages, amount.nbytes, amount.seconds, amount.n_late);
  }
  return all;
}

}  // namespace

void bind_peers(nb::module_& m) {
  nb::class_<LocalMemories>(m, "LocalMemories")
      .def(
          "__init__",
          [](LocalMemories* self, const std::vector<LocalMemoryTuple>& memories) {
            std::vector<LocalMemory> all;
            for (const auto& [address, nbytes, is_writable_host, regions] : memories) {
              LocalMemory memory{address, {}, nbytes, is_writable_host};
              for (const nb::object& region : regions) memory.regions.push_back(as_region(region));
              all.push_back(std::move(memory));
            }
            new (self) LocalMemories{std::move(all)};
          },
          "memories"_a);
  nb::class_<PeerConnections>(m, "PeerConnections")
      .def_static(
          "start",
          [](nb::object opener, size_t n_ways, double avoid, double fair_chance, double patient_connect,
             double retry_first, double retry_most, double idle) {
            const PeerConnections::Timing timing{avoid,       fair_chance, patient_connect,
                                                 retry_first, retry_most,  idle};
            return std::shared_ptr<PeerConnections>(
                new PeerConnections(n_ways, timing, hooks_of(std::move(opener))), DeletePeers());
          },
          "opener"_a, "n_ways"_a, nb::kw_only(), "avoid"_a, "fair_chance"_a, "patient_connect"_a,
          "retry_first"_a, "retry_most"_a, "idle"_a)
      .def("change", &change, "changed"_a, "gone"_a)
      .def("traffic", &traffic)
      .def("interrupt", &PeerConnections::interrupt, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &PeerConnections::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace p2pkv
