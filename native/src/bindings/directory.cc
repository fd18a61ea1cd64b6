// Bindings of what asking the directory takes per key, and of the channels to its shards.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/entries.h"
#include "directory/ask_batch.h"
#include "directory/channel.h"
#include "directory/server.h"
#include "directory/shard.h"
#include "pool/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

void make_ring(RingTable* self, const ArrayOf<uint64_t, kAnySize>& points,
               const ArrayOf<int32_t, kAnySize, kAnySize>& successors, const FlagArray& is_healthy,
               int32_t own_index) {
  const auto* sorted = require<uint64_t>(points, "points", {kAnySize});
  const size_t n = points.shape(0);
  const auto* owners = require<int32_t>(successors, "successors", {static_cast<int64_t>(n), kAnySize});
  const size_t replicas = successors.shape(1);
  const auto* healthy = require<uint8_t>(is_healthy, "is_healthy", {kAnySize});
  const size_t n_members = is_healthy.shape(0);
  for (size_t i = 0; i < n * replicas; ++i) {
    if (owners[i] >= static_cast<int32_t>(n_members))
      throw nb::value_error("successors name an unknown member");
  }
  new (self) RingTable({sorted, sorted + n}, {owners, owners + n * replicas}, replicas,
                       {healthy, healthy + n_members}, own_index);
}

// The owners of pages by their index in `member_keys`, the node keys of a ring's members; -1: none of them.
std::vector<int32_t> page_owners(const LocationArray& locations,
                                 const ArrayOf<uint64_t, kAnySize>& member_keys) {
  const auto* where = reinterpret_cast<const Location*>(
      require<uint8_t>(locations, "locations", {kAnySize, static_cast<int64_t>(sizeof(Location))}));
  const auto* keys = require<uint64_t>(member_keys, "member_keys", {kAnySize});
  const size_t n_members = member_keys.shape(0);
  std::vector<int32_t> members(locations.shape(0));
  for (size_t i = 0; i < members.size(); ++i) {
    const auto* found = std::find(keys, keys + n_members, where[i].owner);
    members[i] = found == keys + n_members ? -1 : static_cast<int32_t>(found - keys);
  }
  return members;
}

AskBatch* ask_page_owners(const LocationArray& locations, const ArrayOf<uint64_t, kAnySize>& member_keys,
                          std::shared_ptr<RingTable> ring) {
  if (member_keys.shape(0) != ring->is_healthy.size())
    throw nb::value_error("member_keys are not of this ring");
  const std::vector<int32_t> members = page_owners(locations, member_keys);
  return new AskBatch(members.data(), members.size(), std::move(ring));
}

Array<uint8_t> make_promote_entries(const KeyArray& keys, uint32_t answer_ms, uint32_t lease_ms,
                                    uint64_t lease) {
  const Key* rows = require_keys(keys);
  const size_t n = keys.shape(0);
  std::vector<wire::PromoteEntry> entries(n);
  for (size_t i = 0; i < n; ++i) entries[i] = {rows[i], answer_ms, lease_ms, lease};
  return give<uint8_t>(std::move(entries), {n, sizeof(wire::PromoteEntry)});
}

void make_ask(AskBatch* self, const KeyArray& keys, const std::optional<FlagArray>& is_done,
              std::shared_ptr<RingTable> ring, bool in_turn) {
  const Key* rows = require_keys(keys);
  const size_t n = keys.shape(0);
  const uint8_t* done = is_done ? require<uint8_t>(*is_done, "is_done", {static_cast<int64_t>(n)}) : nullptr;
  new (self) AskBatch(rows, n, done, std::move(ring),
                      in_turn ? AskBatch::Order::kInTurn : AskBatch::Order::kTogether);
}

std::unique_ptr<AskBatch> ask_doubted(const AskBatch& self, const KeyArray& keys) {
  if (keys.shape(0) != self.answered().size())
    throw nb::value_error("these are not the keys of this question");
  return self.of_doubted(require_keys(keys));
}

