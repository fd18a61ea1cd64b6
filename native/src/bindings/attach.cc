// Bindings of attaching: a node's socket for the engines of its host, and an engine's end of it.

#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attach/attachment.h"
#include "attach/host.h"
#include "attach/published.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/page_batch.h"
#include "cache/location_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using attaching::Attachment;
using attaching::Host;
using attaching::Published;
using Bytes = Array<uint8_t>;

// No program that this process starts has it as well: it would look like this node when that has gone.
UniqueFd own_listener(int listener) {
  UniqueFd own(fcntl(listener, F_DUPFD_CLOEXEC, 3));
  if (!own) throw std::runtime_error(std::string("cannot listen: ") + std::strerror(errno));
  return own;
}

std::shared_ptr<Host> start_host(int listener, Pool& pool, Guests& guests, Shard& shard, Sequences& sequences,
                                 Tier* tier, NamespaceEpochs& epochs, uint64_t node_key,
                                 const std::string& address, const std::string& cluster, uint64_t share,
                                 size_t requests, bool takes_finds) {
  std::string error;
  auto host = Host::start(own_listener(listener), {pool, guests, shard, sequences, tier}, epochs,
                          {node_key, address, cluster}, {share, requests, takes_finds}, &error);
  if (!host) throw std::runtime_error(error);
  return host;
}

Counts stats_of(Host& host) {
  const Host::Stats stats = host.stats();
  nb::dict out;
  out["engines"] = stats.engines;
  out["lines"] = stats.lines;
  out["memory_bytes"] = stats.memory_bytes;
  out["refused"] = stats.n_refused;
  out["requests"] = stats.n_requests;
  out["withdrawn"] = stats.n_withdrawn;
  out["stored_pages"] = stats.n_stored_pages;
  out["stored_bytes"] = stats.n_stored_bytes;
  out["largest_charge"] = stats.largest_charge;
  out["taken_out"] = stats.n_taken_out;
  out["not_taken"] = stats.n_not_taken;
  return out;
}

// Of each engine, by its number: ids of pages, how often a second it finds each, and from how many looks it
// knows that.
using FoundPage = std::tuple<nb::bytes, double, uint32_t>;
using FindsOfEngine = std::tuple<uint64_t, std::vector<FoundPage>>;

std::vector<FindsOfEngine> finds_of(Host& host, double least_rate, size_t most) {
  std::vector<attaching::EngineFinds::OfEngine> all;
  {
    const nb::gil_scoped_release unlocked;
    all = host.finds(least_rate, most);
  }
  std::vector<FindsOfEngine> out;
  for (const auto& [engine, pages] : all) {
    std::vector<FoundPage> found;
    for (const auto& [key, finds] : pages) {
      found.emplace_back(nb::bytes(key.bytes, sizeof key.bytes), static_cast<double>(finds.in_1000_s) / 1000,
                         finds.n_looks);
    }
    out.emplace_back(engine, std::move(found));
  }
  return out;
}

std::shared_ptr<Attachment> open_attachment(const std::string& path, double timeout,
                                            const std::shared_ptr<MappedPool>& before, uint64_t mark) {
  std::string error;
  std::shared_ptr<Attachment> attachment;
  {
    const nb::gil_scoped_release unlocked;
    attachment =
        Attachment::open(path, before ? before->region() : nullptr, Deadline::after(timeout), &error, mark);
  }
  if (!attachment) throw std::runtime_error(error);
  return attachment;
}

std::tuple<std::string, std::string, uint64_t> visit_host(const std::string& path, double timeout) {
  std::string error;
  std::optional<attaching::Seen> seen;
  {
    const nb::gil_scoped_release unlocked;
    seen = attaching::visit(path, Deadline::after(timeout), &error);
  }
  if (!seen) throw std::runtime_error(error);
  return {seen->address, seen->cluster, seen->n_places};
}

// Statuses, what can be read now, whether the node's own shard has it, the sequences and locations, whether
// the node is draining, and whether it has gone.
using Answered = std::tuple<Bytes, Bytes, Bytes, Array<uint64_t>, Bytes, bool, bool>;

