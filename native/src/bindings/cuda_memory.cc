// Device memory of p2pkv's own and of other processes, for `p2pkv doctor`: Python's view of
// native/src/cuda/own_memory.h and sharing.h. Every call that may block releases the GIL.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "cuda/own_memory.h"
#include "cuda/sharing.h"
#include "cuda/staging.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using cuda::Device;
using cuda::MappedMemory;
using cuda::OwnMemory;

// Memory and the device that reaches it.
struct OwnDeviceMemory {
  std::shared_ptr<Device> device;
  std::unique_ptr<OwnMemory> memory;
  uint64_t nbytes;
};
struct MappedDeviceMemory {
  std::shared_ptr<Device> device;
  std::unique_ptr<MappedMemory> memory;
  uint64_t nbytes;
};

// Copies through page-locked memory of the call's own: these are few bytes, once.
template <typename Before, typename After>
void copy_once(const std::shared_ptr<Device>& device, uint64_t address, uint64_t nbytes,
               cuda::Direction direction, const Before& before, const After& after) {
  std::string error;
  {
    const nb::gil_scoped_release unlocked;
    const auto staging = cuda::Staging::create(device, nbytes, &error);
    if (staging) {
      auto loan = staging->borrow(nbytes, nbytes, Deadline::after(0));
      before(loan.data());
      const cuda::DeviceCopy copy{address, loan.data(), nbytes};
      const auto outcome = device->copy({&copy, 1}, direction, &error);
      if (outcome == cuda::CopyOutcome::kDone) after(loan.data());
      if (outcome == cuda::CopyOutcome::kLost) loan.abandon();
    }
  }
  if (!error.empty()) throw std::runtime_error(error);
}

std::unique_ptr<OwnDeviceMemory> allocate_memory(std::shared_ptr<Device> device, uint64_t nbytes,
                                                 bool by_descriptor) {
  std::string error;
  std::unique_ptr<OwnMemory> memory;
  const auto kind = by_descriptor ? OwnMemory::Kind::kByDescriptor : OwnMemory::Kind::kByHandle;
  {
    const nb::gil_scoped_release unlocked;
    error = cuda::sharing_missing();
    if (error.empty()) memory = OwnMemory::allocate(device, nbytes, kind, &error);
  }
  if (!memory) throw std::runtime_error(error);
  return std::make_unique<OwnDeviceMemory>(std::move(device), std::move(memory), nbytes);
}

void write_memory(const OwnDeviceMemory& self, const nb::bytes& data) {
  if (data.size() != self.nbytes) throw nb::value_error("data must have as many bytes as the memory");
  const char* const bytes = data.c_str();
  copy_once(
      self.device, self.memory->address(), self.nbytes, cuda::Direction::kToDevice,
      [&](uint8_t* host) { std::memcpy(host, bytes, self.nbytes); }, [](const uint8_t*) {});
}

std::tuple<nb::bytes, int> tell_memory(const OwnDeviceMemory& self) {
  cuda::SharedRange range;
  UniqueFd fd;
  std::string error;
  bool is_shared;
  {
    const nb::gil_scoped_release unlocked;
    is_shared = cuda::share_memory(*self.device, self.memory->address(), self.nbytes, &range, &fd, &error);
  }
  if (!is_shared) throw std::runtime_error(error);
  const int given = fd ? fcntl(fd.get(), F_DUPFD_CLOEXEC, 3) : -1;
  return {nb::bytes(&range, sizeof range), given};
}

void export_memory(const OwnDeviceMemory& self) {
  std::string error;
  {
    const nb::gil_scoped_release unlocked;
    self.memory->export_dmabuf(&error);
  }
  if (!error.empty()) throw std::runtime_error(error);
}

std::unique_ptr<MappedDeviceMemory> map_memory(std::shared_ptr<Device> device, const nb::bytes& shared,
                                               int fd, uint64_t nbytes) {
  cuda::SharedRange range;
  if (shared.size() != sizeof range) throw nb::value_error("shared must be what share() returns");
  std::memcpy(&range, shared.c_str(), sizeof range);
  std::string error;
  std::unique_ptr<MappedMemory> memory;
  {
    const nb::gil_scoped_release unlocked;
    error = cuda::sharing_missing();
    if (error.empty()) memory = MappedMemory::map(device, range, fd, nbytes, &error);
  }
  if (!memory) throw std::runtime_error(error);
  return std::make_unique<MappedDeviceMemory>(std::move(device), std::move(memory), nbytes);
}

template <typename Memory>
nb::bytes read_memory(const Memory& self) {
  std::string bytes(self.nbytes, '\0');
  copy_once(
      self.device, self.memory->address(), self.nbytes, cuda::Direction::kToHost, [](uint8_t*) {},
      [&](const uint8_t* host) { std::memcpy(bytes.data(), host, self.nbytes); });
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace

void bind_cuda_memory(nb::module_& m) {
  nb::class_<OwnDeviceMemory>(
      m, "CudaMemory", nb::is_final(),
      "Device memory of p2pkv's own, to try things out with. A failure is a ``RuntimeError``.")
      .def_static(
          "allocate", &allocate_memory, "device"_a, "nbytes"_a, "by_descriptor"_a,
          "As cudaMalloc's, which other processes map by a handle, or as cuMemCreate's, by a descriptor.")
      .def_prop_ro("address", [](const OwnDeviceMemory& self) { return self.memory->address(); })
      .def("write", &write_memory, "data"_a, "Replace all of it.")
      .def("read", &read_memory<OwnDeviceMemory>, "Return all of it.")
      .def("share", &tell_memory,
           "What another process maps it by, and a descriptor, which is the caller's, or -1.")
      .def("export_dmabuf", &export_memory,
           "Try to give it to the driver of another device, and take it back.");
  nb::class_<MappedDeviceMemory>(m, "CudaMapped", nb::is_final(), "Device memory of another process.")
      .def_static("map", &map_memory, "device"_a, "shared"_a, "fd"_a, "nbytes"_a)
      .def("read", &read_memory<MappedDeviceMemory>);
}

}  // namespace p2pkv
