#include "relay/event_stream.h"

#include <algorithm>
#include <cstring>

namespace p2pkv {
namespace {

constexpr std::string_view kDone = "data: [DONE]";
constexpr size_t kLastBytes = 64;  // of some events, in which their last is looked for: kDone and line ends

// Returns where the last event in `data` ends that ends at or behind `from`, or 0.
size_t last_end(std::string_view data, size_t from) {
  size_t end = data.size();
  while (end > from) {
    const void* found = memrchr(data.data() + from, '\n', end - from);
    if (found == nullptr) return 0;
    const size_t at = static_cast<size_t>(static_cast<const char*>(found) - data.data());
    const std::string_view before = data.substr(0, at);
    if (before.ends_with('\n') || before.ends_with("\r\n\r")) return at + 1;
    end = at;
  }
  return 0;
}

// Whether one of the last lines is kDone. Within the strings of JSON no line begins.
bool ends_stream(std::string_view events) {
  for (size_t at = events.size() - std::min(events.size(), kLastBytes); at < events.size(); ++at) {
    if ((at == 0 || events[at - 1] == '\n') && events.substr(at).starts_with(kDone)) return true;
  }
  return false;
}

}  // namespace

bool EventStream::feed(std::string_view data, std::string& events) {
  if (held_.empty()) {  // most often: a read has whole events
    const size_t end = last_end(data, 0);
    is_done_ = is_done_ || ends_stream(data.substr(0, end));
    events.append(data.substr(0, end));
    held_.assign(data.substr(end));
    return held_.size() <= kMaxEvent;
  }
  const size_t seen = held_.size();
  held_.append(data);
  const size_t end = last_end(held_, seen);
  if (end > 0) {
    const std::string_view whole = std::string_view(held_).substr(0, end);
    is_done_ = is_done_ || ends_stream(whole);
    events.append(whole);
    held_.erase(0, end);
  }
  return held_.size() <= kMaxEvent;
}

}  // namespace p2pkv
