#include "offers/stream_point.h"

#include <algorithm>
#include <set>

namespace p2pkv::offers {
namespace {

// How long is waited before it is looked whether anybody still wants the rows.
constexpr double kPointLookS = 0.02;
constexpr uint64_t kLastDefaultStream = 2;

}  // namespace

std::shared_ptr<StreamPoint> StreamPoint::mark(std::optional<uint64_t> stream, const PlacedRows& placed) {
  if (!stream || !placed.lie_on_devices()) return nullptr;
  auto point = std::make_shared<StreamPoint>();
  std::set<const cuda::Device*> marked;
  for (const auto& memory : placed.memories) {
    if (!memory->device || marked.contains(memory->device.get())) continue;
    if (!marked.empty() && *stream > kLastDefaultStream) break;  // is of one device
    marked.insert(memory->device.get());
    auto mark = memory->device->mark(*stream, &point->failure_);
    if (!mark) break;
    point->marks_.push_back(std::move(mark));
  }
  return point;
}

cuda::StreamOutcome StreamPoint::wait(const Deadline& deadline, const std::function<bool()>& gives_up,
                                      std::string* error) {
  auto outcome = cuda::StreamOutcome::kTimedOut;
  do {
    const Deadline next = Deadline::after(kPointLookS);
    outcome = look(next.at() < deadline.at() ? next : deadline, error);
  } while (outcome == cuda::StreamOutcome::kTimedOut && !deadline.passed() && !gives_up());
  return outcome;
}

cuda::StreamOutcome StreamPoint::look(const Deadline& deadline, std::string* error) {
  const std::lock_guard lock(mutex_);
  while (failure_.empty() && !marks_.empty()) {
    const auto outcome = marks_.back()->wait(deadline, &failure_);
    if (outcome == cuda::StreamOutcome::kTimedOut) return outcome;
    marks_.pop_back();
  }
  *error = failure_;
  return failure_.empty() ? cuda::StreamOutcome::kDone : cuda::StreamOutcome::kFailed;
}

}  // namespace p2pkv::offers
