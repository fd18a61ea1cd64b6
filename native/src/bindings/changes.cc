// Bindings of the log of changes.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <tuple>
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

}  // namespace

void bind_changes(nb::module_& m) {
  nb::class_<ChangeLog>(
      m, "ChangeLog",
      "What came to a node's memory and disk and what went. See native/src/page/change_log.h.")
      .def(nb::init<size_t>(), "capacity"_a)
      .def("drain", drain, "limit"_a);
}

}  // namespace p2pkv
