// Which reads are late, and where their pages are read instead.
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "cache/boarding.h"
#include "cache/flights.h"

namespace p2pkv {
namespace {

// A holder that is not in time by its pace is left when one of so many parts of the time left is over: each
// of several that are late has its turn, and a second one.
constexpr int kPartsOfATry = 4;
// Left unread with less time than this, a page is not worth another connection; a guess.
constexpr std::chrono::microseconds kTooLate{500};

}  // namespace

Flights::Clock::time_point Flights::overdue_at(Clock::time_point from, int parts) const {
  return from + std::max(Clock::duration::zero(), deadline_.at() - from) / parts;
}

// When an owner that was set out to at `began` is late. One whose pages were read in vain before gets more
// time each time: maybe all of their holders are slow. But where a holder of the pages was not tried yet,
// what is only guessed, or twice what most take, is not waited for if it is a large part of a short call.
Flights::Clock::time_point Flights::late_at(const FetchBatch::Owner& owner, Clock::time_point began,
                                            Pace::Patience patience) {
  const auto patient = patience.late * (int64_t{1} << std::min(2 * owner.n_tries, 20u));
  const auto turn = overdue_at(began, kPartsOfATry) - began;
  const auto least = std::max<Clock::duration>({patience.most, Pace::kFloor, turn});
  if (patient <= least) return began + patient;
  if (batch_.has_untried(owner, elsewhere_->choice)) return began + least;
  if (owner.n_tries == 0) return began + patient;
  return began + std::min<Clock::duration>(patient, std::max(patience.late, turn));
}

Flights::Clock::time_point Flights::next_look(const Flight& flight) const {
  return std::min(deadline_.at(), flight.late_at);
}

Flights::Clock::time_point Flights::next_boarding_look() const {
  auto next = deadline_.at();
  for (const Boarding::Waiting& waiting : boarding_->waiting()) next = std::min(next, waiting.late_at);
  return next;
}

// Whether its pages are better read elsewhere at first, though they were not read here in vain yet.
bool Flights::avoid_slow(const FetchBatch::Owner& owner, const Connection* connection) {
  if (owner.n_tries > 0) return false;
  const auto pace = connection == nullptr ? peers_.pace_of({owner.key, owner.boot}) : nullptr;
  const Pace* const known = connection != nullptr ? connection->pace.get() : pace.get();
  if (known == nullptr || !known->is_slow() || !batch_.has_elsewhere(owner, elsewhere_->choice)) return false;
  batch_.settle(owner, false, deadline_);
  return true;
}

bool Flights::may_go_elsewhere(const FetchBatch::Owner& owner) {
  return elsewhere_->may_look_again || batch_.has_elsewhere(owner, elsewhere_->choice);
}

Flights::Verdict Flights::judge(const FetchBatch::Owner& owner, Clock::time_point began) {
  const auto now = Clock::now();
  if (deadline_.at() - now < kTooLate) return {std::nullopt, Clock::time_point::max()};
  if (batch_.has_elsewhere(owner, elsewhere_->choice)) {
    const auto overdue = overdue_at(began, kPartsOfATry);
    if (now >= overdue) return {Hedges::kOverdue, now};
    if (elsewhere_->hedges.take()) return {Hedges::kLate, now};
    return {std::nullopt, overdue};
  }
  if (!elsewhere_->may_look_again) return {std::nullopt, Clock::time_point::max()};
  if (now < half_at_) return {std::nullopt, half_at_};
  const bool is_worth_it = batch_.has_cached(owner) || batch_.is_worth_another_look();
  if (is_worth_it) return {Hedges::kUnknown, now};
  return {std::nullopt, overdue_at(now, kPartsOfATry)};  // another owner's pages may be missed by then
}

bool Flights::leave_late(Flight& flight) {
  if (elsewhere_ == nullptr || Clock::now() < flight.late_at) return false;
  const FetchBatch::Owner& owner = *flight.owner;
  const Verdict verdict = judge(owner, flight.began);
  if (!verdict.leave) {
    flight.late_at = verdict.look_at;
    return false;
  }
  // When it has returned, nothing of this read is written to the pages' memory any more, as at a deadline;
  // what is asked of the next holder is written from then on.
  flight.transfer->wait(0);
  const Status worst = batch_.land(owner, leg_of(flight), flight.transfer->statuses());
  const std::shared_ptr<Pace> pace = flight.connection->pace;
  const auto took = Clock::now() - flight.began;
  pace->note(owner.nbytes, took);
  pace->was_late();
  settle(flight, worst, took, 1);  // it is late and no more: it is not left alone, where it alone has pages
  go_on(owner, *verdict.leave, HolderChoice::Fate::kLate);
  return true;
}

void Flights::leave_late_boarding() {
  if (elsewhere_ == nullptr) return;
  const std::vector<Boarding::Waiting> all = boarding_->waiting();
  for (const auto& [owner, began, late_at] : all) {
    if (Clock::now() < late_at) continue;
    const Verdict verdict = judge(*owner, began);
    if (!verdict.leave) {
      boarding_->look_at(owner, verdict.look_at);
    } else if (boarding_->leave(owner)) {
      if (const auto pace = peers_.pace_of({owner->key, owner->boot})) {
        pace->note_connected(Clock::now() - began);
        pace->was_late();
      }
      batch_.settle(*owner, false, deadline_);
      go_on(*owner, *verdict.leave, HolderChoice::Fate::kLate);
    }
  }
}

void Flights::go_on(const FetchBatch::Owner& owner, Hedges::Why why, HolderChoice::Fate fate) {
  if (elsewhere_ == nullptr || deadline_.passed()) return;
  if (why == Hedges::kUnknown) {
    batch_.give_up(owner);
    return elsewhere_->hedges.count(why);
  }
  std::vector<const FetchBatch::Owner*> rerouted;
  batch_.reroute(owner, fate, elsewhere_->choice, &rerouted);
  if (!rerouted.empty()) elsewhere_->hedges.count(why);
  for (const FetchBatch::Owner* next : rerouted) set_out(*next, false);
}

}  // namespace p2pkv
