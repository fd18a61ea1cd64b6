// Device memory: Python's view of native/src/cuda/*.h. Every call that may block releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "cuda/device.h"
#include "cuda/landing.h"
#include "cuda/lifting.h"
#include "cuda/mig.h"
#include "cuda/pieces.h"
#include "cuda/staging.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using cuda::Device;
using cuda::Landing;
using cuda::Lifting;
using cuda::Staging;

std::optional<std::tuple<uint64_t, uint64_t, int>> device_range(uint64_t address) {
  cuda::DeviceRange range;
  if (!cuda::find_device_range(address, &range)) return std::nullopt;
  return std::tuple(range.start, range.nbytes, range.device);
}

// Of a DLPack capsule, which is used up: its memory stays its producer's.
std::tuple<uint64_t, std::vector<int64_t>, std::vector<int64_t>, size_t> layout(
    const nb::ndarray<nb::ro>& tensor) {
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  std::vector<int64_t> shape, strides;
  for (size_t i = 0; i < tensor.ndim(); ++i) {
    shape.push_back(static_cast<int64_t>(tensor.shape(i)));
    strides.push_back(tensor.stride(i) * itemsize);
  }
  return {reinterpret_cast<uint64_t>(tensor.data()), shape, strides, tensor.itemsize()};
}

std::tuple<int, std::vector<std::string>> driver() {
  cuda::DriverInfo info;
  std::string error;
  bool is_there;
  {
    const nb::gil_scoped_release unlocked;
    is_there = cuda::describe_driver(&info, &error);
  }
  if (!is_there) throw std::runtime_error(error);
  return {info.version, info.devices};
}

std::shared_ptr<Device> open_device(int ordinal) {
  std::string error;
  std::shared_ptr<Device> device;
  {
    const nb::gil_scoped_release unlocked;
    device = Device::open(ordinal, &error);
  }
  if (!device) throw std::runtime_error(error);
  return device;
}

void lend_blocks(Device& device, unsigned n_blocks) {
  std::string error;
  bool is_lent;
  {
    const nb::gil_scoped_release unlocked;
    is_lent = device.lend_blocks(n_blocks, &error);
  }
  if (!is_lent) throw std::runtime_error(error);
}

std::shared_ptr<Staging> create_staging(std::shared_ptr<Device> device, uint64_t nbytes, bool is_shared) {
  std::string error;
  std::shared_ptr<Staging> staging;
  {
    const nb::gil_scoped_release unlocked;
    staging = is_shared ? Staging::create_shared(std::move(device), nbytes, &error)
                        : Staging::create(std::move(device), nbytes, &error);
  }
  if (!staging) throw std::runtime_error(error);
  return staging;
}

std::unique_ptr<cuda::StreamMark> mark(Device& device, uint64_t stream) {
  std::string error;
  std::unique_ptr<cuda::StreamMark> made;
  {
    const nb::gil_scoped_release unlocked;
    made = device.mark(stream, &error);
  }
  if (!made) throw std::runtime_error(error);
  return made;
}

std::tuple<int, std::string> wait_for_mark(cuda::StreamMark& mark, double timeout) {
  std::string error;
  const nb::gil_scoped_release unlocked;
  const auto outcome = mark.wait(Deadline::after(timeout), &error);
  return {static_cast<int>(outcome), error};
}

// None: no room in time.
std::optional<Staging::Loan> borrow(Staging& staging, uint64_t least, uint64_t wanted, double timeout) {
  const nb::gil_scoped_release unlocked;
  Staging::Loan given = staging.borrow(least, wanted, Deadline::after(timeout));
  if (!given) return std::nullopt;
  return given;
}

const Piece* require_pieces(const PieceArray& pieces, const char* name, size_t n_pages, size_t n_pieces) {
  const auto n = static_cast<int64_t>(n_pages);
  const auto p = static_cast<int64_t>(n_pieces);
  return reinterpret_cast<const Piece*>(require<int64_t>(pieces, name, {n, p, 2}));
}

cuda::PiecesUnderWay begin_copies(const std::vector<std::shared_ptr<Device>>& devices,
                                  const ArrayOf<int32_t, kAnySize, kAnySize>& device_of,
                                  const PieceArray& on_device, const PieceArray& on_host,
                                  const std::optional<FlagArray>& chosen, bool is_to_device) {
  const auto* indices = require<int32_t>(device_of, "device_of", {kAnySize, kAnySize});
  const size_t n = device_of.shape(0);
  const size_t p = device_of.shape(1);
  const cuda::PieceCopies copies{
      n,
      p,
      require_pieces(on_device, "on_device", n, p),
      require_pieces(on_host, "on_host", n, p),
      indices,
      chosen ? require<uint8_t>(*chosen, "chosen", {static_cast<int64_t>(n)}) : nullptr};
  for (size_t i = 0; i < n * p; ++i) {
    if (indices[i] < 0 || static_cast<size_t>(indices[i]) >= devices.size())
      throw nb::index_error("device_of: no such device");
    if (copies.on_device[i].nbytes != copies.on_host[i].nbytes || copies.on_host[i].nbytes < 0)
      throw nb::value_error("pieces here and there differ in length");
  }
  const auto direction = is_to_device ? cuda::Direction::kToDevice : cuda::Direction::kToHost;
  const nb::gil_scoped_release unlocked;
  return cuda::begin_copy_pieces(devices, copies, direction);
}

