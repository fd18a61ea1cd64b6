// Pages that somebody else than this processor brings into the pool: a device, which writes them where they
// are to lie, without a copy of them in other host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "page/page_taker.h"

namespace p2pkv {

// A page of a call, and the block that it is to fill.
struct GivenPage {
  size_t page;
  uint8_t* to;
  uint64_t nbytes;  // of the page
};

// A call has its pages brought by one of these. One thread at a time.
class PageGiver {
 public:
  enum class Outcome : uint8_t {
    kBrought = 0,
    kFailed = 1,  // there may be anything where they were to lie, and nothing is under way any more
    kLost = 2,    // bytes may be written there at any time: nobody may use it again
  };

  virtual ~PageGiver() = default;
  // Begins to bring pages to where they are to lie in `memory`; returns those that are on their way. The
  // others it can't bring there.
  virtual std::vector<GivenPage> begin(const std::vector<GivenPage>& pages, const MappedBytes& memory) = 0;
  // Blocks until those have come that were begun first and not waited for yet.
  virtual Outcome wait() = 0;
};

}  // namespace p2pkv
