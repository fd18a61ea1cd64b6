// The pages of one fetch that devices copy from where they lie in memory of this host, past any staging.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/page_places.h"
#include "page/page_taker.h"

namespace p2pkv::cuda {

// Thread-safe as PageTaker says. A page is taken as a whole, or not: where its memory can't be page-locked,
// or a device refuses.
class Landing final : public PageTaker {
 public:
  // `pages`: where they go. `most_locked`: bytes of mapped memory that the process may have page-locked.
  Landing(PagePlaces::Pages pages, uint64_t most_locked);

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

  PagePlaces places_;
  std::vector<Noted> noted_;
  std::atomic<size_t> n_noted_{0};
  std::vector<uint8_t> is_there_;
  std::string failure_;
};

}  // namespace p2pkv::cuda
