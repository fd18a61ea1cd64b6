// Bindings of memory that a pool has left: who writes to it, and what becomes of it if nobody does any more.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "base/clock.h"
#include "bindings/bindings.h"
#include "page/writer_lock.h"
#include "pool/kept_records.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

WriterLock take_writer_lock(int records, double timeout) {
  std::string error;
  WriterLock lock;
  {
    const nb::gil_scoped_release unlocked;
    lock = WriterLock::take(records, Deadline::after(timeout), &error);
  }
  if (!lock) {
    PyErr_SetString(PyExc_OSError, error.c_str());
    throw nb::python_error();
  }
  return lock;
}

// Empty, or why the memory is still there.
std::string give_back(int pool, int records) {
  std::string error;
  return KeptRecords::give_back(records, pool, &error) ? std::string() : error;
}

}  // namespace

void bind_kept_pool(nb::module_& m) {
  nb::class_<WriterLock>(m, "WriterLock",
                         "Says who writes to kept memory. See native/src/page/writer_lock.h.")
      .def_static("take", take_writer_lock, "records"_a, "timeout"_a)
      .def("release", &WriterLock::release);
  m.def("give_back_kept", &give_back, "pool"_a, "records"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace p2pkv
