// Bindings of the histograms of how long things take.
#include "base/timings.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

void add(Timings& self, size_t label, uint64_t size, double seconds) {
  if (label >= self.n_labels()) throw nb::index_error("label out of range");
  self.add(label, size, static_cast<int64_t>(seconds * 1e9));
}

// Of each label and class, in their order: how many there are by bucket, and the sum in seconds.
std::vector<std::tuple<std::vector<uint64_t>, double>> read(const Timings& self) {
  std::vector<std::tuple<std::vector<uint64_t>, double>> out;
  for (const Timings::Reading& reading : self.read()) {
    out.emplace_back(std::vector<uint64_t>(reading.counts.begin(), reading.counts.end()),
                     static_cast<double>(reading.sum_ns) / 1e9);
  }
  return out;
}

std::vector<double> bounds() {
  std::vector<double> seconds;
  for (const int64_t ns : Timings::kBounds) seconds.push_back(static_cast<double>(ns) / 1e9);
  return seconds;
}

}  // namespace

void bind_timings(nb::module_& m) {
  nb::class_<Timings>(m, "Timings", "How long things took. See native/src/base/timings.h.")
      .def(nb::init<size_t, std::vector<uint64_t>>(), "n_labels"_a, "size_bounds"_a)
      .def("add", add, "label"_a, "size"_a, "seconds"_a)
      .def("read", read)
      .def_static("bounds", bounds);
}

}  // namespace p2pkv
