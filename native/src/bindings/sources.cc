// Bindings of where a fetch looks before anybody is asked, and the one crossing of a warm fetch.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/key_texts.h"
#include "bindings/peers.h"
#include "cache/fetch_sources.h"
#include "page/key_hash.h"
#include "page/page_checks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using Outcomes = Array<uint8_t>;

// An array's memory, which stays where it is meanwhile.
class HeldBuffer {
 public:
  explicit HeldBuffer(nb::handle array) {
    is_held_ = PyObject_GetBuffer(array.ptr(), &view_, PyBUF_STRIDES | PyBUF_WRITABLE) == 0;
    if (!is_held_) PyErr_Clear();
  }
  ~HeldBuffer() {
    if (is_held_) PyBuffer_Release(&view_);
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;

  // One piece a row, if the rows are contiguous, not empty, and don't overlap.
  std::optional<std::vector<Piece>> rows() const {
    if (!is_held_ || view_.ndim < 1) return std::nullopt;
    int64_t nbytes = view_.itemsize;
    for (int axis = view_.ndim - 1; axis > 0; --axis) {
      if (view_.shape[axis] != 1 && view_.strides[axis] != nbytes) return std::nullopt;
      nbytes *= view_.shape[axis];
    }
    const int64_t stride = view_.strides[0];
    if (nbytes <= 0 || (view_.shape[0] > 1 && std::abs(stride) < nbytes)) return std::nullopt;
    std::vector<Piece> pieces(static_cast<size_t>(view_.shape[0]));
    const auto address = reinterpret_cast<int64_t>(view_.buf);
    for (size_t i = 0; i < pieces.size(); ++i)
      pieces[i] = {address + static_cast<int64_t>(i) * stride, nbytes};
    return pieces;
  }

 private:
  Py_buffer view_;
  bool is_held_;
};

// In which memory each piece lies, if all of them lie in memory that reads may write to.
std::optional<std::vector<int32_t>> place(const std::vector<Piece>& pieces,
                                          const std::vector<LocalMemory>& memories) {
  std::vector<int32_t> memory_of(pieces.size());
  const auto extent_of = [](const LocalMemory& memory) { return Registered{memory.address, memory.nbytes}; };
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto holder = find_holder(memories, pieces[i].address, pieces[i].nbytes, extent_of);
    if (holder == memories.end() || !holder->is_writable_host) return std::nullopt;
    memory_of[i] = static_cast<int32_t>(holder - memories.begin());
  }
  return memory_of;
}

// The hashes of a list's or tuple's keys, if they are as they should be, and no key is in it twice.
std::optional<std::vector<Key>> hash(const nb::bytes& prefix, nb::handle keys) {
  std::vector<std::string_view> texts;
  try {
    texts = borrow_texts(keys);
  } catch (const nb::python_error&) {
    return std::nullopt;
  } catch (const nb::builtin_exception&) {
    return std::nullopt;
  }
  std::vector<Key> hashed(texts.size());
  if (!hash_keys({prefix.c_str(), prefix.size()}, texts.data(), texts.size(), hashed.data()))
    return std::nullopt;
  if (find_duplicate(hashed.data(), hashed.size())) return std::nullopt;
  return hashed;
}

// This says what a fetch into the rows of an array came to without a look-up: the outcomes if all are hits,
// else the batch to go on with, whether lengths agree with those in the own pool, and whether peers were read
// from.
using FetchedRows = std::tuple<std::optional<Outcomes>, std::unique_ptr<FetchBatch>, bool, bool>;

