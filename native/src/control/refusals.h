// Who was not let in: connections whose handshake failed because they have another key, or none.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace p2pkv {

// Thread-safe. It remembers a few addresses only, so that a flood of strangers costs no memory.
class Refusals {
 public:
  struct Report {
    uint64_t count;                  // since the report before
    std::vector<std::string> hosts;  // some of those they came from
  };

  // `host` is a number, and empty if it is not known.
  void note(const std::string& host);
  uint64_t count() const;
  // Waits for somebody to be refused since the last report, for at most `timeout` seconds or until `wake`.
  std::optional<Report> take(double timeout);
  // Makes the `take` under way, or the next one, return.
  void wake();

 private:
  mutable std::mutex mutex_;  // guards everything below it
  std::condition_variable changed_;
  uint64_t count_ = 0;
  uint64_t reported_ = 0;
  bool woken_ = false;
  std::vector<std::string> hosts_;
};

}  // namespace p2pkv
