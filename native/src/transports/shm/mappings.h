// The peers' regions a process has mapped, shared by all endpoints of its shm transport.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/thread.h"
#include "page/region.h"

namespace p2pkv::shm {

// A mapping lives for as long as an endpoint uses it. A thread maps the pages of new ones in ahead of their
// first use, a step at a time, so that neither a deadline nor an unmapping waits for it. Another unmaps those
// that something is kept with: to unlock what devices could reach takes a driver long, and it is the last
// call to a peer that has gone which lets go.
class Mappings {
 public:
  // It takes 0.2 ms, for which no thread of the process can map or unmap anything.
  static constexpr size_t kPrefaultStep = 2 << 20;

  Mappings() = default;
  ~Mappings() { close(); }
  bool start(std::string* error);
  void close();

  // The mapping of a region of the owner that listens on `socket_name`, made from `fd` unless there is one
  // already. Null, with the reason in `error`.
  std::shared_ptr<ReadOnlyMapping> get(const std::string& socket_name, uint32_t region, int fd, size_t nbytes,
                                       std::string* error);

 private:
  struct Dying {
    std::mutex mutex;  // guards all below
    std::condition_variable changed;
    std::deque<std::unique_ptr<ReadOnlyMapping>> mappings;
    bool is_served = false;  // by the thread
    bool is_closing = false;
  };

  void run();
  static void unmap(Dying& dying);
  static void end(Dying& dying, std::unique_ptr<ReadOnlyMapping> mapping);

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::map<std::pair<std::string, uint32_t>, std::weak_ptr<ReadOnlyMapping>> known_;
  std::deque<std::weak_ptr<ReadOnlyMapping>> to_prefault_;
  bool is_closing_ = false;
  NamedThread thread_;
  const std::shared_ptr<Dying> dying_ = std::make_shared<Dying>();  // a mapping may outlive all this
  NamedThread unmapping_;
};

}  // namespace p2pkv::shm
