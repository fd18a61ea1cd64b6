#include "cuda/pieces.h"

#include <algorithm>

namespace p2pkv::cuda {

CopyOutcome copy_pieces(const std::vector<std::shared_ptr<Device>>& devices, const PieceCopies& copies,
                        Direction direction, std::string* error) {
  CopyOutcome worst = CopyOutcome::kDone;
  std::vector<DeviceCopy> of_device;
  of_device.reserve(copies.n_pages * copies.n_pieces);
  for (size_t index = 0; index < devices.size(); ++index) {
    of_device.clear();
    for (size_t i = 0; i < copies.n_pages * copies.n_pieces; ++i) {
      if (copies.device_of[i] != static_cast<int32_t>(index)) continue;
      if (copies.chosen != nullptr && copies.chosen[i / copies.n_pieces] == 0) continue;
      of_device.push_back({static_cast<uint64_t>(copies.on_device[i].address),
                           reinterpret_cast<uint8_t*>(copies.on_host[i].address),
                           static_cast<uint64_t>(copies.on_host[i].nbytes)});
    }
    if (!of_device.empty()) worst = std::max(worst, devices[index]->copy(of_device, direction, error));
  }
  return worst;
}

}  // namespace p2pkv::cuda
