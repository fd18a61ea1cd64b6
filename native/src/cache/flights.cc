#include "cache/flights.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "cache/boarding.h"

namespace p2pkv {
namespace {

// Seconds of a flight among several: a fast memory moves 10 MB in it, and a silent owner costs the others no
// more a round.
constexpr double kTurn = 0.001;

}  // namespace

Flights::Flights(FetchBatch& batch, PeerConnections& peers, const std::vector<LocalMemory>& memories,
                 Deadline deadline, bool check_sums, const Elsewhere* elsewhere)
    : batch_(batch),
      peers_(peers),
      memories_(memories),
      deadline_(deadline),
      check_sums_(check_sums),
      elsewhere_(elsewhere),
      half_at_(overdue_at(Clock::now(), 2)),
      boarding_(std::make_shared<Boarding>(peers)),
      taken_(peers.n_ways()) {}

Flights::~Flights() {
  boarding_->end();
  for (const Flight& flight : flying_) peers_.discard(flight.connection);
}

void Flights::read(const std::vector<FetchBatch::Owner>& owners) {
  for (const FetchBatch::Owner& owner : owners) set_out(owner, owners.size() == 1);
  land_all();
}

// Takes off to an owner, or has the way to it made; settles its pages if there is none.
void Flights::set_out(const FetchBatch::Owner& owner, bool is_alone) {
  const PeerId peer{owner.key, owner.boot};
  bool is_worth_connecting = false;
  auto connection = peers_.borrow_idle(peer, &is_worth_connecting);
  if (batch_.taker() != nullptr && (!connection || !is_mapped(*connection))) {
    // No time is spent on finding out what this peer has.
    if (connection) peers_.give_back(connection);
    return (void)batch_.settle(owner, false, deadline_);
  }
  if (elsewhere_ != nullptr && avoid_slow(owner, connection.get())) {
    if (connection) peers_.give_back(connection);
    return go_on(owner, Hedges::kSlow, HolderChoice::Fate::kLate);
  }
  if (!connection && !is_worth_connecting && elsewhere_ != nullptr) {
    batch_.settle(owner, false, deadline_);
    return go_on(owner, Hedges::kFailed, HolderChoice::Fate::kAway);
  }
  if (connection || !is_worth_connecting) return take_off(owner, std::move(connection));
  const bool may_leave = elsewhere_ != nullptr && may_go_elsewhere(owner);
  if (is_alone && !may_leave) return take_off(owner, peers_.borrow(peer, deadline_));
  const auto pace = may_leave ? peers_.pace_of(peer) : nullptr;
  const auto now = Clock::now();
  boarding_->begin(owner, deadline_, now,
                   pace ? late_at(owner, now, pace->patience_connecting()) : Clock::time_point::max());
}

void Flights::take_off(const FetchBatch::Owner& owner, PeerConnections::ConnectionPtr connection) {
  if (!connection) {
    batch_.settle(owner, false, deadline_);
    return go_on(owner, Hedges::kFailed, HolderChoice::Fate::kGone);
  }
  // Before anything is asked for: whatever happens then, what was asked for is called off.
  flying_.push_back({&owner, std::move(connection), 0, Clock::now(), nullptr});
  Flight& flight = flying_.back();
  if (elsewhere_ != nullptr) {
    flight.late_at = late_at(owner, flight.began, flight.connection->pace->patience(owner.nbytes));
  }
  read_leg(flight);
}

void Flights::land_all() {
  double turn = 0;
  // One that is alone, and is not left whatever happens, needs no turns.
  while (!boarding_->waiting().empty() || flying_.size() > (elsewhere_ != nullptr ? 0 : 1)) {
    if (seconds_until(deadline_.at()) <= 0) break;
    if (!boarding_->waiting().empty()) {
      board(flying_.empty() ? seconds_until(next_boarding_look()) : 0);
      leave_late_boarding();
    }
    for (auto flight = flying_.begin(); flight != flying_.end();) {
      const bool is_alone = flying_.size() == 1 && boarding_->waiting().empty();
      const double patience = is_alone ? seconds_until(next_look(*flight)) : turn;
      const bool is_down = patience > 0 ? flight->transfer->advance(patience) : flight->transfer->done();
      const bool is_over = is_down ? land(*flight) : leave_late(*flight);
      flight = is_over ? flying_.erase(flight) : std::next(flight);
    }
    turn = kTurn;
  }
  while (!flying_.empty()) {
    if (land(flying_.front())) flying_.pop_front();
  }
  for (const Boarding::Waiting& waiting : boarding_->waiting()) {
    batch_.settle(*waiting.owner, false, deadline_);
  }
}

void Flights::board(double timeout) {
  while (!boarding_->waiting().empty()) {
    auto boarded = boarding_->take(timeout);
    if (!boarded) return;
    take_off(*boarded->owner, std::move(boarded->borrowed.connection));
    timeout = 0;
  }
}

bool Flights::land(Flight& flight) {
  flight.transfer->wait(std::max(0.0, seconds_until(deadline_.at())));
  const FetchBatch::Owner& owner = *flight.owner;
  const Status worst = batch_.land(owner, leg_of(flight), flight.transfer->statuses());
  if (++flight.leg < owner.legs.size() && !ends_endpoint(worst)) {
    read_leg(flight);
    return false;
  }
  const auto took = Clock::now() - flight.began;
  if (batch_.taker() == nullptr) {  // what devices take says nothing of how fast the peer is
    if (worst == Status::kOk) flight.connection->pace->note(owner.nbytes, took);
    if (!ends_endpoint(worst)) flight.connection->pace->was_in_time();
  }
  const size_t n_taken = settle(flight, worst, took, 0);
  // Most flights bring all: their pages are not looked at for others who hold them.
  if (n_taken < owner.pages.size()) go_on(owner, Hedges::kFailed, HolderChoice::Fate::kGone);
  return true;
}

// Takes what a flight has brought that is over, and gives its connection back; returns how many pages came.
size_t Flights::settle(Flight& flight, Status worst, Clock::duration took, uint64_t n_late) {
  flight.transfer.reset();
  const FetchBatch::Taken taken = batch_.settle(*flight.owner, check_sums_, deadline_);
  landed_.push_back(
      {flight.connection->way, taken.nbytes,
       std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - flight.began).count()});
  const double seconds = std::chrono::duration<double>(took).count();
  peers_.release(flight.connection, worst, {taken.n_pages, taken.nbytes, seconds, n_late});
  taken_[flight.connection->way].n_pages += taken.n_pages;
  taken_[flight.connection->way].nbytes += taken.nbytes;
  if (elsewhere_ != nullptr) elsewhere_->hedges.note_read();
  return taken.n_pages;
}

