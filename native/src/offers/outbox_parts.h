// What an Outbox is made of; for its own files.
#pragma once

#include <algorithm>

#include "offers/outbox.h"
#include "offers/stream_point.h"

namespace p2pkv::offers {

// They return what copies of all rows take, one behind the other, each padded, and the copies from devices.
uint64_t copied_nbytes(const PlacedRows& placed);
std::vector<cuda::DeviceCopy> copies_to(uint8_t* host, const PlacedRows& placed);

// Rows that are told, judged and ended together: what a receiver knows as an offer.
class Outbox::Outgoing final : public Offer, public std::enable_shared_from_this<Outbox::Outgoing> {
 public:
  Outgoing(std::shared_ptr<Outbox> home, const Rows& rows, uint32_t first_row, PlacedRows placed,
           const Deadline& lease, std::shared_ptr<StreamPoint> point = nullptr)
      : request(rows.request),
        first_row(first_row),
        lease(lease),
        placed(std::move(placed)),
        device(this->placed.device_of(this->placed.rows.front())),
        point(std::move(point)),
        statuses_now(this->placed.rows.size(), RowStatus::kPending),
        home_(std::move(home)) {}

  bool done() override;
  void wait(const Deadline& deadline) override;
  void withdraw(RowStatus reason) override;
  std::optional<Stowed> stow() override { return home_->stow(shared_from_this()); }
  RowStatuses statuses() override;

  uint32_t n_rows() const { return static_cast<uint32_t>(placed.rows.size()); }
  bool was_told(const Link& link) const {
    return std::any_of(told.begin(), told.end(),
                       [&link](const auto& one) { return one.lock().get() == &link; });
  }
  // Its memory is the caller's again.
  bool is_over() const { return is_done && home_->copying_.get() != this && !home_->stowing_.contains(this); }
  // Whether peers can't read it where it lies now, unless they read devices.
  bool lies_on_device() const { return device && !stowed; }

  // Never change once it is offered.
  uint64_t to = 0;
  std::weak_ptr<Link> link;  // to that node
  // The parts of the caller's offer, this one among them; null: it is all of it,
  // or of devices.
  std::shared_ptr<const std::vector<std::weak_ptr<Outgoing>>> parts;
  const std::string request;
  const uint32_t first_row;
  const Deadline lease;
  const PlacedRows placed;
  const std::shared_ptr<cuda::Device> device;  // that all of it lies on; null: peers read it where it lies
  const std::shared_ptr<StreamPoint> point;    // null: nothing to wait for
  // Guarded by the outbox's lock.
  uint64_t id = 0;
  RowStatuses statuses_now;
  bool is_done = false;
  std::vector<std::weak_ptr<Link>> told;
  cuda::Staging::Loan staged;                   // row after row, padded: what peers read instead
  std::shared_ptr<Block> stowed;                // the same for good: its own memory is the caller's
  bool is_ready = false;                        // its stream is done: who reads it where it lies may be told
  std::vector<std::weak_ptr<Link>> staged_for;  // who does not, after all
  std::condition_variable settled;

 private:
  const std::shared_ptr<Outbox> home_;
};

// A caller's offer whose rows are told in several parts.
class Outbox::Parted final : public Offer {
 public:
  explicit Parted(std::vector<std::shared_ptr<Outgoing>> parts) : parts_(std::move(parts)) {}

  bool done() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->done(); });
  }
  void wait(const Deadline& deadline) override {
    for (const auto& part : parts_) part->wait(deadline);
  }
  void withdraw(RowStatus reason) override {
    for (const auto& part : parts_) part->withdraw(reason);
  }
  std::optional<Stowed> stow() override {
    Stowed all;
    for (const auto& part : parts_) {
      if (const auto some = part->stow()) {
        all.spans.insert(all.spans.end(), some->spans.begin(), some->spans.end());
        all.rooms.insert(all.rooms.end(), some->rooms.begin(), some->rooms.end());
      } else if (part->done()) {
        all.spans.resize(all.spans.size() + part->n_rows(), kNotStowed);
      } else {
        return std::nullopt;
      }
    }
    if (all.rooms.empty()) return std::nullopt;
    return all;
  }
  RowStatuses statuses() override {
    RowStatuses all;
    for (const auto& part : parts_) {
      const RowStatuses some = part->statuses();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }

 private:
  const std::vector<std::shared_ptr<Outgoing>> parts_;
};

}  // namespace p2pkv::offers
