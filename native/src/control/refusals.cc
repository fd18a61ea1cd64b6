#include "control/refusals.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace p2pkv {
namespace {

// A line of a log has room for so many.
constexpr size_t kMaxHosts = 8;

}  // namespace

void Refusals::note(const std::string& host) {
  const std::lock_guard lock(mutex_);
  ++count_;
  if (!host.empty() && hosts_.size() < kMaxHosts &&
      std::find(hosts_.begin(), hosts_.end(), host) == hosts_.end())
    hosts_.push_back(host);
  changed_.notify_all();
}

uint64_t Refusals::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

std::optional<Refusals::Report> Refusals::take(double timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(timeout),
                    [&] { return woken_ || count_ != reported_; });
  woken_ = false;
  if (count_ == reported_) return std::nullopt;
  const uint64_t since = count_ - std::exchange(reported_, count_);
  return Report{since, std::exchange(hosts_, {})};
}

void Refusals::wake() {
  const std::lock_guard lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

}  // namespace p2pkv
