#include "attach/engine_finds.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace p2pkv::attaching {

void EngineFinds::take(uint64_t engine, const std::vector<Key>& keys, const std::vector<Finds>& finds) {
  Said said{now_ns_(), {}};
  said.pages.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) said.pages.push_back({keys[i], finds[i]});
  const std::lock_guard lock(mutex_);
  forget_old();
  said_[engine] = std::move(said);
}

std::vector<EngineFinds::OfEngine> EngineFinds::list(double least_rate, size_t most) {
  std::vector<OfEngine> all;
  {
    const std::lock_guard lock(mutex_);
    forget_old();
    for (const auto& [engine, said] : said_) all.push_back({engine, said.pages});
  }
  // In floating point: the sum of what engines claim may be more than an integer holds.
  std::unordered_map<Key, double, KeyHash> together;
  for (const OfEngine& one : all) {
    for (const Page& page : one.pages) together[page.key] += static_cast<double>(page.finds.in_1000_s);
  }
  size_t longest = 0;
  for (OfEngine& one : all) {
    std::erase_if(one.pages, [&](const Page& page) { return together[page.key] < least_rate * 1000; });
    std::stable_sort(one.pages.begin(), one.pages.end(),
                     [](const Page& a, const Page& b) { return a.finds.in_1000_s > b.finds.in_1000_s; });
    longest = std::max(longest, one.pages.size());
  }
  std::unordered_set<Key, KeyHash> listed;
  size_t n_turns = 0;
  for (; n_turns < longest && listed.size() < most; ++n_turns) {
    for (const OfEngine& one : all) {
      if (n_turns < one.pages.size()) listed.insert(one.pages[n_turns].key);
    }
  }
  for (OfEngine& one : all) {
    if (n_turns < one.pages.size()) one.pages.resize(n_turns);
  }
  std::erase_if(all, [](const OfEngine& one) { return one.pages.empty(); });
  return all;
}

void EngineFinds::forget(uint64_t engine) {
  const std::lock_guard lock(mutex_);
  said_.erase(engine);
}

void EngineFinds::forget_old() {
  const int64_t now = now_ns_();
  std::erase_if(said_, [now](const auto& said) { return now - said.second.at_ns > kLastsNs; });
}

}  // namespace p2pkv::attaching
