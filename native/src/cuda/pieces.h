// Copies of pages' pieces between devices and host memory: what a call of the cache moves, a batch at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "page/location.h"

namespace p2pkv::cuda {

// `n_pages` pages of `n_pieces` pieces each, here and there; borrowed for the call.
struct PieceCopies {
  size_t n_pages;
  size_t n_pieces;
  const Piece* on_device;
  const Piece* on_host;      // as long as those on the device
  const int32_t* device_of;  // of each piece: index into the devices of the call
  const uint8_t* chosen;     // pages to copy; null: all
};

// As Device::copy. Devices take their turns; the worst outcome counts.
CopyOutcome copy_pieces(const std::vector<std::shared_ptr<Device>>& devices, const PieceCopies& copies,
                        Direction direction, std::string* error);

}  // namespace p2pkv::cuda
