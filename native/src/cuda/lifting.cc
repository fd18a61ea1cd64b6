#include "cuda/lifting.h"

namespace p2pkv::cuda {

std::vector<GivenPage> Lifting::begin(const std::vector<GivenPage>& pages, const MappedBytes& memory) {
  std::vector<GivenPage> begun;
  if (!failure_.empty()) return begun;
  for (const GivenPage& given : pages) {
    // Its block is of the length that the pool knows: what is longer would go into its neighbours.
    if (given.nbytes == places_.length_of(given.page) && places_.add(given.page, given.to, memory))
      begun.push_back(given);
  }
  if (!begun.empty()) rounds_.push_back(places_.begin(Direction::kToHost));
  return begun;
}

PageGiver::Outcome Lifting::wait() {
  PlacedCopies round = std::move(rounds_.front());
  rounds_.pop_front();
  switch (round.wait(&failure_)) {
    case CopyOutcome::kDone:
      return Outcome::kBrought;
    case CopyOutcome::kFailed:
      return Outcome::kFailed;
    case CopyOutcome::kLost:
      return Outcome::kLost;
  }
  return Outcome::kLost;
}

}  // namespace p2pkv::cuda