AskBatch* ask_members(const ArrayOf<int32_t, kAnySize>& members, std::shared_ptr<RingTable> ring) {
  const auto* rows = require<int32_t>(members, "members", {kAnySize});
  const auto n_members = static_cast<int32_t>(ring->is_healthy.size());
  for (size_t i = 0; i < members.shape(0); ++i) {
    if (rows[i] >= n_members) throw nb::value_error("members name one that the ring does not have");
  }
  return new AskBatch(rows, members.shape(0), std::move(ring));
}

void add_page_owners(AskBatch& self, const LocationArray& locations,
                     const ArrayOf<uint64_t, kAnySize>& member_keys) {
  const std::vector<int32_t> members = page_owners(locations, member_keys);
  if (members.size() != self.answered().size()) throw nb::value_error("locations and keys differ in length");
  self.add(members.data());
}

nb::bytes body_of(const AskBatch& self, size_t ask, const ArrayOf<uint8_t, kAnySize, kAnySize>& records) {
  const auto* bytes = require<uint8_t>(records, "records", {kAnySize, kAnySize});
  if (records.shape(0) != self.answered().size()) throw nb::value_error("records and keys differ in length");
  const std::string body = self.body(ask, bytes, records.shape(1));
  return nb::bytes(body.data(), body.size());
}

// The locations of the other holders of one key.
Array<uint8_t> others_of(OtherHolders& self, const KeyArray& key) {
  if (key.shape(0) != 1) throw nb::value_error("one key is asked for at a time");
  OtherHolders::Others others;
  const size_t n = self.get(*require_keys(key), &others);
  return give<uint8_t>(std::vector<Location>(others.begin(), others.begin() + static_cast<ptrdiff_t>(n)),
                       {n, sizeof(Location)});
}

// Replaces what is known of each key: by the next `n_others` of its own of these locations.
void put_others(OtherHolders& self, const KeyArray& keys, const LocationArray& others,
                const ArrayOf<uint8_t, kAnySize>& n_others) {
  const Key* const key = require_keys(keys);
  const size_t n = keys.shape(0);
  const auto* counts = require<uint8_t>(n_others, "n_others", {static_cast<int64_t>(n)});
  if (std::accumulate(counts, counts + n, size_t{0}) != others.shape(0))
    throw nb::value_error("n_others and others differ");
  const auto* next =
      reinterpret_cast<const Location*>(require<uint8_t>(others, "others", {kAnySize, sizeof(Location)}));
  for (size_t i = 0; i < n; next += counts[i++]) self.put(key[i], next, counts[i]);
}

// The arrays that Shard.get returned, to be written.
using Found = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RecordArray = ArrayOf<uint8_t, kAnySize, kAnySize>;
using Channels = std::vector<std::shared_ptr<DirectoryChannel>>;
using Locations = nb::ndarray<uint8_t, nb::shape<-1, sizeof(Location)>, nb::c_contig, nb::device::cpu>;

bool take_found(AskBatch& self, size_t ask, const nb::bytes& reply, Found found, Locations locations) {
  if (found.shape(0) != self.answered().size() || locations.shape(0) != found.shape(0)) {
    throw nb::value_error("found, locations and keys differ in length");
  }
  return self.take_found(ask, {reply.c_str(), reply.size()}, found.data(),
                         reinterpret_cast<Location*>(locations.data()));
}

// Keeps the arrays that answers are written to; the batch is kept by `keep_alive`.
struct AskedOwners {
  AnyArray records;
  std::optional<Found> found;
  std::optional<Locations> locations;
  std::shared_ptr<OtherHolders> others;
  std::unique_ptr<DirectoryExchange> exchange;
};

// It has what is asked and over which channels, which are known to fit together.
struct Checked {
  DirectoryQuestion question;
  std::vector<DirectoryLine> lines;