// None for a call that is not plainly right: nothing was done, and the caller is to look what is wrong with
// it, or to make it in the general way.
std::optional<FetchedRows> fetch_rows(FetchSources& self, const nb::bytes& prefix, nb::handle keys,
                                      nb::handle array, const LocalMemories& memories, double timeout,
                                      double disk_timeout) {
  if (!PyList_CheckExact(keys.ptr()) && !PyTuple_CheckExact(keys.ptr())) return std::nullopt;
  const HeldBuffer buffer(array);
  auto pieces = buffer.rows();
  const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(keys.ptr()));
  if (n == 0 || !pieces || pieces->size() != n) return std::nullopt;
  auto memory_of = place(*pieces, memories.all);
  if (!memory_of) return std::nullopt;
  auto hashed = hash(prefix, keys);
  if (!hashed) return std::nullopt;
  auto batch = std::make_unique<FetchBatch>(std::move(*hashed), std::move(*pieces), std::move(*memory_of), 1);
  FetchSources::Found found;
  {
    const nb::gil_scoped_release release;
    found = self.gather(*batch, memories.all, Deadline::after(timeout), Deadline::after(disk_timeout));
  }
  if (!batch->is_over())
    return FetchedRows(std::nullopt, std::move(batch), found.lengths_agree, found.has_read);
  return FetchedRows(give<uint8_t>(batch->outcomes(), {n}), nullptr, true, found.has_read);
}

// Whether the lengths agree with those in the own pool, and whether peers were read from.
std::pair<bool, bool> gather(FetchSources& self, FetchBatch& batch, const LocalMemories& memories,
                             double timeout, double disk_timeout) {
  const nb::gil_scoped_release release;
  const auto found =
      self.gather(batch, memories.all, Deadline::after(timeout), Deadline::after(disk_timeout));
  return {found.lengths_agree, found.has_read};
}

void gather_taken(FetchSources& self, FetchBatch& batch, const LocalMemories& memories, double timeout) {
  const nb::gil_scoped_release release;
  self.gather_taken(batch, memories.all, Deadline::after(timeout));
}

void read_sources(FetchSources& self, FetchBatch& batch, const LocalMemories& memories, double timeout,
                  bool is_elsewhere_good, bool may_look_again, bool is_use) {
  const nb::gil_scoped_release release;
  self.read(batch, memories.all, Deadline::after(timeout), {is_elsewhere_good, may_look_again, is_use});
}

// Pages and bytes by source: the own pool, the own disk, and the transports by number.
std::vector<std::pair<size_t, uint64_t>> fetched(const FetchSources& self) {
  std::vector<std::pair<size_t, uint64_t>> all;
  for (const FetchBatch::Taken& taken : self.fetched()) all.emplace_back(taken.n_pages, taken.nbytes);
  return all;
}

// Ids of the pages that were fetched most lately, and how often a second; those known from fewer looks are
// left out.
std::vector<std::pair<nb::bytes, double>> hot_pages(FetchSources& self, size_t most, uint32_t least_looks) {
  std::vector<HotPages::Hot> hot;
  {
    const nb::gil_scoped_release release;
    hot = self.hot_pages(most);
  }
  std::vector<std::pair<nb::bytes, double>> out;
  for (const auto& [key, rate, n_looks] : hot) {
    if (n_looks >= least_looks) out.emplace_back(nb::bytes(key.bytes, sizeof key.bytes), rate);
  }
  return out;
}

// The same of all that are known: ids, finds in 1,000 seconds, and from how many looks that is known.
std::tuple<Array<uint8_t>, Array<uint64_t>, Array<uint32_t>> finds(FetchSources& self, size_t most) {
  std::vector<Key> keys;
  std::vector<uint64_t> in_1000_s;
  std::vector<uint32_t> n_looks;
  {
    const nb::gil_scoped_release release;
    for (const HotPages::Hot& page : self.hot_pages(most)) {
      keys.push_back(page.key);
      in_1000_s.push_back(static_cast<uint64_t>(page.reads_a_second * 1000));
      n_looks.push_back(page.n_looks);
    }
  }
  const size_t n = keys.size();
  return {give<uint8_t>(std::move(keys), {n, sizeof(Key)}), give<uint64_t>(std::move(in_1000_s), {n}),
          give<uint32_t>(std::move(n_looks), {n})};
}

