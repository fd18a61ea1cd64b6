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

}  // namespace

void bind_bench(nb::module_& m) {
  m.def("bench_receive_spans", receive_spans, "fd"_a, "base"_a, "spans"_a.noconvert(), "batch"_a);
  m.def("bench_serve_spans", serve_spans, "fd"_a, "base"_a, "nbytes"_a);
}

}  // namespace p2pkv