// Whether pages can be taken out of the peer's memory without anything of the peer.
bool Flights::is_mapped(const Connection& connection) {
  Lender* lender = connection.endpoint->lender();
  return lender != nullptr && connection.remote && lender->maps(*connection.remote);
}

FetchBatch::Leg Flights::leg_of(const Flight& flight) {
  return {flight.owner->legs[flight.leg], flight.connection->endpoint->lender() != nullptr};
}

// Starts reading those pieces of an owner's pages that lie in one registered memory.
void Flights::read_leg(Flight& flight) {
  const FetchBatch::Leg leg = leg_of(flight);
  const LocalMemory& memory = memories_.at(static_cast<size_t>(leg.memory));
  FetchBatch::Plan plan = batch_.plan(*flight.owner, leg, memory.address);
  const Connection& connection = *flight.connection;
  std::shared_ptr<MemoryRegion> local = memory.regions.at(connection.way);
  if (plan.taken.empty()) {
    flight.transfer = connection.endpoint->read(std::move(local), connection.remote, std::move(plan.spans),
                                                std::move(plan.words));
    return;
  }
  // The batch outlives the transfer: what is not over when a flight ends is called off.
  Takes takes{
      std::move(plan.taken), [this](size_t page, const uint8_t* from) { batch_.take_lent(page, from); }, {}};
  if (PageTaker* taker = batch_.taker())
    takes.land = [taker](const MappedBytes& memory) { taker->land(memory); };
  flight.transfer = connection.endpoint->lender()->lend(
      std::move(local), connection.remote, std::move(plan.spans), std::move(plan.words), std::move(takes));
}

double Flights::seconds_until(Clock::time_point at) {
  return std::chrono::duration<double>(at - Clock::now()).count();
}

}  // namespace p2pkv
