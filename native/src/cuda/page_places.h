// Where the pages of a call lie on devices, and the copies between there and memory that is page-locked in
// chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/lockable.h"
#include "page/location.h"
#include "page/page_taker.h"

namespace p2pkv::cuda {

// Copies that were begun, of all devices of a call.
struct PlacedCopies {
  std::vector<std::shared_ptr<Lockable>> memories;  // first: they stay locked until the copies have ended
  std::vector<std::unique_ptr<CopiesUnderWay>> under_way;

  // Waits for all, whatever becomes of one, and says the worst outcome. `failure` gets its reason, if it has
  // none yet.
  CopyOutcome wait(std::string* failure);
};

// One thread at a time.
class PagePlaces {
 public:
  struct Pages {
    std::vector<std::shared_ptr<Device>> devices;
    std::vector<Piece> pieces;       // `n_pieces` of page 0, then of page 1, and so on
    std::vector<int32_t> device_of;  // of each piece: index into the devices
    size_t n_pieces;                 // at least one
  };
  // `most_locked`: bytes of mapped memory that the process may have page-locked.
  PagePlaces(Pages pages, uint64_t most_locked);

  size_t n_pages() const { return lengths_.size(); }
  uint64_t length_of(size_t page) const { return lengths_[page]; }

  // Adds the copies of a page between its places and `host`, which lies in `memory`, to those that are begun
  // next. False, and none was added, if that can't be page-locked.
  bool add(size_t page, const uint8_t* host, const MappedBytes& memory);
  // Begins what was added since, on all devices at a time.
  PlacedCopies begin(Direction direction);

 private:
  std::shared_ptr<Lockable> lockable_of(const MappedBytes& memory) const;

  const Pages pages_;
  std::vector<uint64_t> lengths_;
  Lockable::Budget budget_;
  std::vector<std::vector<DeviceCopy>> copies_;  // by device
  std::vector<std::shared_ptr<Lockable>> memories_;
};

}  // namespace p2pkv::cuda
