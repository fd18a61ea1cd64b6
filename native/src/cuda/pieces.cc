#include "cuda/pieces.h"

namespace p2pkv::cuda {

PiecesUnderWay begin_copy_pieces(const std::vector<std::shared_ptr<Device>>& devices,
                                 const PieceCopies& copies, Direction direction) {
  PiecesUnderWay begun;
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
    if (!of_device.empty()) {
      begun.of_devices_.push_back(devices[index]->begin_copy(of_device, direction, HostMemory::kLocked));
    }
  }
  return begun;
}

CopyOutcome PiecesUnderWay::wait(std::string* error) {
  CopyOutcome worst = CopyOutcome::kDone;
  error->clear();
  for (const auto& copies : of_devices_) {
    std::string why;
    const CopyOutcome outcome = copies->wait(&why);
    if (outcome > worst) {
      worst = outcome;
      *error = why;
    }
  }
  return worst;
}

}  // namespace p2pkv::cuda