Answered give_answer(Attachment::Answer answer) {
  const size_t n = answer.is_found.size();
  return {give<uint8_t>(std::move(answer.statuses), {n}),
          give<uint8_t>(std::move(answer.is_found), {n}),
          give<uint8_t>(std::move(answer.is_told), {n}),
          give<uint64_t>(std::move(answer.sequences), {n}),
          give<uint8_t>(std::move(answer.locations), {n, sizeof(Location)}),
          answer.is_draining,
          answer.is_lost};
}

// Has what can be read found without asking for it.
void remember(const Published& published, const Key* keys, LocationCache& known) {
  const auto& [is_found, locations] = std::tie(published.answer.is_found, published.answer.locations);
  if (published.n_found == is_found.size()) return known.put(keys, locations.data(), is_found.size());
  for (size_t page = 0; page < is_found.size(); ++page) {
    if (is_found[page] != 0) known.put(keys + page, &locations[page], 1);
  }
}

Published publish_to_host(Attachment& self, const KeyArray& keys, const PieceArray& pieces, double timeout,
                          const RingTable& ring, LocationCache& known) {
  const PageBatch batch = require_batch(&keys, pieces);
  const nb::gil_scoped_release unlocked;
  Published published(self.publish(batch, Deadline::after(timeout)), batch.keys, ring);
  remember(published, batch.keys, known);
  return published;
}

// `ask` is what of these is said without their bytes.
template <auto ask>
Published publish_named(Attachment& self, const KeyArray& keys, double timeout, const RingTable& ring,
                        LocationCache& known) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const nb::gil_scoped_release unlocked;
  Published published((self.*ask)(data, n, Deadline::after(timeout)), data, ring);
  remember(published, data, known);
  return published;
}

template <typename T, typename Value>
Array<T> copy_of(const std::vector<Value>& values) {
  return give<T>(std::vector<Value>(values), {values.size()});
}

Answered look_up_at_host(Attachment& self, const KeyArray& keys, double timeout) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  Attachment::Answer answer(0);
  {
    const nb::gil_scoped_release unlocked;
    answer = self.look_up(data, n, Deadline::after(timeout));
  }
  return give_answer(std::move(answer));
}

void tell_host_of_missed(Attachment& self, const KeyArray& keys, double timeout) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const nb::gil_scoped_release unlocked;
  self.tell_missed(data, n, Deadline::after(timeout));
}

// Keys, finds in 1,000 seconds and looks are of one length.
void tell_finds(Attachment& self, const KeyArray& keys, const ArrayOf<uint64_t, kAnySize>& in_1000_s,
                const ArrayOf<uint32_t, kAnySize>& n_looks, double timeout) {
  const Key* data = require_keys(keys);
  const auto n = static_cast<int64_t>(keys.shape(0));
  const auto* rates = require<uint64_t>(in_1000_s, "in_1000_s", {n});
  const auto* looks = require<uint32_t>(n_looks, "n_looks", {n});
  std::vector<attaching::Finds> finds;
  for (int64_t i = 0; i < n; ++i) finds.push_back({rates[i], looks[i], 0});
  const nb::gil_scoped_release unlocked;
  self.tell_finds(data, finds.data(), finds.size(), Deadline::after(timeout));
}

}  // namespace

