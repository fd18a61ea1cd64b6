#include "transports/ucx/line_ender.h"

namespace p2pkv::ucx {

bool LineEnder::start(std::string* error) {
  if (thread_.start("p2pkv-ucx-end", [this] { loop(); })) return true;
  *error = "the system has no thread to give";
  return false;
}

void LineEnder::take(ThreadOwner<Line> line) {
  const std::lock_guard lock(mutex_);
  if (is_closing_) return;  // `line` ends here
  lines_.push_back(std::move(line));
  changed_.notify_one();
}

void LineEnder::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    changed_.notify_one();
  }
  thread_.join();
}

void LineEnder::loop() {
  for (;;) {
    std::vector<ThreadOwner<Line>> lines;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return is_closing_ || !lines_.empty(); });
      if (lines_.empty()) return;
      lines.swap(lines_);
    }
  }
}

}  // namespace p2pkv::ucx