  // The records of a question that names others are keys.
  void take_others(OtherHolders* others) {
    if (others != nullptr && question.record_size != sizeof(Key))
      throw nb::value_error("records are no keys");
    question.others = others;
  }
};

Checked check_question(const AskBatch& self, uint16_t kind, const RecordArray& records,
                       const std::vector<int32_t>& owners, const Channels& channels,
                       const std::optional<Found>& found, const std::optional<Locations>& locations) {
  const size_t n = self.answered().size();
  const auto* bytes = require<uint8_t>(records, "records", {static_cast<int64_t>(n), kAnySize});
  DirectoryQuestion question{static_cast<wire::Kind>(kind), bytes, records.shape(1)};
  if (owners.size() != channels.size()) throw nb::value_error("owners and channels differ in length");
  std::vector<DirectoryLine> lines;
  for (size_t i = 0; i < owners.size(); ++i) lines.push_back({owners[i], channels[i]});
  if ((found && found->shape(0) != n) || (locations && locations->shape(0) != n)) {
    throw nb::value_error("found, locations and keys differ in length");
  }
  if (found) question.found = found->data();
  if (found && locations) question.locations = reinterpret_cast<Location*>(locations->data());
  return {question, std::move(lines)};
}

// `records` has a row for each key; `found` and `locations`, if given, are written by `wait`.
AskedOwners* send_to_owners(AskBatch& self, uint16_t kind, const RecordArray& records,
                            const std::vector<int32_t>& owners, const Channels& channels,
                            std::optional<Found> found, std::optional<Locations> locations,
                            std::shared_ptr<OtherHolders> others) {
  Checked checked = check_question(self, kind, records, owners, channels, found, locations);
  checked.take_others(others.get());
  auto asked = std::make_unique<AskedOwners>(
      AskedOwners{records, std::move(found), std::move(locations), std::move(others), nullptr});
  {
    nb::gil_scoped_release release;
    asked->exchange = std::make_unique<DirectoryExchange>(self, checked.question, checked.lines);
  }
  return asked.release();
}

// Sends, waits and ends in one go; returns which channels can be used again.
std::vector<bool> ask_owners(AskBatch& self, uint16_t kind, const RecordArray& records,
                             const std::vector<int32_t>& owners, const Channels& channels,
                             std::optional<Found> found, std::optional<Locations> locations, double timeout,
                             double patience, const std::shared_ptr<OtherHolders>& others) {
  Checked checked = check_question(self, kind, records, owners, channels, found, locations);
  checked.take_others(others.get());
  std::vector<uint8_t> is_usable;
  {
    nb::gil_scoped_release release;
    const Deadline patient = Deadline::after(patience);
    const Deadline deadline = Deadline::after(timeout);
    DirectoryExchange exchange(self, checked.question, checked.lines);
    exchange.wait(deadline, patient);
    is_usable = exchange.end(patient);
  }
  return {is_usable.begin(), is_usable.end()};
}

// An answer to LOCATE that came over the control socket.
bool take_located_of(AskBatch& self, size_t ask, const nb::bytes& reply, const RecordArray& records,
                     const Found& found, const Locations& locations, OtherHolders* others) {
  Checked checked =
      check_question(self, static_cast<uint16_t>(wire::Kind::kLocate), records, {}, {}, found, locations);
  checked.take_others(others);
  return take_located(self, checked.question, ask, {reply.c_str(), reply.size()});
}

void wait_for_owners(AskedOwners& self, double timeout, double patience) {
  nb::gil_scoped_release release;
  self.exchange->wait(Deadline::after(timeout), Deadline::after(patience));
}

std::vector<bool> end_asking(AskedOwners& self, double patience) {
  const std::vector<uint8_t> is_usable = self.exchange->end(Deadline::after(patience));
  return {is_usable.begin(), is_usable.end()};
}

bool take_flags(AskBatch& self, size_t ask, const nb::bytes& reply, Found flags) {
  if (flags.shape(0) != self.answered().size()) throw nb::value_error("flags and keys differ in length");
  return self.take_flags(ask, {reply.c_str(), reply.size()}, flags.data());
}

