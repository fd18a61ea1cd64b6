// The benchmark's references; every call works without the GIL.
#include "bench/bench.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

const Span* require_spans(const AnyArray& spans) {
  return reinterpret_cast<const Span*>(require<int64_t>(spans, "spans", {kAnySize, 3}));
}

void copy_spans(uintptr_t to, uintptr_t from, const AnyArray& spans, bool non_temporal) {
  const Span* rows = require_spans(spans);
  const size_t n = spans.shape(0);
  const auto how = non_temporal ? bench::Copy::kNonTemporal : bench::Copy::kMemcpy;
  nb::gil_scoped_release unlocked;
  bench::copy_spans(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from), rows, n, how);
}

int receive_spans(int fd, uintptr_t base, const AnyArray& spans, size_t batch) {
  const Span* rows = require_spans(spans);
  const size_t n = spans.shape(0);
  if (batch == 0) throw nb::value_error("batch must be positive");
  nb::gil_scoped_release unlocked;
  return bench::receive_spans(fd, reinterpret_cast<uint8_t*>(base), rows, n, batch);
}

int serve_spans(int fd, uintptr_t base, size_t nbytes) {
  nb::gil_scoped_release unlocked;
  return bench::serve_spans(fd, reinterpret_cast<const uint8_t*>(base), nbytes);
}

// Keeps the Python socket alive while the native thread uses it.
struct BoundEcho {
  nb::object socket;
  std::unique_ptr<bench::Echo> native;
};

}  // namespace

void bind_bench(nb::module_& m) {
  m.def("bench_copy_spans", copy_spans, "to"_a, "from_"_a, "spans"_a.noconvert(), nb::kw_only(),
        "non_temporal"_a);
  m.def("bench_receive_spans", receive_spans, "fd"_a, "base"_a, "spans"_a.noconvert(), "batch"_a);
  m.def("bench_serve_spans", serve_spans, "fd"_a, "base"_a, "nbytes"_a);
  nb::class_<BoundEcho>(m, "BenchEcho")
      .def(
          "__init__",
          [](BoundEcho* self, nb::object socket) {
            auto* handle = reinterpret_cast<void*>(nb::cast<uintptr_t>(socket.attr("underlying")));
            new (self) BoundEcho{std::move(socket), std::make_unique<bench::Echo>(handle)};
          },
          "socket"_a)
      .def("start", [](BoundEcho& self) { self.native->start(); })
      .def("stop", [](BoundEcho& self) {
        nb::gil_scoped_release unlocked;
        self.native->stop();
      });
}

}  // namespace p2pkv
