// The pages of one publish that devices write to where they are to lie in the own pool, past any staging.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "cuda/page_places.h"
#include "page/page_giver.h"

namespace p2pkv::cuda {

class Lifting final : public PageGiver {
 public:
  // `most_locked`: bytes of mapped memory that the process may have page-locked.
  Lifting(PagePlaces::Pages pages, uint64_t most_locked) : places_(std::move(pages), most_locked) {}
  Lifting(const Lifting&) = delete;
  Lifting& operator=(const Lifting&) = delete;

  size_t n_pages() const { return places_.n_pages(); }
  std::vector<GivenPage> begin(const std::vector<GivenPage>& pages, const MappedBytes& memory) override;
  Outcome wait() override;

  // Why a device has failed; empty if none has. No page is brought afterwards.
  const std::string& failure() const { return failure_; }

 private:
  PagePlaces places_;
  std::deque<PlacedCopies> rounds_;
  std::string failure_;
};

}  // namespace p2pkv::cuda
