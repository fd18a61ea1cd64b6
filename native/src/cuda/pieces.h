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
  const Piece* on_host;      // page-locked, and as long as those on the device
  const int32_t* device_of;  // of each piece: index into the devices of the call
  const uint8_t* chosen;     // pages to copy; null: all
};

// As CopiesUnderWay, of several devices: the worst outcome counts.
class PiecesUnderWay {
 public:
  PiecesUnderWay() = default;
  PiecesUnderWay(PiecesUnderWay&&) = default;
  PiecesUnderWay(const PiecesUnderWay&) = delete;

  CopyOutcome wait(std::string* error);

 private:
  friend PiecesUnderWay begin_copy_pieces(const std::vector<std::shared_ptr<Device>>& devices,
                                          const PieceCopies& copies, Direction direction);
  std::vector<std::unique_ptr<CopiesUnderWay>> of_devices_;
};

// As Device::begin_copy; all devices copy at a time.
PiecesUnderWay begin_copy_pieces(const std::vector<std::shared_ptr<Device>>& devices,
                                 const PieceCopies& copies, Direction direction);

}  // namespace p2pkv::cuda