// Places a Landing or a Lifting.
template <typename Pages>
void make_places(Pages* self, const std::vector<std::shared_ptr<Device>>& devices,
                 const ArrayOf<int32_t, kAnySize, kAnySize>& device_of, const PieceArray& on_device,
                 uint64_t most_locked) {
  const auto* indices = require<int32_t>(device_of, "device_of", {kAnySize, kAnySize});
  const size_t n_pages = device_of.shape(0);
  const size_t n_pieces = device_of.shape(1);
  const Piece* pieces = require_pieces(on_device, "on_device", n_pages, n_pieces);
  const size_t n = n_pages * n_pieces;
  if (devices.empty() || n == 0) throw nb::value_error("there are no pages, or no devices that they lie on");
  for (size_t i = 0; i < n; ++i) {
    if (indices[i] < 0 || static_cast<size_t>(indices[i]) >= devices.size())
      throw nb::index_error("device_of: no such device");
    if (pieces[i].nbytes < 0) throw nb::value_error("a piece has a negative length");
  }
  new (self) Pages({devices, {pieces, pieces + n}, {indices, indices + n}, n_pieces}, most_locked);
}

std::tuple<int, std::string> wait_for_copies(cuda::PiecesUnderWay& copies) {
  std::string error;
  const nb::gil_scoped_release unlocked;
  const auto outcome = copies.wait(&error);
  return {static_cast<int>(outcome), error};
}

}  // namespace

void bind_cuda(nb::module_& m) {
  m.def(
      "cuda_use_library",
      [](const std::string& name) {
        std::string error;
        if (!cuda::use_library(name, &error)) throw std::runtime_error(error);
      },
      "name"_a);
  m.def("cuda_range", &device_range, "address"_a,
        "Start, length (0: unknown) and device of the allocation an address lies in; None: no device's "
        "memory.");
  m.def("cuda_layout", &layout, "tensor"_a,
        nb::sig("def cuda_layout(tensor: object) -> tuple[int, list[int], list[int], int]"),
        "Address, shape, strides in bytes and size of an element of a DLPack capsule of any device.");
  m.def("cuda_driver", &driver, "Version (12040 is CUDA 12.4) and the devices' names.");
  m.def("cuda_mig_instances", &cuda::mig_instances, nb::call_guard<nb::gil_scoped_release>(),
        "What each device is called that is an instance of a GPU (MIG); empty: it is a whole one.");
  nb::class_<cuda::PiecesUnderWay>(
      m, "CudaCopies", nb::is_final(),
      "Copies that were begun: nobody else may touch their memory before ``wait``.")
      .def("wait", &wait_for_copies, "``CopyOutcome``, and why. Blocks for as long as the copies take.");
  m.def("cuda_begin_copies", &begin_copies, "devices"_a, "device_of"_a, "on_device"_a, "on_host"_a,
        "chosen"_a.none(), "is_to_device"_a,
        "Pieces are (n, p, 2), ``device_of`` (n, p) indices into ``devices``. None of them is needed after "
        "it. Those on the host are page-locked.");
  nb::class_<Device>(m, "CudaDevice", nb::is_final(), "A device of this host. See native/src/cuda/device.h.")
      .def_static("open", &open_device, "ordinal"_a)
      .def_prop_ro("ordinal", &Device::ordinal)
      .def_prop_ro("is_lost", &Device::is_lost)
      .def_prop_ro("gathers_copies", &Device::gathers_copies)
      .def("mark", &mark, "stream"_a)
      .def("lend_blocks", &lend_blocks, "n_blocks"_a,
           "Has a kernel of so many blocks copy small pieces from now on, for all of this process. Raises "
           "RuntimeError if it can't be.");
  nb::class_<Landing>(m, "CudaLanding", nb::is_final(),
                      "What devices copy from where it lies. See native/src/cuda/landing.h.")
      .def("__init__", &make_places<Landing>, "devices"_a, "device_of"_a, "on_device"_a, "most_locked"_a)
      .def_prop_ro("failure", &Landing::failure);
  nb::class_<Lifting>(m, "CudaLifting", nb::is_final(),
                      "What devices write to where it is to lie. See native/src/cuda/lifting.h.")
      .def("__init__", &make_places<Lifting>, "devices"_a, "device_of"_a, "on_device"_a, "most_locked"_a)
      .def_prop_ro("failure", &Lifting::failure);
  nb::class_<cuda::StreamMark>(m, "CudaMark", nb::is_final(), "A point of a stream, to be waited for.")
      .def("wait", &wait_for_mark, "timeout"_a, "``StreamOutcome``, and why.");
  nb::class_<Staging::Loan>(m, "CudaLoan", nb::is_final(),
                            "A part of a staging buffer that is borrowed until it is released.")
      .def_prop_ro(
          "address",
          [](const Staging::Loan& self) { return self ? reinterpret_cast<uintptr_t>(self.data()) : 0; })
      .def_prop_ro("nbytes", &Staging::Loan::nbytes)
      .def("release", &Staging::Loan::release)
      .def("abandon", &Staging::Loan::abandon);
  nb::class_<Staging>(
      m, "CudaStaging", nb::is_final(),
      "Pinned host memory that copies from and to a device pass through. See native/src/cuda/staging.h.")
      .def_static("create", &create_staging, "device"_a, "nbytes"_a, "is_shared"_a = false)
      .def_prop_ro("fd", &Staging::fd, "A memfd of its memory, which stays its own; -1 unless it is shared.")
      .def_prop_ro("address", [](const Staging& self) { return reinterpret_cast<uintptr_t>(self.base()); })
      .def_prop_ro("nbytes", &Staging::nbytes)
      .def_prop_ro("largest", &Staging::largest)
      .def("borrow", &borrow, "least"_a, "wanted"_a, "timeout"_a)
      .def("stats", [](Staging& self) -> Counts {
        const cuda::StagingStats stats = self.stats();
        nb::dict out;
        out["nbytes"] = stats.nbytes;
        out["used_bytes"] = stats.used_bytes;
        out["lost_bytes"] = stats.lost_bytes;
        return out;
      });
}

}  // namespace p2pkv
