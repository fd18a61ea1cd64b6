// Python's view of the gate, and of a limit of calls. Native for one reason: an exception that a signal's
// handler raises (Ctrl-C, a test's time-out) may come between any two steps of Python code, but not within a
// call of native code. A gate in Python loses count that way, and whoever closes it waits for ever; a limit
// loses places.
#include "base/gate.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/call_limit.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

class BoundGate {
 public:
  explicit BoundGate(const std::string& what) : what_(what), why_(what + " is closed") {}

  void enter() {
    if (gate_->enter()) return;
    const nb::object error = nb::module_::import_("p2pkv.errors").attr("ClosedError");
    PyErr_SetString(error.ptr(), why_.c_str());
    throw nb::python_error();
  }

  void exit(const nb::args&) {
    if (!gate_->leave()) return;
    const nb::object finish = std::exchange(finish_, nb::none());
    if (!finish.is_none()) finish();
  }

  bool shut() { return gate_->shut(); }

  void drain(const nb::typed<nb::callable, nb::object()>& finish) {
    finish_ = finish;  // before: the last call may leave as soon as this thread is found inside
    bool is_empty;
    {
      const nb::gil_scoped_release unlocked;
      is_empty = gate_->drain();
    }
    if (!is_empty) return;
    finish_ = nb::none();
    finish();
  }

  void forked() {
    gate_.release();  // leaked: a thread that is not in this process may hold its lock
    gate_ = std::make_unique<Gate>();
    gate_->shut();
    why_ = what_ + " belongs to the process that was forked; start another one here";
  }

 private:
  const std::string what_;
  std::string why_;
  std::unique_ptr<Gate> gate_ = std::make_unique<Gate>();
  nb::object finish_ = nb::none();
};

// A place within a limit, or none. It is given back once: at the end of a `with`, or when nobody has it any
// more, since an exception may come before the `with` has begun.
class CallPlace {
 public:
  CallPlace(std::shared_ptr<CallLimit> limit, double timeout, const std::function<bool()>& gives_up)
      : limit_(std::move(limit)), is_in_(limit_->enter(Deadline::after(timeout), gives_up)) {}
  ~CallPlace() { give_back(); }
  CallPlace(const CallPlace&) = delete;
  CallPlace& operator=(const CallPlace&) = delete;

  bool is_in() const { return is_in_; }
  void give_back() {
    if (std::exchange(is_in_, false)) limit_->leave();
  }

 private:
  const std::shared_ptr<CallLimit> limit_;
  bool is_in_;
};

std::shared_ptr<CallPlace> enter_limit(const std::shared_ptr<CallLimit>& limit, double timeout) {
  bool is_interrupted = false;
  std::function<bool()> gives_up;
  if (gettid() == getpid()) {  // handlers of signals run in the main thread, which waits here
    gives_up = [&] {
      const nb::gil_scoped_acquire locked;
      return is_interrupted = PyErr_CheckSignals() != 0;
    };
  }
  std::shared_ptr<CallPlace> place;
  {
    const nb::gil_scoped_release unlocked;
    place = std::make_shared<CallPlace>(limit, timeout, gives_up);
  }
  if (is_interrupted) throw nb::python_error();  // a place that came meanwhile is given back
  return place;
}

}  // namespace

void bind_gate(nb::module_& m) {
  nb::class_<CallPlace>(m, "CallPlace", nb::is_final(),
                        "A place within a limit of calls, or none: ``with`` says which.")
      .def("__enter__", &CallPlace::is_in)
      .def(
          "__exit__", [](CallPlace& self, const nb::args&) { self.give_back(); },
          nb::sig("def __exit__(self, *exc_info: object) -> None"));
  nb::class_<CallLimit>(
      m, "CallLimit", nb::is_final(),
      "How many calls are under way at once; thread-safe. See native/src/base/call_limit.h.")
      .def(nb::init<size_t>(), "most"_a)
      .def("entered", &enter_limit, "timeout"_a, "Wait for a place, at most ``timeout`` seconds.")
      .def("close", &CallLimit::close, "Let nobody in any more, nor wait.")
      .def_prop_ro("n_refused", &CallLimit::n_refused)
      .def_prop_ro("n_waiting", &CallLimit::n_waiting);
  nb::class_<BoundGate>(m, "Gate", nb::is_final(),
                        "Around every call of something that may be closed meanwhile; thread-safe. Raises "
                        "``ClosedError`` at who enters once it is shut. See p2pkv/lifetime.py.")
      .def(nb::init<const std::string&>(), "what"_a)
      .def("__enter__", &BoundGate::enter)
      .def("__exit__", &BoundGate::exit, nb::sig("def __exit__(self, *exc_info: object) -> None"))
      .def("shut", &BoundGate::shut, "Refuse new calls; False if it was shut already.")
      .def("drain", &BoundGate::drain, "then"_a,
           "Wait until no other thread's call is inside, and call ``then``. Every call has a deadline, so "
           "this ends.\n\nIn the handler of a signal that has interrupted a call of this thread, that call's "
           "end calls ``then``.")
      .def(
          "forked", &BoundGate::forked,
          "Refuse all calls: this is a child of the process whose gate it was, and has none of its threads.");
}

}  // namespace p2pkv