void bind_attach(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Host>(m, "AttachHost", "What engines of this host attach to. See native/src/attach/host.h.")
      .def_static("start", &start_host, "listener"_a, "pool"_a, "guests"_a, "shard"_a, "sequences"_a,
                  "tier"_a.none(), "epochs"_a, "node_key"_a, "address"_a, "cluster"_a, "share"_a,
                  "requests"_a, "takes_finds"_a, nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>(),
                  nb::keep_alive<0, 4>(), nb::keep_alive<0, 5>(), nb::keep_alive<0, 6>(),
                  nb::keep_alive<0, 7>())
      .def("drain", &Host::drain)
      .def(
          "listen_at", [](Host& self, int listener) { self.listen_at(own_listener(listener)); }, "listener"_a,
          "Let in who comes to another listening socket, which is duplicated.")
      .def("finds", &finds_of, "least_rate"_a, "most"_a)
      .def("stats", &stats_of)
      .def("close", &Host::close, Released());
  nb::class_<Published>(m, "AttachedPublish", "What became of a publish. See native/src/attach/published.h.")
      .def("is_known", [](const Published& self) { return copy_of<uint8_t>(self.is_known); })
      .def("is_found", [](const Published& self) { return copy_of<uint8_t>(self.answer.is_found); })
      .def("sequences", [](const Published& self) { return copy_of<uint64_t>(self.answer.sequences); })
      .def("locations",
           [](const Published& self) {
             return give<uint8_t>(std::vector<Location>(self.answer.locations),
                                  {self.answer.locations.size(), sizeof(Location)});
           })
      .def_prop_ro("is_draining", [](const Published& self) { return self.answer.is_draining; })
      .def_prop_ro("is_lost", [](const Published& self) { return self.answer.is_lost; })
      .def_ro("is_told", &Published::is_told)
      .def_ro("n_found", &Published::n_found)
      .def_ro("n_known", &Published::n_known)
      .def_ro("stored_bytes", &Published::stored_bytes)
      .def_ro("n_no_room", &Published::n_no_room)
      .def_ro("n_changed", &Published::n_changed)
      .def_ro("n_late", &Published::n_late)
      .def_ro("n_not_tried", &Published::n_not_tried)
      .def_ro("misfit", &Published::misfit);
  m.def("visit_attach_host", &visit_host, "path"_a, "timeout"_a,
        "The address of the node that engines attach to there, and its cluster's name. RuntimeError says why "
        "none is.");
  nb::class_<Attachment>(m, "Attachment", "An engine's end of it. See native/src/attach/attachment.h.")
      .def_static("open", &open_attachment, "path"_a, "timeout"_a, "before"_a.none() = nb::none(),
                  "mark"_a = 0)
      .def("take_pool", &Attachment::take_pool)
      .def_prop_ro("node_key", &Attachment::node_key)
      .def_prop_ro("address", &Attachment::address)
      .def_prop_ro("cluster", &Attachment::cluster)
      .def_prop_ro("epochs_version", &Attachment::epochs_version)
      .def_prop_ro("is_believed", &Attachment::is_believed)
      .def(
          "share",
          [](Attachment& self, uint64_t nbytes, int fd, double timeout) {
            const nb::gil_scoped_release unlocked;
            std::string why;
            const uint32_t number = self.share(nbytes, fd, Deadline::after(timeout), &why);
            return std::pair(number, why);
          },
          "nbytes"_a, "fd"_a, "timeout"_a)
      .def("use", &Attachment::use, "number"_a, "address"_a, "nbytes"_a, Released())
      .def("forget", &Attachment::forget, "number"_a, Released())
      .def("call_ahead", &Attachment::call_ahead)
      .def("publish", &publish_to_host, "keys"_a.noconvert(), "pieces"_a.noconvert(), "timeout"_a, "ring"_a,
           "known"_a)
      .def("publish_again", &publish_named<&Attachment::publish_again>, "keys"_a.noconvert(), "timeout"_a,
           "ring"_a, "known"_a, "Publish what lies in the node's pool of these already.")
      .def("confirm", &publish_named<&Attachment::confirm>, "keys"_a.noconvert(), "timeout"_a, "ring"_a,
           "known"_a,
           "The same of what one call has published already, to find out what is there in the end.")
      .def("look_up", &look_up_at_host, "keys"_a.noconvert(), "timeout"_a)
      .def("tell_missed", &tell_host_of_missed, "keys"_a.noconvert(), "timeout"_a)
      .def_prop_ro("takes_finds", &Attachment::takes_finds)
      .def("tell_finds", &tell_finds, "keys"_a.noconvert(), "in_1000_s"_a.noconvert(),
           "n_looks"_a.noconvert(), "timeout"_a)
      .def(
          "wait_gone",
          [](Attachment& self, double timeout) {
            const nb::gil_scoped_release unlocked;
            return self.wait_gone(Deadline::after(timeout));
          },
          "timeout"_a)
      .def("has_gone", &Attachment::has_gone, Released())
      .def("close", &Attachment::close, Released());
}

}  // namespace p2pkv
