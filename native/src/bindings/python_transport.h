// Transports that are written in Python, as the core reads over them. Each call takes the GIL for as long as
// it lasts, and passes on what Python raises as an exception.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "peers/connection.h"

namespace p2pkv {

// A Python object that the core holds, and may let go of on any thread. Used with the GIL only.
class HeldObject {
 public:
  explicit HeldObject(nanobind::object object) : object_(std::move(object)) {}
  ~HeldObject() {
    if (!nanobind::is_alive()) {
      object_.release();  // the interpreter has ended, and with it everything
      return;
    }
    const nanobind::gil_scoped_acquire locked;
    object_.reset();
  }
  HeldObject(const HeldObject&) = delete;
  HeldObject& operator=(const HeldObject&) = delete;
  const nanobind::object& get() const { return object_; }

 private:
  nanobind::object object_;
};

// A region as the core takes it: its own, an object of p2pkv.transports.base.MemoryRegion, or None.
std::shared_ptr<MemoryRegion> as_region(const nanobind::handle& region);

// An endpoint whose handshake is over, and the peer's region that it was attached to: both of the core, or
// both of p2pkv.transports.base.
Opened as_opened(const nanobind::handle& endpoint, const nanobind::handle& remote);

}  // namespace p2pkv
