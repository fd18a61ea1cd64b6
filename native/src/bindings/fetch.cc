// Bindings of the per-page work of a call: keys, checks, and a fetch from its keys to its outcomes.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/key_texts.h"
#include "cache/fetch_batch.h"
#include "cuda/landing.h"
#include "page/key_hash.h"
#include "page/page_checks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using Bytes = Array<uint8_t>;
using KeyTexts = nb::typed<nb::sequence, std::variant<nb::str, nb::bytes>>;

const Piece* require_pieces(const PieceArray& pieces) {
  return reinterpret_cast<const Piece*>(require<int64_t>(pieces, "pieces", {kAnySize, kAnySize, 2}));
}

const Location* require_locations(const LocationArray& locations) {
  return reinterpret_cast<const Location*>(
      require<uint8_t>(locations, "locations", {kAnySize, static_cast<int64_t>(sizeof(Location))}));
}

// None where libsodium is not bundled: Python then falls back to hashlib. The texts are borrowed from `keys`,
// so the GIL is kept.
std::optional<Bytes> hash_key_texts(const nb::bytes& prefix, const KeyTexts& keys, HashPath path) {
  const nb::object list = nb::steal(PySequence_Fast(keys.ptr(), "keys must be a sequence"));
  if (!list.is_valid()) throw nb::python_error();
  const std::vector<std::string_view> texts = borrow_texts(list);
  const size_t n = texts.size();
  std::vector<Key> hashed(n);
  if (!hash_keys({prefix.c_str(), prefix.size()}, texts.data(), n, hashed.data(), path)) return std::nullopt;
  return give<uint8_t>(std::move(hashed), {n, sizeof(Key)});
}

std::tuple<bool, Array<int32_t>, Array<int64_t>> locate_rows(const PieceArray& pieces,
                                                             const ArrayOf<int64_t, kAnySize, 2>& regions) {
  const Piece* of_pages = require_pieces(pieces);
  const auto* rows = reinterpret_cast<const Registered*>(require<int64_t>(regions, "regions", {kAnySize, 2}));
  const size_t n = pieces.shape(0);
  const size_t n_pieces = pieces.shape(1);
  std::vector<int32_t> region_of(n * n_pieces);
  std::vector<int64_t> length_of(n);
  const bool is_good = locate_pieces(of_pages, n, n_pieces, {rows, rows + regions.shape(0)}, region_of.data(),
                                     length_of.data());
  return std::tuple(is_good, give<int32_t>(std::move(region_of), {n, n_pieces}),
                    give<int64_t>(std::move(length_of), {n}));
}

void make_batch(FetchBatch* self, const KeyArray& keys, const PieceArray& pieces,
                const ArrayOf<int32_t, kAnySize, kAnySize>& memory_of) {
  const Key* rows = require_keys(keys);
  const Piece* of_pages = require_pieces(pieces);
  const auto* memories = require<int32_t>(memory_of, "memory_of", {kAnySize, kAnySize});
  const size_t n = keys.shape(0);
  const size_t n_pieces = pieces.shape(1);
  if (pieces.shape(0) != n || memory_of.shape(0) != n || memory_of.shape(1) != n_pieces || n_pieces == 0) {
    throw nb::value_error("keys, pieces and memory_of differ in length");
  }
  new (self) FetchBatch({rows, rows + n}, {of_pages, of_pages + n * n_pieces},
                        {memories, memories + n * n_pieces}, n_pieces);
}

std::tuple<size_t, uint64_t> take_from_disk(FetchBatch& self, Tier& tier, double timeout) {
  FetchBatch::Taken taken;
  {
    nb::gil_scoped_release release;
    self.take_from_disk(&tier, Deadline::after(timeout), &taken);
  }
  return std::tuple(taken.n_pages, taken.nbytes);
}

std::tuple<Array<int64_t>, Bytes> unlocated(const FetchBatch& self) {
  std::vector<int64_t> pages = self.unlocated();
  std::vector<Key> keys;
  keys.reserve(pages.size());
  for (const int64_t page : pages) keys.push_back(self.key(page));
  const size_t n = pages.size();
  return std::tuple(give<int64_t>(std::move(pages), {n}), give<uint8_t>(std::move(keys), {n, sizeof(Key)}));
}

