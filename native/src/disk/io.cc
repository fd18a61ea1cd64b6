#include "disk/io.h"

#include <algorithm>

#include "disk/waiting.h"

namespace p2pkv::disk {
namespace {

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

}  // namespace

bool IoBatch::wait(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  return wait_until(done_, lock, deadline, [this] { return n_left_ == 0; });
}

void IoEngine::submit(std::shared_ptr<IoBatch> batch) {
  if (batch->ops.empty()) return;
  const int64_t now = now_ns();
  std::vector<Ticket> tickets;
  tickets.reserve(batch->ops.size());
  for (size_t i = 0; i < batch->ops.size(); ++i) tickets.push_back({batch, i, now});
  {
    const std::lock_guard lock(batch->mutex_);
    batch->n_left_ = batch->ops.size();
  }
  {
    const std::lock_guard lock(mutex_);
    n_under_way_ += tickets.size();
    for (const Ticket& ticket : tickets) {
      if (!ticket.op().is_write) reads_ns_.push_back(now);
    }
  }
  start(std::move(tickets));
}

void IoEngine::settle(Ticket ticket, int64_t result) {
  ticket.op().result = result;
  const bool is_write = ticket.op().is_write;
  {
    // notified under the lock: the waiter may destroy the batch as soon as it can take it
    const std::lock_guard lock(ticket.batch->mutex_);
    if (--ticket.batch->n_left_ == 0) ticket.batch->done_.notify_all();
  }
  // what the batch holds (buffers, pages being read) is given back before the engine counts as idle
  ticket.batch.reset();
  const std::lock_guard lock(mutex_);
  if (!is_write) {
    const auto read = std::find(reads_ns_.begin(), reads_ns_.end(), ticket.submitted_ns);
    *read = reads_ns_.back();
    reads_ns_.pop_back();
  }
  if (--n_under_way_ == 0) idle_.notify_all();
}

bool IoEngine::drain(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  return wait_until(idle_, lock, deadline, [this] { return n_under_way_ == 0; });
}

double IoEngine::oldest_read() const {
  const std::lock_guard lock(mutex_);
  if (reads_ns_.empty()) return 0;
  return static_cast<double>(now_ns() - *std::min_element(reads_ns_.begin(), reads_ns_.end())) * 1e-9;
}

}  // namespace p2pkv::disk
