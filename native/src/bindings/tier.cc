// The disk tier. Every batch call releases the GIL for as long as it works.
#include "disk/tier.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/bound_store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using Bytes = Array<uint8_t>;

std::shared_ptr<Tier> start_tier(std::shared_ptr<Pool> pool, uint64_t owner, uint64_t boot, int write,
                                 int admission, uint64_t queue_size, uint64_t warm_rate,
                                 std::shared_ptr<Guests> guests) {
  TierOptions options;
  options.write = static_cast<WritePolicy>(write);
  options.admission = static_cast<Admission>(admission);
  options.owner = owner;
  options.boot = boot;
  options.queue_size = queue_size;
  options.warm_rate = warm_rate;
  options.guests = std::move(guests);
  std::shared_ptr<Tier> tier = Tier::start(std::move(pool), options);
  if (!tier) throw std::runtime_error("the system has no thread to give to the disk tier");
  return tier;
}

// The store keeps the pool for as long as its writer may copy from it: a disk that hangs outlives the node.
void attach(Tier& tier, std::shared_ptr<Pool> pool, BoundStore& bound) {
  bound.news->hand_to([pool, note_stored = tier.stored_listener()](const Key* stored, size_t n) {
    if (n == 0) return pool->wake_drainer();
    note_stored(stored, n);
  });
  bound.released->hand_to([pool = std::move(pool)](const uint64_t* tickets, size_t n) {
    std::vector<uint8_t> held(n);
    pool->unpin(tickets, n, held.data());
  });
  tier.attach(bound.store);
  bound.news->tell();  // what it has found until now
}

std::pair<Bytes, Bytes> locate_stored(Tier& tier, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  std::vector<uint8_t> found(n);
  std::vector<Location> locations(n);
  {
    const nb::gil_scoped_release unlocked;
    tier.locate(data, n, found.data(), locations.data());
  }
  return {give<uint8_t>(std::move(found), {n}), give<uint8_t>(std::move(locations), {n, sizeof(Location)})};
}

Bytes tier_contains(Tier& tier, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  std::vector<uint8_t> found(n);
  {
    const nb::gil_scoped_release unlocked;
    tier.contains(data, n, found.data());
  }
  return give<uint8_t>(std::move(found), {n});
}

template <void (Tier::*method)(const Key*, size_t)>
void tell(Tier& tier, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const nb::gil_scoped_release unlocked;
  (tier.*method)(data, n);
}

void warm(Tier& tier, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  std::vector<Key> wanted(data, data + keys.shape(0));
  const nb::gil_scoped_release unlocked;
  tier.promote(std::move(wanted), {}, Deadline::after(0), [](const auto&, const auto&) {});
}

// Waits for `seconds` at most. Returns which of them are in the pool then.
Bytes promote(Tier& tier, const KeyArray& keys, double seconds) {
  const Key* data = require_keys(keys);
  std::vector<Key> wanted(data, data + keys.shape(0));
  const size_t n = wanted.size();
  std::vector<uint8_t> found;
  {
    const nb::gil_scoped_release unlocked;
    auto answer = std::make_shared<std::promise<std::vector<uint8_t>>>();
    tier.promote(std::move(wanted), {}, Deadline::after(seconds),
                 [answer](std::vector<uint8_t> there, const auto&) { answer->set_value(std::move(there)); });
    found = answer->get_future().get();
  }
  return give<uint8_t>(std::move(found), {n});
}

Bytes drain_changed(Tier& tier, size_t limit) {
  std::vector<Key> keys;
  {
    const nb::gil_scoped_release unlocked;
    keys = tier.drain_changed(limit);
  }
  const size_t n = keys.size();
  return give<uint8_t>(std::move(keys), {n, sizeof(Key)});
}

Counts stats_of_tier(Tier& tier) {
  const TierCounters& counters = tier.counters();
  const std::pair<const char*, const std::atomic<uint64_t>*> all[] = {
      {"skipped_pages", &counters.skipped_pages},   {"promoted_pages", &counters.promoted_pages},
      {"promoted_bytes", &counters.promoted_bytes}, {"failed_pages", &counters.failed_pages},
      {"late_pages", &counters.late_pages},         {"refused_pages", &counters.refused_pages},
      {"unwarmed_pages", &counters.unwarmed_pages}, {"caught_up_pages", &counters.caught_up_pages}};
  nb::dict named;
  named["behind_pages"] = tier.n_behind();
  for (const auto& [name, value] : all) named[name] = value->load();
  return named;
}

}  // namespace

void bind_tier(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Tier>(
      m, "Tier",
      "What moves pages between a pool and a disk store. See p2pkv/disk/tier.py and native/src/disk/tier.h.")
      .def(nb::new_(&start_tier), "pool"_a, nb::kw_only(), "owner"_a, "boot"_a, "write"_a, "admission"_a,
           "queue_size"_a, "warm_rate"_a, "guests"_a.none() = nb::none())
      .def("set_boot", &Tier::set_boot, "boot"_a)
      .def("attach", attach, "pool"_a, "store"_a)
      .def("note_published", tell<&Tier::note_published>, "keys"_a.noconvert())
      .def("note_fetched", tell<&Tier::note_fetched>, "keys"_a.noconvert())
      .def("locate", locate_stored, "keys"_a.noconvert())
      .def("contains", tier_contains, "keys"_a.noconvert())
      .def("warm", warm, "keys"_a.noconvert())
      .def("promote", promote, "keys"_a.noconvert(), "seconds"_a)
      .def("drain_changed", drain_changed, "limit"_a)
      .def("forget", tell<&Tier::forget>, "keys"_a.noconvert())
      .def("clear", &Tier::clear, Released())
      .def(
          "wait_cleared",
          [](Tier& tier, double timeout) { return tier.wait_cleared(Deadline::after(timeout)); }, "timeout"_a,
          Released())
      .def("stats", stats_of_tier)
      .def("close", &Tier::close, Released());
}

}  // namespace p2pkv