void locate_pages(FetchBatch& self, const ArrayOf<int64_t, kAnySize>& pages, const FlagArray& found,
                  const LocationArray& locations, Shard& shard, LocationCache& cache) {
  const auto* rows = require<int64_t>(pages, "pages", {kAnySize});
  const size_t n = pages.shape(0);
  const auto* there = require<uint8_t>(found, "found", {static_cast<int64_t>(n)});
  const Location* where = require_locations(locations);
  if (locations.shape(0) != n) throw nb::value_error("pages and locations differ in length");
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] < 0 || static_cast<size_t>(rows[i]) >= self.n_pages())
      throw nb::index_error("page out of range");
  }
  self.locate(rows, there, where, n, &shard, &cache);
}

std::tuple<Array<int64_t>, Bytes, Bytes> cold(const FetchBatch& self, uint64_t own_key) {
  std::vector<int64_t> pages = self.cold(own_key);
  std::vector<Key> keys;
  std::vector<Location> locations;
  for (const int64_t page : pages) {
    keys.push_back(self.key(page));
    locations.push_back(self.location(page));
  }
  const size_t n = pages.size();
  return std::tuple(give<int64_t>(std::move(pages), {n}), give<uint8_t>(std::move(keys), {n, sizeof(Key)}),
                    give<uint8_t>(std::move(locations), {n, sizeof(Location)}));
}

std::optional<std::tuple<int64_t, uint64_t, uint64_t>> other_length(const FetchBatch& self) {
  uint64_t length = 0;
  uint64_t expected = 0;
  const int64_t page = self.find_other_length(&length, &expected);
  if (page < 0) return std::nullopt;
  return std::tuple(page, length, expected);
}

std::tuple<size_t, Bytes, Bytes> forget_stale(FetchBatch& self, uint64_t own_key, LocationCache& cache) {
  std::vector<Key> keys;
  std::vector<Location> locations;
  const size_t n_worth = self.forget_stale(own_key, &cache, &keys, &locations);
  const size_t n = keys.size();
  return std::tuple(n_worth, give<uint8_t>(std::move(keys), {n, sizeof(Key)}),
                    give<uint8_t>(std::move(locations), {n, sizeof(Location)}));
}

void bind_batch(nb::module_& m) {
  nb::class_<FetchBatch>(m, "FetchBatch",
                         "A fetch from its keys to its outcomes. See native/src/cache/fetch_batch.h.")
      .def("__init__", &make_batch, "keys"_a, "pieces"_a, "memory_of"_a)
      .def(
          "take_with",
          [](FetchBatch& self, std::shared_ptr<cuda::Landing> landing) {
            self.take_with(std::move(landing));
          },
          "landing"_a)
      .def("take_from_disk", &take_from_disk, "tier"_a, "timeout"_a)
      .def("unlocated", &unlocated)
      .def("locate", &locate_pages, "pages"_a, "found"_a, "locations"_a, "shard"_a, "cache"_a)
      .def("cold", &cold, "own_key"_a)
      .def("find_other_length", &other_length)
      .def("forget_stale", &forget_stale, "own_key"_a, "cache"_a)
      .def("outcomes",
           [](const FetchBatch& self) { return give<uint8_t>(self.outcomes(), {self.n_pages()}); })
      .def("is_over", &FetchBatch::is_over)
      .def("misses", [](const FetchBatch& self) {
        const auto counts = self.misses();
        return std::vector<uint64_t>(counts.begin(), counts.end());
      });
}

// Of each of `n` rows its one piece.
Array<int64_t> row_pieces(int64_t address, int64_t stride, int64_t nbytes, size_t n) {
  std::vector<Piece> pieces(n);
  for (size_t i = 0; i < n; ++i) pieces[i] = {address + static_cast<int64_t>(i) * stride, nbytes};
  return give<int64_t>(std::move(pieces), {n, 1, 2});
}

}  // namespace

void bind_fetch(nb::module_& m) {
  m.def("row_pieces", &row_pieces, "address"_a, "stride"_a, "nbytes"_a, "n"_a);
  nb::enum_<HashPath>(m, "HashPath", "See native/src/page/key_hash.h.")
      .value("BEST", HashPath::kBest)
      .value("AVX2", HashPath::kAvx2)
      .value("LIBRARY", HashPath::kLibrary);
  m.def("hash_keys", &hash_key_texts, "prefix"_a, "keys"_a, "path"_a = HashPath::kBest);
  m.def(
      "find_duplicate",
      [](const KeyArray& keys) { return find_duplicate(require_keys(keys), keys.shape(0)); }, "keys"_a);
  m.def("locate_pieces", &locate_rows, "pieces"_a, "regions"_a);
  bind_batch(m);
}

}  // namespace p2pkv
