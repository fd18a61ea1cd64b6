#include "bindings/python_transport.h"

#include <nanobind/stl/shared_ptr.h>

#include <cstring>
#include <string>
#include <vector>

#include "bindings/arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

bool is_true(const nb::object& answer) {
  const int truth = PyObject_IsTrue(answer.ptr());
  if (truth < 0) throw nb::python_error();
  return truth == 1;
}

// Closing must not fail: what it raises is told to sys.unraisablehook.
void close_quietly(const HeldObject& object) {
  const nb::gil_scoped_acquire locked;
  try {
    object.get().attr("close")();
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("closing what a transport in Python opened");
  }
}

class PythonMemoryRegion final : public MemoryRegion {
 public:
  explicit PythonMemoryRegion(nb::object region)
      : base_(reinterpret_cast<uint8_t*>(nb::cast<uintptr_t>(region.attr("address")))),
        nbytes_(nb::cast<uint64_t>(region.attr("nbytes"))),
        region(std::move(region)) {}
  uint8_t* base() const override { return base_; }
  uint64_t nbytes() const override { return nbytes_; }
  std::string describe() const override {
    const nb::gil_scoped_acquire locked;
    const auto blob = nb::cast<nb::bytes>(region.get().attr("describe")());
    return {blob.c_str(), blob.size()};
  }
  void close() override { close_quietly(region); }

 private:
  uint8_t* const base_;
  const uint64_t nbytes_;

 public:
  const HeldObject region;
};

struct PythonRemoteRegion final : RemoteRegion {
  explicit PythonRemoteRegion(nb::object region)
      : size(nb::cast<uint64_t>(region.attr("nbytes"))), region(std::move(region)) {}
  uint64_t nbytes() const override { return size; }

  const uint64_t size;
  const HeldObject region;
};

class PythonTransfer final : public Transfer {
 public:
  PythonTransfer(nb::object transfer, size_t n_spans)
      : transfer_(std::move(transfer)), statuses_(n_spans, Status::kPending) {}

  bool done() override {
    const nb::gil_scoped_acquire locked;
    return is_true(transfer_.get().attr("done")());
  }
  bool advance(double timeout) override {
    const nb::gil_scoped_acquire locked;
    return is_true(transfer_.get().attr("advance")(timeout));
  }
  void wait(double timeout) override {
    const nb::gil_scoped_acquire locked;
    const auto settled = nb::cast<AnyArray>(transfer_.get().attr("wait")(timeout));
    const auto n = static_cast<int64_t>(statuses_.size());
    const uint8_t* values = require<uint8_t>(settled, "the statuses of a transfer", {n});
    if (n > 0) std::memcpy(statuses_.data(), values, statuses_.size());
  }
  const std::vector<Status>& statuses() const override { return statuses_; }

 private:
  const HeldObject transfer_;
  std::vector<Status> statuses_;
};

class PythonEndpoint final : public BoundEndpoint {
 public:
  explicit PythonEndpoint(nb::object endpoint) : endpoint_(std::move(endpoint)) {}

  std::shared_ptr<Transfer> read(std::shared_ptr<MemoryRegion> local, std::shared_ptr<RemoteRegion> remote,
                                 std::vector<Span> spans, std::vector<Word> words) override {
    const auto here = std::dynamic_pointer_cast<PythonMemoryRegion>(local);
    const auto there = std::dynamic_pointer_cast<PythonRemoteRegion>(remote);
    const size_t n = spans.size();
    const nb::gil_scoped_acquire locked;
    if (!here || !there) throw nb::type_error("a region is of another transport than the endpoint");
    nb::object of_words = nb::none();
    if (!words.empty()) of_words = nb::cast(give<uint64_t>(std::move(words), {n, 2}));
    return std::make_shared<PythonTransfer>(
        endpoint_.get().attr("read")(here->region.get(), there->region.get(),
                                     give<int64_t>(std::move(spans), {n, 3}), "words"_a = of_words),
        n);
  }
  void close() override { close_quietly(endpoint_); }

 private:
  const HeldObject endpoint_;
};

}  // namespace

std::shared_ptr<MemoryRegion> as_region(const nb::handle& region) {
  if (region.is_none()) return nullptr;
  if (nb::isinstance<MemoryRegion>(region)) return nb::cast<std::shared_ptr<MemoryRegion>>(region);
  return std::make_shared<PythonMemoryRegion>(nb::borrow(region));
}

Opened as_opened(const nb::handle& endpoint, const nb::handle& remote) {
  if (nb::isinstance<Endpoint>(endpoint)) {
    return {nb::cast<std::shared_ptr<Endpoint>>(endpoint), nb::cast<std::shared_ptr<RemoteRegion>>(remote)};
  }
  return {std::make_shared<PythonEndpoint>(nb::borrow(endpoint)),
          std::make_shared<PythonRemoteRegion>(nb::borrow(remote))};
}

}  // namespace p2pkv