template <typename T>
Array<T> copy_of(const std::vector<T>& values) {
  return give<T>(std::vector<T>(values), {values.size()});
}

// Puts the entries that belong to the asking member's own shard.
void put_own(const AskBatch& self, Shard& shard, const EntryArray<wire::PutEntry>& entries) {
  std::vector<wire::PutEntry> own = take_entries<wire::PutEntry>(entries);
  if (own.size() != self.answered().size()) throw nb::value_error("entries and keys differ in length");
  size_t n_own = 0;
  for (size_t i = 0; i < own.size(); ++i) {
    if (self.answered()[i] != 0) own[n_own++] = own[i];
  }
  if (n_own == 0) return;
  nb::gil_scoped_release release;
  shard.put(own.data(), n_own, shard.now());
}

void bind_ask(nb::module_& m) {
  nb::class_<Sequences>(m, "Sequences",
                        "The numbers that order what this node tells the directory of a page.")
      .def(nb::init<>())
      .def("next", &Sequences::next);
  nb::class_<OtherHolders>(m, "OtherHolders",
                           "Where else pages lie. See native/src/directory/other_holders.h.")
      .def(nb::init<size_t>(), "capacity"_a)
      .def("of", &others_of, "key"_a)
      .def("put", &put_others, "keys"_a, "others"_a, "n_others"_a);
  m.def("promote_entries", &make_promote_entries, "keys"_a, "answer_ms"_a, "lease_ms"_a, "lease"_a);
  nb::class_<AskedOwners>(
      m, "AskedOwners",
      "Requests that were sent to shards, and their answers. See native/src/directory/channel.h.")
      .def("wait", &wait_for_owners, "timeout"_a, "patience"_a)
      .def("is_waiting", [](const AskedOwners& self) { return self.exchange->is_any_waiting(); })
      .def("end", &end_asking, "patience"_a);
  nb::class_<RingTable>(
      m, "RingTable",
      "Which members keep which keys, as the native core looks it up. See p2pkv/directory/ring.py.")
      .def("__init__", &make_ring, "points"_a, "successors"_a, "is_healthy"_a, "own_index"_a)
      .def(
          "peers_of",
          [](const RingTable& self, const KeyArray& keys) {
            return self.peers_of(require_keys(keys), keys.shape(0));
          },
          "keys"_a);
  nb::class_<AskBatch>(
      m, "AskBatch",
      "Whom a batch of keys is asked of, and what came back. See native/src/directory/ask_batch.h.")
      .def("__init__", &make_ask, "keys"_a, "is_done"_a.none(), "ring"_a, "in_turn"_a = false)
      .def_static("of_members", &ask_members, "members"_a, "ring"_a, nb::rv_policy::take_ownership)
      .def("add_page_owners", &add_page_owners, "locations"_a, "member_keys"_a)
      .def("ask_together", &AskBatch::ask_together, "member"_a)
      .def("of_doubted", &ask_doubted, "keys"_a)
      .def_static("of_page_owners", &ask_page_owners, "locations"_a, "member_keys"_a, "ring"_a,
                  nb::rv_policy::take_ownership)
      .def("asks",
           [](const AskBatch& self) {
             std::vector<std::pair<int32_t, size_t>> out;
             for (const AskBatch::Ask& ask : self.asks()) out.emplace_back(ask.owner, ask.rows.size());
             return out;
           })
      .def("body", &body_of, "ask"_a, "records"_a)
      .def("acknowledge", &AskBatch::acknowledge, "ask"_a)
      .def("take_found", &take_found, "ask"_a, "reply"_a, "found"_a, "locations"_a)
      .def("take_located", &take_located_of, "ask"_a, "reply"_a, "records"_a, "found"_a, "locations"_a,
           "others"_a.none())
      .def("take_flags", &take_flags, "ask"_a, "reply"_a, "flags"_a)
      .def("refuse", &AskBatch::refuse, "ask"_a)
      .def("excuse", &AskBatch::excuse, "ask"_a)
      .def("put_own", &put_own, "shard"_a, "entries"_a)
      .def("send", &send_to_owners, "kind"_a, "records"_a, "owners"_a, "channels"_a, "found"_a.none(),
           "locations"_a.none(), "others"_a.none() = nb::none(), nb::keep_alive<0, 1>(),
           nb::rv_policy::take_ownership)
      .def("ask", &ask_owners, "kind"_a, "records"_a, "owners"_a, "channels"_a, "found"_a.none(),
           "locations"_a.none(), "timeout"_a, "patience"_a, "others"_a.none() = nb::none())
      .def("is_settled", &AskBatch::is_settled)
      .def("is_heard", &AskBatch::is_heard)
      .def("answered", [](const AskBatch& self) { return copy_of(self.answered()); })
      .def("waiting", [](const AskBatch& self) { return copy_of(self.waiting()); })
      .def("owners", &AskBatch::owners)
      .def("silent", &AskBatch::silent)
      .def("passed_over", &AskBatch::passed_over);
}

