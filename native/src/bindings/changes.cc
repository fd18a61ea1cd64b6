// Bindings of the log of changes, and of what became of pages.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "page/change_log.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using Bytes = Array<uint8_t>;

// Keys, and of each its medium and whether it was stored; and whether records were given up before them.
std::tuple<Bytes, Bytes, bool> drain(ChangeLog& log, size_t limit) {
  std::vector<Key> keys;
  std::vector<uint8_t> kinds;
  bool is_lost;
  {
    const nb::gil_scoped_release unlocked;
    const std::vector<Change> changes = log.drain(limit, &is_lost);
    keys.reserve(changes.size());
    kinds.reserve(2 * changes.size());
    for (const Change& change : changes) {
      keys.push_back(change.key);
      kinds.push_back(static_cast<uint8_t>(change.medium));
      kinds.push_back(change.is_stored ? 1 : 0);
    }
  }
  const size_t n = keys.size();
  return {give<uint8_t>(std::move(keys), {n, sizeof(Key)}), give<uint8_t>(std::move(kinds), {n, 2}), is_lost};
}

Key key_of(const nb::bytes& id) {
  Key key;
  if (id.size() != sizeof key.bytes) throw nb::value_error("a page's id has 16 bytes");
  std::memcpy(key.bytes, id.c_str(), sizeof key.bytes);
  return key;
}

// The time in seconds since 1970, the event, and the node key of whom it is about.
using Event = std::tuple<double, uint8_t, uint64_t>;

std::vector<Event> find(const PageHistory& history, const nb::bytes& id) {
  const Key key = key_of(id);
  std::vector<Event> events;
  const nb::gil_scoped_release unlocked;
  for (const PageHistory::Record& record : history.find(key)) {
    events.emplace_back(static_cast<double>(record.micros()) / 1e6, static_cast<uint8_t>(record.event()),
                        record.owner);
  }
  return events;
}

// In seconds since 1970; None if it is not remembered.
std::optional<double> stored_at(const PageHistory& history, const nb::bytes& id) {
  const Key key = key_of(id);
  const nb::gil_scoped_release unlocked;
  const uint64_t micros = history.stored_at(key);
  if (micros == 0) return std::nullopt;
  return static_cast<double>(micros) / 1e6;
}

std::vector<double> reach(const PageHistory& history) {
  std::vector<double> since;
  for (const uint64_t micros : history.reach()) since.push_back(static_cast<double>(micros) / 1e6);
  return since;
}

}  // namespace

void bind_changes(nb::module_& m) {
  nb::class_<PageHistory>(m, "PageHistory",
                          "What became of pages lately. See native/src/page/page_history.h.")
      .def(nb::init<size_t>(), "capacity"_a = 65536)
      .def("find", find, "id"_a)
      .def("stored_at", stored_at, "id"_a)
      .def("reach", reach);
  nb::class_<ChangeLog>(
      m, "ChangeLog",
      "What came to a node's memory and disk and what went. See native/src/page/change_log.h.")
      .def(nb::init<size_t, std::shared_ptr<PageHistory>>(), "capacity"_a, "history"_a.none() = nb::none())
      .def("drain", drain, "limit"_a);
}

}  // namespace p2pkv
