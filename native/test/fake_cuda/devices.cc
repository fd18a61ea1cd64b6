// Which devices a process sees, as NVIDIA's guides of CUDA and of MIG say it.
//
// FAKE_CUDA_GPUS="GPU-UUID;GPU-UUID[MIG-UUID+MIG-UUID,MIG-UUID];GPU-UUID[]" describes the machine: GPUs, of
// which those with brackets are in MIG mode, and have GPU instances (divided by commas) of compute instances
// (divided by +). CUDA_VISIBLE_DEVICES says which of them a process sees; of compute instances it is one at
// most, and beside it no GPU. Not set, it is the first compute instance if there is any, else all GPUs.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <sstream>

#include "machine.h"

using namespace fake;

namespace fake {
namespace {

constexpr const char* kMemfd = "fake-cuda ";
constexpr const char* kUsual =
    "GPU-00000000-0000-0000-0000-000000000000;GPU-00000000-0000-0000-0000-000000000001";

struct Gpu {
  std::string uuid;
  bool is_in_mig_mode = false;
  std::vector<VisibleDevice> instances;
};

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream all(text);
  for (std::string one; std::getline(all, one, at);) parts.push_back(one);
  return parts;
}

Gpu gpu_of(const std::string& text) {
  const size_t bracket = text.find('[');
  Gpu gpu{text.substr(0, bracket), bracket != std::string::npos, {}};
  if (!gpu.is_in_mig_mode) return gpu;
  const std::string within = text.substr(bracket + 1, text.size() - bracket - 2);
  int number = 0;
  for (const std::string& instance : split(within, ',')) {
    const uint64_t memory = std::hash<std::string>()(gpu.uuid + "/" + std::to_string(number++));
    for (const std::string& uuid : split(instance, '+')) gpu.instances.push_back({gpu.uuid, uuid, memory});
  }
  return gpu;
}

std::vector<VisibleDevice> visible_of(const std::vector<Gpu>& gpus, const char* asked) {
  std::vector<VisibleDevice> seen, wholes;
  const auto instance = [&](const std::function<bool(const Gpu&, const VisibleDevice&)>& is_meant) {
    for (const Gpu& gpu : gpus) {
      for (const VisibleDevice& one : gpu.instances) {
        if (is_meant(gpu, one)) return std::vector<VisibleDevice>{one};
      }
    }
    return std::vector<VisibleDevice>{};
  };
  if (asked == nullptr) {
    seen = instance([](const Gpu&, const VisibleDevice&) { return true; });
    for (const Gpu& gpu : gpus) {
      if (!gpu.is_in_mig_mode) wholes.push_back({gpu.uuid, "", 0});
    }
    return seen.empty() ? wholes : seen;
  }
  for (const std::string& name : split(asked, ',')) {
    if (name.starts_with("MIG-")) {
      const auto found = instance([&](const Gpu&, const VisibleDevice& one) { return one.mig_uuid == name; });
      return found.empty() ? seen : found;
    }
    const bool is_number = !name.empty() && name.find_first_not_of("0123456789") == std::string::npos;
    const auto gpu = std::find_if(gpus.begin(), gpus.end(), [&](const Gpu& each) {
      const auto number = static_cast<size_t>(&each - gpus.data());
      return is_number ? name == std::to_string(number)
                       : name.starts_with("GPU-") && each.uuid.starts_with(name);
    });
    if (gpu == gpus.end()) return seen;  // what is behind one that is not there is not looked at
    if (gpu->is_in_mig_mode)
      return instance([&](const Gpu& of, const VisibleDevice&) { return &of == &*gpu; });
    seen.push_back({gpu->uuid, "", 0});
  }
  return seen;
}

// The 16 bytes that the digits of "GPU-..." or "MIG-..." stand for.
void bytes_of(const std::string& uuid, char* bytes) {
  std::string digits;
  std::copy_if(uuid.begin() + 4, uuid.end(), std::back_inserter(digits), [](char c) { return c != '-'; });
  digits.resize(32, '0');
  for (size_t i = 0; i < 16; ++i)
    bytes[i] = static_cast<char>(std::stoi(digits.substr(2 * i, 2), nullptr, 16));
}

}  // namespace

std::vector<VisibleDevice> visible_devices() {
  const char* const described = std::getenv("FAKE_CUDA_GPUS");
  std::vector<Gpu> gpus;
  for (const std::string& text : split(described != nullptr ? described : kUsual, ';'))
    gpus.push_back(gpu_of(text));
  // that of a usual machine is for the tests' engines, and not for this
  const char* const asked = described != nullptr ? std::getenv("CUDA_VISIBLE_DEVICES") : nullptr;
  auto seen = visible_of(gpus, asked);
  seen.resize(std::min<size_t>(seen.size(), kDevices));
  return seen;
}

bool is_of_other_instance(uint64_t memory, int device) {
  return memory != machine.devices[static_cast<size_t>(device)].memory;
}

int make_memfd(int device) {
  const uint64_t memory = machine.devices[static_cast<size_t>(device)].memory;
  return memfd_create((kMemfd + std::to_string(memory)).c_str(), MFD_CLOEXEC);
}

uint64_t memory_of(int fd, int device) {
  char target[256];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t n = readlink(link.c_str(), target, sizeof target);
  const std::string text(target, n > 0 ? static_cast<size_t>(n) : 0);
  const std::string start = "/memfd:" + std::string(kMemfd);
  if (!text.starts_with(start)) return machine.devices[static_cast<size_t>(device)].memory;
  return std::strtoull(text.c_str() + start.size(), nullptr, 10);
}

}  // namespace fake

EXPORT int cuDeviceGetCount(int* n) {
  *n = static_cast<int>(machine.devices.size());
  return machine.is_initialized ? kSuccess : kNotInitialized;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (!machine.is_initialized) return kNotInitialized;
  if (!has_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT int cuDeviceGetName(char* name, int length, int device) {
  const bool is_instance = !machine.devices[static_cast<size_t>(device)].mig_uuid.empty();
  const std::string text = "emulated device " + std::to_string(device) + (is_instance ? " MIG 1g.10gb" : "");
  std::strncpy(name, text.c_str(), static_cast<size_t>(length) - 1);
  name[length - 1] = '\0';
  return kSuccess;
}

// Of the GPU, whichever part of it the device is.
EXPORT int cuDeviceGetUuid(char* uuid, int device) {
  if (!has_device(device)) return kInvalidDevice;
  bytes_of(machine.devices[static_cast<size_t>(device)].gpu_uuid, uuid);
  return kSuccess;
}

EXPORT int cuDeviceGetUuid_v2(char* uuid, int device) {
  if (const int result = asked_for("cuDeviceGetUuid_v2")) return result;
  if (!has_device(device)) return kInvalidDevice;
  const VisibleDevice& seen = machine.devices[static_cast<size_t>(device)];
  bytes_of(seen.mig_uuid.empty() ? seen.gpu_uuid : seen.mig_uuid, uuid);
  return kSuccess;
}
