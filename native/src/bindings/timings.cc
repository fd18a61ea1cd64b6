// Bindings of counters, and of the histograms of how long things take.
#include "base/timings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/counter.h"
#include "base/timings_text.h"
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

nb::bytes write(const TimingsText& self, const Timings& timings,
                const std::vector<std::pair<size_t, std::string>>& notes) {
  if (self.n_lines() != timings.n_labels() * timings.n_classes() * TimingsText::kLines) {
    throw nb::value_error("these lines are of other histograms");
  }
  std::vector<TimingsText::Note> behind;
  for (const auto& [line, text] : notes) {
    if (line >= self.n_lines()) throw nb::index_error("there is no such line");
    behind.push_back({line, text});
  }
  std::string text;
  {
    const nb::gil_scoped_release unlocked;
    text = self.write(timings, behind);
  }
  return nb::bytes(text.data(), text.size());
}

}  // namespace

void bind_timings(nb::module_& m) {
  nb::class_<Counter>(m, "Counter", "A number that only grows. See native/src/base/counter.h.")
      .def(nb::init<>())
      .def("inc", &Counter::add, "n"_a = 1.0)
      .def_prop_ro("value", &Counter::value);
  nb::class_<Timings>(m, "Timings", "How long things took. See native/src/base/timings.h.")
      .def(nb::init<size_t, std::vector<uint64_t>>(), "n_labels"_a, "size_bounds"_a)
      .def("add", add, "label"_a, "size"_a, "seconds"_a)
      .def("read", read)
      .def_static("bounds", bounds);
  nb::class_<TimingsText>(m, "TimingsText",
                          "Histograms as text. See native/src/base/timings_text.h. A note is the number of a "
                          "line and what stands behind it.")
      .def(nb::init<std::string, std::vector<std::string>>(), "head"_a, "starts"_a)
      .def("write", write, "timings"_a, "notes"_a)
      .def_ro_static("LINES", &TimingsText::kLines);
}

}  // namespace p2pkv