void bind_channels(nb::module_& m) {
  nb::class_<DirectoryServer>(
      m, "DirectoryServer",
      "Answers peers' requests to a shard, in a thread of its own. See native/src/directory/server.h.")
      .def("announce", &DirectoryServer::announce, "boot"_a)
      .def(
          "serve_touches",
          [](DirectoryServer& self, std::shared_ptr<Pool> pool) {
            if (pool == nullptr) return self.serve_touches({});
            self.serve_touches([pool](const Key* keys, size_t n) { return pool->touch(keys, n); });
          },
          "pool"_a.none())
      .def("stats",
           [](DirectoryServer& self) -> Counts {
             const auto stats = self.stats();
             nb::dict out;
             out["requests"] = stats.requests;
             out["channels"] = stats.channels;
             out["touches"] = stats.touches;
             return out;
           })
      .def("close", &DirectoryServer::close, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "directory_server",
      [](const std::string& host, const std::string& advertise, std::shared_ptr<Shard> shard, Ports ports) {
        std::string error;
        auto server =
            DirectoryServer::start({host, advertise, {ports.first, ports.second}}, std::move(shard), &error);
        if (server == nullptr) throw std::runtime_error(error);
        return server;
      },
      "host"_a, "advertise"_a, "shard"_a, "ports"_a = Ports{0, 0});
  nb::class_<DirectoryChannel>(
      m, "DirectoryChannel", "A connection to a peer's directory server. See native/src/directory/channel.h.")
      .def_static("request",
                  [] {
                    const std::string half = DirectoryChannel::request();
                    return nb::bytes(half.data(), half.size());
                  })
      .def_static(
          "open",
          [](const nb::bytes& door, uint64_t boot, double timeout) {
            const std::string half(door.c_str(), door.size());
            std::string error;
            std::shared_ptr<DirectoryChannel> channel;
            {
              nb::gil_scoped_release release;
              channel = DirectoryChannel::open(half, boot, timeout, &error);
            }
            if (channel == nullptr) throw std::runtime_error(error);
            return channel;
          },
          "door"_a, "boot"_a, "timeout"_a)
      .def("release", &DirectoryChannel::release, "lease"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "touch",
          [](DirectoryChannel& self, const KeyArray& keys) {
            const Key* rows = require_keys(keys);
            const size_t n = keys.shape(0);
            const nb::gil_scoped_release release;
            const DirectoryChannel::Told told = self.touch(rows, n);
            return std::pair(told.is_usable, told.n_pages);
          },
          "keys"_a)
      .def("n_late", &DirectoryChannel::n_late)
      .def("interrupt", &DirectoryChannel::interrupt);
}

}  // namespace

void bind_directory(nb::module_& m) {
  bind_channels(m);
  bind_ask(m);
}

}  // namespace p2pkv
