// The pages of one fetch that devices copy from where they lie in memory of this host, past any staging.
#pragma once

#include <atomic>
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

// Thread-safe as PageTaker says. A page is taken as a whole, or not: where its memory can't be page-locked,
// or a device refuses.
class Landing final : public PageTaker {
 public:
  // Where the pages go.
  struct Places {
    std::vector<std::shared_ptr<Device>> devices;
    std::vector<Piece> pieces;       // `n_pieces` of page 0, then of page 1, and so on
    std::vector<int32_t> device_of;  // of each piece: index into the devices
    size_t n_pieces;
  };
  // `most_locked`: bytes of mapped memory that the process may have page-locked.
  Landing(Places places, uint64_t most_locked);

  void take(size_t page, const uint8_t* from) override;
  void land(const MappedBytes& memory) override;
  bool has(size_t page) const override { return is_there_[page] != 0; }

  // Why a device has failed; empty if none has. No page is taken afterwards.
  const std::string& failure() const { return failure_; }

 private:
  struct Noted {
    size_t page;
    const uint8_t* from;
  };
  void add(const Noted& noted, const Lockable& memory);

  const Places places_;
  std::vector<uint64_t> lengths_;
  Lockable::Budget budget_;
  std::vector<Noted> noted_;
  std::atomic<size_t> n_noted_{0};
  std::vector<uint8_t> is_there_;
  std::vector<std::vector<DeviceCopy>> copies_;  // by device
  std::string failure_;
};

}  // namespace p2pkv::cuda
