#include "cache/flights.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

namespace p2pkv {
namespace {

// Seconds of a flight among several: a fast memory moves 10 MB in it, and a silent owner costs the others no
// more a round.
constexpr double kTurn = 0.001;

}  // namespace

// Connections that are being made for one fetch. What comes when it is over goes back, for others to use.
class Flights::Boarding : public std::enable_shared_from_this<Flights::Boarding> {
 public:
  struct Boarded {
    const FetchBatch::Owner* owner;
    PeerConnections::Borrowed borrowed;
  };

  explicit Boarding(PeerConnections& peers) : peers_(peers) {}

  // Has the owner connected to; `take` tells when it is.
  void begin(const FetchBatch::Owner& owner, const Deadline& deadline) {
    waiting_.push_back(&owner);
    const auto then = [self = shared_from_this(), &owner](PeerConnections::Borrowed borrowed) {
      self->connected(owner, std::move(borrowed));
    };
    peers_.borrow_later({owner.key, owner.boot}, deadline, then);
  }

  // Who is connected now, or can't be; none if that takes longer. Throws what connecting threw.
  std::optional<Boarded> take(double timeout) {
    std::unique_lock lock(mutex_);
    const Deadline deadline = Deadline::after(timeout);
    if (!came_.wait_until(lock, deadline.at(), [this] { return !ready_.empty(); })) return std::nullopt;
    Boarded boarded = std::move(ready_.front());
    ready_.pop_front();
    std::erase(waiting_, boarded.owner);
    if (boarded.borrowed.error) std::rethrow_exception(boarded.borrowed.error);
    return boarded;
  }

  const std::vector<const FetchBatch::Owner*>& waiting() const { return waiting_; }

  // Waits for nobody any more.
  void end() {
    std::deque<Boarded> unused;
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
      unused.swap(ready_);
    }
    for (const Boarded& boarded : unused) {
      if (boarded.borrowed.connection) peers_.give_back(boarded.borrowed.connection);
    }
  }

 private:
  void connected(const FetchBatch::Owner& owner, PeerConnections::Borrowed borrowed) {
    {
      const std::lock_guard lock(mutex_);
      if (!is_over_) {
        ready_.push_back({&owner, std::move(borrowed)});
        came_.notify_one();
        return;
      }
    }
    if (borrowed.connection) peers_.give_back(borrowed.connection);
  }

  PeerConnections& peers_;
  std::vector<const FetchBatch::Owner*> waiting_;  // of the thread that fetches
  std::mutex mutex_;                               // guards all below
  std::condition_variable came_;
  std::deque<Boarded> ready_;
  bool is_over_ = false;
};

Flights::Flights(FetchBatch& batch, PeerConnections& peers, const std::vector<LocalMemory>& memories,
                 Deadline deadline, bool check_sums)
    : batch_(batch),
      peers_(peers),
      memories_(memories),
      deadline_(deadline),
      check_sums_(check_sums),
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
  if (is_alone) return take_off(owner, peers_.borrow(peer, deadline_));
  bool is_worth_connecting = false;
  auto connection = peers_.borrow_idle(peer, &is_worth_connecting);
  if (is_worth_connecting) return boarding_->begin(owner, deadline_);
  take_off(owner, std::move(connection));
}

void Flights::take_off(const FetchBatch::Owner& owner, PeerConnections::ConnectionPtr connection) {
  if (!connection) {
    batch_.settle(owner, false, deadline_);
    return;
  }
  // Before anything is asked for: whatever happens then, what was asked for is called off.
  flying_.push_back({&owner, std::move(connection), 0, Clock::now(), nullptr});
  read_leg(flying_.back());
}

void Flights::land_all() {
  double turn = 0;
  while (!boarding_->waiting().empty() || flying_.size() > 1) {
    const double left = seconds_left();
    if (left <= 0) break;
    board(flying_.empty() ? left : 0);
    for (auto flight = flying_.begin(); flight != flying_.end();) {
      const bool is_down = turn > 0 ? flight->transfer->advance(turn) : flight->transfer->done();
      flight = is_down && land(*flight) ? flying_.erase(flight) : std::next(flight);
    }
    turn = kTurn;
  }
  while (!flying_.empty()) {
    if (land(flying_.front())) flying_.pop_front();
  }
  for (const FetchBatch::Owner* owner : boarding_->waiting()) batch_.settle(*owner, false, deadline_);
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
  flight.transfer->wait(std::max(0.0, seconds_left()));
  const FetchBatch::Owner& owner = *flight.owner;
  const Status worst = batch_.land(owner, leg_of(flight), flight.transfer->statuses());
  if (++flight.leg < owner.legs.size() && !ends_endpoint(worst)) {
    read_leg(flight);
    return false;
  }
  flight.transfer.reset();
  const FetchBatch::Taken taken = batch_.settle(owner, check_sums_, deadline_);
  const auto took = Clock::now() - flight.began;
  const double seconds = std::chrono::duration<double>(took).count();
  landed_.push_back({flight.connection->way, taken.nbytes,
                     std::chrono::duration_cast<std::chrono::nanoseconds>(took).count()});
  peers_.release(flight.connection, worst, {taken.n_pages, taken.nbytes, seconds});
  taken_[flight.connection->way].n_pages += taken.n_pages;
  taken_[flight.connection->way].nbytes += taken.nbytes;
  return true;
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
  if (plan.unpacked.empty()) {
    flight.transfer = connection.endpoint->read(std::move(local), connection.remote, std::move(plan.spans),
                                                std::move(plan.words));
    return;
  }
  // The batch outlives the transfer: what is not over when a flight ends is called off.
  Takes takes{std::move(plan.unpacked),
              [this](size_t page, const uint8_t* from) { batch_.unpack_lent(page, from); }};
  flight.transfer = connection.endpoint->lender()->lend(
      std::move(local), connection.remote, std::move(plan.spans), std::move(plan.words), std::move(takes));
}

double Flights::seconds_left() const {
  return std::chrono::duration<double>(deadline_.at() - Clock::now()).count();
}

}  // namespace p2pkv
