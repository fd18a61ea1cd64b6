// Bindings of transfers. p2pkv/transfers adapts them: there errors get their kinds.
#include "offers/transfers.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

// A grant that ends with the Python object that stands for it.
struct OwnedGrant {
  explicit OwnedGrant(std::shared_ptr<Grant> grant) : native(std::move(grant)) {}
  ~OwnedGrant() {
    if (getpid() != pid) return;  // in a forked child it is its parent's
    const nb::gil_scoped_release unlocked;
    native->revoke(RowStatus::kCanceled);
  }
  OwnedGrant(const OwnedGrant&) = delete;
  OwnedGrant& operator=(const OwnedGrant&) = delete;
  const std::shared_ptr<Grant> native;
  const pid_t pid = getpid();
};

// Copies of rows, whose room is free when the Python object that stands for them is gone.
struct OwnedStowed {
  explicit OwnedStowed(Stowed stowed) : native(std::make_unique<Stowed>(std::move(stowed))) {}
  ~OwnedStowed() {
    if (getpid() != pid) native.release();  // in a forked child it is its parent's
  }
  OwnedStowed(const OwnedStowed&) = delete;
  OwnedStowed& operator=(const OwnedStowed&) = delete;
  std::unique_ptr<Stowed> native;
  const pid_t pid = getpid();
};

std::unique_ptr<OwnedStowed> stow(Offer& self) {
  const nb::gil_scoped_release unlocked;
  auto stowed = self.stow();
  return stowed ? std::make_unique<OwnedStowed>(std::move(*stowed)) : nullptr;
}

Array<int64_t> spans_of(const OwnedStowed& self) {
  std::vector<RowSpan> spans = self.native->spans;
  const size_t n = spans.size();
  return give<int64_t>(std::move(spans), {n, 2});
}

Array<uint8_t> give_statuses(RowStatuses statuses) {
  const size_t n = statuses.size();
  return give<uint8_t>(std::move(statuses), {n});
}

using RowSpanArray = ArrayOf<int64_t, kAnySize, 2>;

std::vector<RowSpan> to_spans(const RowSpanArray& spans) {
  const auto* rows = require<int64_t>(spans, "spans", {kAnySize, 2});
  std::vector<RowSpan> out(spans.shape(0));
  static_assert(sizeof(RowSpan) == 2 * sizeof(int64_t), "rows of the array are copied as they are");
  if (!out.empty()) std::memcpy(out.data(), rows, out.size() * sizeof(RowSpan));
  return out;
}

std::shared_ptr<Transfers> start_transfers(
    const std::string& host, const std::string& advertise,
    std::vector<std::tuple<size_t, std::string, std::shared_ptr<Transport>>> ways,
    std::shared_ptr<PeerConnections> peers, uint64_t buffer_nbytes, uint64_t buddy_pool_nbytes,
    uint64_t staging_nbytes, double keep_unclaimed_s, bool is_validating, Ports ports) {
  Transfers::Options options;
  options.listen = {host, advertise, {ports.first, ports.second}};
  for (auto& [number, name, transport] : ways) {
    if (number >= peers->n_ways()) throw nb::index_error("there is no transport of that number");
    options.ways.push_back({number, name, std::move(transport)});
  }
  options.peers = std::move(peers);
  options.buffer_nbytes = buffer_nbytes;
  options.buddy_pool_nbytes = buddy_pool_nbytes;
  options.staging_nbytes = staging_nbytes;
  options.keep_unclaimed_s = keep_unclaimed_s;
  options.is_validating = is_validating;
  std::string error;
  std::shared_ptr<Transfers> transfers;
  {
    const nb::gil_scoped_release unlocked;
    transfers = Transfers::start(std::move(options), &error);
  }
  if (!transfers) throw std::runtime_error(error);
  return transfers;
}

// `registrations`: the number of a way, its region, and what peers hand to attach, or nothing.
uint32_t add_memory(Transfers& self, uint64_t address, uint64_t nbytes, bool is_writable, size_t n_ways,
                    const std::vector<std::tuple<size_t, std::shared_ptr<MemoryRegion>, nb::bytes>>& given) {
  std::vector<std::shared_ptr<MemoryRegion>> regions(n_ways);
  std::vector<std::string> descriptions(n_ways);
  for (const auto& [way, region, description] : given) {
    regions.at(way) = region;
    descriptions.at(way) = std::string(description.c_str(), description.size());
  }
  return self.add_memory(address, nbytes, is_writable, std::move(regions), std::move(descriptions));
}

using Refusals = std::vector<std::pair<std::string, std::string>>;

// Its number, and the ways that read devices and were refused it, with their reasons.
std::pair<uint32_t, Refusals> add_device_memory(Transfers& self, uint64_t address, uint64_t nbytes,
                                                bool is_readable, bool is_writable,
                                                std::shared_ptr<cuda::Device> device) {
  std::vector<Transfers::Refusal> refused;
  std::string error;
  uint32_t id;
  {
    const nb::gil_scoped_release unlocked;
    id = self.add_device_memory(address, nbytes, is_readable, is_writable, std::move(device), &refused,
                                &error);
  }
  if (id == 0) throw std::runtime_error(error);
  Refusals refusals;
  for (auto& [way, reason] : refused) refusals.emplace_back(std::move(way), std::move(reason));
  return {id, std::move(refusals)};
}

void connect(Transfers& self, uint64_t node_key, uint64_t boot, const nb::bytes& door, double timeout) {
  const std::string half(door.c_str(), door.size());
  std::string error;
  bool is_connected;
  {
    const nb::gil_scoped_release unlocked;
    is_connected = self.connect(node_key, boot, half, timeout, &error);
  }
  if (!is_connected) throw std::runtime_error(error);
}

