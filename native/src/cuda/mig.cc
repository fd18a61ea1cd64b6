#include "cuda/mig.h"

#include <cstring>

#include "cuda/driver.h"

namespace p2pkv::cuda {
namespace {

std::string text_of(const Uuid& uuid) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "MIG-";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    const auto byte = static_cast<unsigned char>(uuid.bytes[i]);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

std::string instance(const Driver& driver, int ordinal) {
  DeviceHandle device;
  if (driver.device_get(&device, ordinal) != kSuccess) return {};
  char name[256] = "";
  const bool is_called_so =
      driver.device_get_name(name, sizeof name, device) == kSuccess && std::strstr(name, " MIG ") != nullptr;
  // The second call tells the instance's UUID where the first tells the GPU's; of a whole one both are that.
  Uuid whole{}, part{};
  const bool are_known = driver.device_get_uuid != nullptr && driver.device_get_part_uuid != nullptr &&
                         driver.device_get_uuid(&whole, device) == kSuccess &&
                         driver.device_get_part_uuid(&part, device) == kSuccess;
  if (are_known && std::memcmp(&whole, &part, sizeof part) != 0) return text_of(part);
  return is_called_so ? "device " + std::to_string(ordinal) : std::string();
}

}  // namespace

std::vector<std::string> mig_instances() {
  std::string ignored;
  const Driver* driver = Driver::get(&ignored);
  int n = 0;
  if (driver == nullptr || driver->device_get_count(&n) != kSuccess) return {};
  std::vector<std::string> instances;
  for (int ordinal = 0; ordinal < n; ++ordinal) instances.push_back(instance(*driver, ordinal));
  return instances;
}

}  // namespace p2pkv::cuda