// Owners and boots as Python has them, with the keys of their pages that were read.
std::vector<std::tuple<uint64_t, uint64_t, Array<uint8_t>>> drain_touches(Touches& self, double timeout) {
  std::vector<Touches::OfPeer> drained;
  {
    const nb::gil_scoped_release release;
    drained = self.drain(timeout);
  }
  std::vector<std::tuple<uint64_t, uint64_t, Array<uint8_t>>> out;
  for (Touches::OfPeer& of_peer : drained) {
    const size_t n = of_peer.keys.size();
    out.emplace_back(of_peer.peer.key, of_peer.peer.boot,
                     give<uint8_t>(std::move(of_peer.keys), {n, sizeof(Key)}));
  }
  return out;
}

}  // namespace

void bind_sources(nb::module_& m) {
  nb::class_<Touches>(m, "Touches",
                      "What was read from others, for their owners to hear. See native/src/cache/touches.h.")
      .def(nb::init<>())
      .def("drain", &drain_touches, "timeout"_a)
      .def("close", &Touches::close);
  nb::class_<FetchSources>(
      m, "FetchSources", "Where a fetch looks before anybody is asked. See native/src/cache/fetch_sources.h.")
      .def(
          "__init__",
          [](FetchSources* self, Pool& pool, Tier* tier, LocationCache& locations, Shard& shard,
             PeerConnections& peers, uint64_t own_key, bool check_sums, std::shared_ptr<Timings> fetches,
             std::shared_ptr<Timings> reads, std::shared_ptr<PageHistory> history,
             std::shared_ptr<OtherHolders> others, std::shared_ptr<Touches> touches,
             std::shared_ptr<CurrentMappedPool> of_host) {
            if (fetches->n_labels() != FetchBatch::kFarthests ||
                reads->n_labels() != FetchSources::n_sources(peers)) {
              throw nb::value_error(
                  "fetches and reads must have as many labels as there are places and sources");
            }
            new (self)
                FetchSources(FetchSources::Parts{pool,
                                                 tier,
                                                 locations,
                                                 shard,
                                                 peers,
                                                 own_key,
                                                 check_sums,
                                                 {std::move(fetches), std::move(reads), std::move(history)},
                                                 std::move(others),
                                                 std::move(touches),
                                                 std::move(of_host)});
          },
          "pool"_a, "tier"_a.none(), "locations"_a, "shard"_a, "peers"_a, "own_key"_a, "check_sums"_a,
          "fetches"_a, "reads"_a, "history"_a.none() = nb::none(), "others"_a.none() = nb::none(),
          "touches"_a.none() = nb::none(), "of_host"_a.none() = nb::none(), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def("fetch_rows", &fetch_rows, "prefix"_a, "keys"_a.none(), "array"_a, "memories"_a, "timeout"_a,
           "disk_timeout"_a)
      .def("gather", &gather, "batch"_a, "memories"_a, "timeout"_a, "disk_timeout"_a)
      .def("gather_taken", &gather_taken, "batch"_a, "memories"_a, "timeout"_a)
      .def("read", &read_sources, "batch"_a, "memories"_a, "timeout"_a, "elsewhere"_a, "look_again"_a,
           "use"_a)
      .def(
          "finish",
          [](FetchSources& self, FetchBatch& batch, bool has_promoted) {
            const auto misses = self.finish(batch, has_promoted);
            return std::vector<uint64_t>(misses.begin(), misses.end());
          },
          "batch"_a, "has_promoted"_a)
      .def("fetched", &fetched)
      .def("hot_pages", &hot_pages, "most"_a, "least_looks"_a = 1)
      .def("finds", &finds, "most"_a)
      .def("checks",
           [](const FetchSources& self) -> Counts {
             const auto checks = self.checks();
             nb::dict out;
             out["rejected"] = checks.rejected;
             out["checksum"] = checks.checksum;
             out["late_calls"] = checks.late_calls;
             out["hosts_guests"] = checks.hosts_guests;
             return out;
           })
      .def("hedges",
           [](const FetchSources& self) {
             const auto counts = self.hedges();
             return std::vector<uint64_t>(counts.begin(), counts.end());
           })
      .def_prop_ro("n_located", &FetchSources::n_located);
}

}  // namespace p2pkv