std::shared_ptr<Offer> offer(Transfers& self, std::optional<uint64_t> to, const std::string& request,
                             uint32_t first_row, const RowSpanArray& spans, double lease,
                             std::optional<uint64_t> stream) {
  Rows rows{request, first_row, to_spans(spans), stream};
  std::string error;
  std::shared_ptr<Offer> made;
  {
    const nb::gil_scoped_release unlocked;
    made = self.offer(to, std::move(rows), Deadline::after(lease), &error);
  }
  if (!made) throw nb::value_error(error.c_str());
  return made;
}

std::unique_ptr<OwnedGrant> grant(Transfers& self, std::optional<uint64_t> from, const std::string& request,
                                  uint32_t first_row, const RowSpanArray& spans, double timeout,
                                  std::optional<uint64_t> stream) {
  Rows rows{request, first_row, to_spans(spans), stream};
  std::string error;
  std::shared_ptr<Grant> made;
  {
    const nb::gil_scoped_release unlocked;
    made = self.grant(from, std::move(rows), Deadline::after(timeout), &error);
  }
  if (!made) throw nb::value_error(error.c_str());
  return std::make_unique<OwnedGrant>(std::move(made));
}

void bind_handles(nb::module_& m) {
  nb::class_<Offer>(m, "Offer", "Rows that a peer may read. See native/src/offers/transfers.h.")
      .def("done", &Offer::done, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "wait",
          [](Offer& self, double timeout) {
            const nb::gil_scoped_release unlocked;
            self.wait(Deadline::after(timeout));
          },
          "timeout"_a)
      .def(
          "withdraw",
          [](Offer& self, uint8_t reason) {
            const nb::gil_scoped_release unlocked;
            self.withdraw(static_cast<RowStatus>(reason));
          },
          "reason"_a)
      .def("stow", &stow)
      .def("statuses", [](Offer& self) { return give_statuses(self.statuses()); });
  nb::class_<OwnedStowed>(m, "Stowed", "A copy of rows in the buddy pool. See native/src/offers/transfers.h.")
      .def("spans", &spans_of);
  nb::class_<OwnedGrant>(
      m, "Grant",
      "Rows of this node that are to be filled; ends with this object. See native/src/offers/transfers.h.")
      .def("done",
           [](OwnedGrant& self) {
             const nb::gil_scoped_release unlocked;
             return self.native->done();
           })
      .def(
          "wait",
          [](OwnedGrant& self, double timeout) {
            const nb::gil_scoped_release unlocked;
            self.native->wait(Deadline::after(timeout));
          },
          "timeout"_a)
      .def(
          "revoke",
          [](OwnedGrant& self, uint8_t reason) {
            const nb::gil_scoped_release unlocked;
            self.native->revoke(static_cast<RowStatus>(reason));
          },
          "reason"_a)
      .def("statuses", [](OwnedGrant& self) {
        RowStatuses statuses;
        {
          const nb::gil_scoped_release unlocked;
          statuses = self.native->statuses();
        }
        return give_statuses(std::move(statuses));
      });
}

}  // namespace

void bind_transfers(nb::module_& m) {
  bind_handles(m);
  nb::class_<Transfers>(
      m, "Transfers",
      "The rows that are handed from node to node; spans are (n, 2) int64 of address and bytes. "
      "See native/src/offers/transfers.h.")
      .def_static("start", &start_transfers, "host"_a, "advertise"_a, "ways"_a, "peers"_a, nb::kw_only(),
                  "buffer_nbytes"_a, "buddy_pool_nbytes"_a, "staging_nbytes"_a, "keep_unclaimed_s"_a,
                  "is_validating"_a, "ports"_a = Ports{0, 0})
      .def_static("request",
                  [] {
                    const std::string half = Transfers::request();
                    return nb::bytes(half.data(), half.size());
                  })
      .def("announce", &Transfers::announce, "node_key"_a, "boot"_a)
      .def("add_memory", &add_memory, "address"_a, "nbytes"_a, "is_writable"_a, "n_ways"_a, "registrations"_a)
      .def("add_device_memory", &add_device_memory, "address"_a, "nbytes"_a, "is_readable"_a, "is_writable"_a,
           "device"_a)
      .def("device_failure", &Transfers::device_failure, nb::call_guard<nb::gil_scoped_release>())
      .def("remove_memory", &Transfers::remove_memory, "number"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("connect", &connect, "node_key"_a, "boot"_a, "door"_a, "timeout"_a)
      .def("is_connected", &Transfers::is_connected, "node_key"_a)
      .def(
          "forget",
          [](Transfers& self, uint64_t node_key, uint64_t boot, double after) {
            self.forget({node_key, boot}, after);
          },
          "node_key"_a, "boot"_a, "after"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "keep", [](Transfers& self, uint64_t node_key, uint64_t boot) { self.keep({node_key, boot}); },
          "node_key"_a, "boot"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("offer", &offer, "to"_a.none(), "request"_a, "first_row"_a, "spans"_a, "lease"_a,
           "stream"_a.none())
      .def("grant", &grant, "source"_a.none(), "request"_a, "first_row"_a, "spans"_a, "timeout"_a,
           "stream"_a.none())
      .def(
          "find_unregistered",
          [](Transfers& self, const RowSpanArray& spans, bool for_reading) {
            return self.find_unregistered(to_spans(spans), for_reading);
          },
          "spans"_a, "for_reading"_a)
      .def("readings",
           [](Transfers& self) -> Counts {
             nb::dict out;
             for (const auto& [name, value] : self.readings()) out[name] = value;
             return out;
           })
      .def("close", &Transfers::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace p2pkv
