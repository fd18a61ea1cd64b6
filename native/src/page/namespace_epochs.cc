#include "page/namespace_epochs.h"

#include <algorithm>
#include <utility>

namespace p2pkv {
namespace {

constexpr Key kEvery{};

}  // namespace

void NamespaceEpochs::follow(std::vector<Key> names) {
  const std::lock_guard lock(mutex_);
  followed_ = std::move(names);
  own_.store(greatest_of(followed_), std::memory_order_release);
}

void NamespaceEpochs::on_raised(std::function<void()> take_back) {
  const std::lock_guard raising(raising_);
  const std::lock_guard lock(mutex_);
  take_back_.swap(take_back);  // what was there may lead to Python: it goes when nothing is locked
}

void NamespaceEpochs::show_version(uint64_t* word) {
  const std::lock_guard lock(mutex_);
  shown_ = word;
  show();
}

void NamespaceEpochs::keep(std::function<void(const std::vector<NamespaceEpoch>&)> keep) {
  const std::lock_guard raising(raising_);
  const std::lock_guard lock(mutex_);
  keep_.swap(keep);
  if (keep_) keep_(all_known());
}

void NamespaceEpochs::show() const {
  if (shown_ != nullptr) __atomic_store_n(shown_, version(), __ATOMIC_SEQ_CST);
}

bool NamespaceEpochs::raise(const NamespaceEpoch* epochs, size_t n) {
  if (std::any_of(epochs, epochs + n, [](const NamespaceEpoch& told) { return told.epoch >= kEnd; }))
    return false;
  const std::lock_guard raising(raising_);
  std::function<void()> take_back;
  {
    const std::lock_guard lock(mutex_);
    bool is_news = false;
    for (size_t i = 0; i < n; ++i) is_news |= merge(epochs[i]);
    if (!is_news) return true;
    if (keep_) keep_(all_known());  // before anybody is told that it is known here
    version_.fetch_add(1, std::memory_order_release);
    show();
    const uint64_t now = greatest_of(followed_);
    if (now == own_.load(std::memory_order_relaxed)) return true;
    // before the pages are taken back: what is published from here on is of the new epoch
    own_.store(now, std::memory_order_release);
    ++n_raised_;
    take_back = take_back_;
  }
  if (take_back) take_back();
  return true;
}

// Returns whether that was news.
bool NamespaceEpochs::merge(const NamespaceEpoch& told) {
  if (told.epoch <= of_all_) return false;
  if (told.name_space == kEvery) {
    of_all_ = told.epoch;
    return true;
  }
  uint64_t& epoch = epochs_[told.name_space];
  if (told.epoch <= epoch) return false;
  epoch = told.epoch;
  if (epochs_.size() > kMost) {
    const auto lowest = std::min_element(epochs_.begin(), epochs_.end(),
                                         [](const auto& a, const auto& b) { return a.second < b.second; });
    of_all_ = lowest->second;
    epochs_.erase(lowest);
  }
  return true;
}

uint64_t NamespaceEpochs::greatest(const std::vector<Key>& names) const {
  const std::lock_guard lock(mutex_);
  return greatest_of(names);
}

uint64_t NamespaceEpochs::greatest_of(const std::vector<Key>& names) const {
  uint64_t greatest = of_all_;
  for (const Key& name : names) {
    const auto found = epochs_.find(name);
    if (found != epochs_.end()) greatest = std::max(greatest, found->second);
  }
  return greatest;
}

std::vector<NamespaceEpoch> NamespaceEpochs::all() const {
  const std::lock_guard lock(mutex_);
  return all_known();
}

std::vector<NamespaceEpoch> NamespaceEpochs::all_known() const {
  std::vector<NamespaceEpoch> out;
  if (of_all_ > 0) out.push_back({kEvery, of_all_});
  for (const auto& [name, epoch] : epochs_) out.push_back({name, epoch});
  return out;
}

}  // namespace p2pkv
