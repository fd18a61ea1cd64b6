// A queue pair that is connected to itself: its rail reads memory of this process and brings it to a page of
// host memory. For memory of devices, of which the kernel says that it is registered, and of which a rail may
// still hold back what it has written: by the rules of PCIe its own read pushes that before it.
//
// The rail sends the bytes to itself, instead of an RDMA READ from itself: both read the memory over PCIe,
// but what an RDMA READ may read any peer's may that guesses the key.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transports/verbs/memory.h"
#include "transports/verbs/queue_pair.h"

namespace p2pkv::verbs {

// One thread at a time. One read at a time.
class Loopback {
 public:
  static constexpr size_t kMostBytes = 64;
  // Entries that it needs of its completion queue.
  static constexpr uint32_t kCompletions = 2;

  // Reports to `completions`, which outlive it, always as `id`. Null, with the reason in `error`.
  static std::unique_ptr<Loopback> create(std::shared_ptr<Rail> rail, CompletionQueue& completions,
                                          uint64_t id, std::string* error);

  // Begins to read `nbytes` at `address`, of a region of this rail's with that key. False if the pair takes
  // nothing any more.
  bool begin(uint64_t address, uint32_t key, uint32_t nbytes);
  // To be told of each completion with its id that was good; true: it was the last of what was begun.
  bool completed() { return --n_awaited_ == 0; }
  bool is_under_way() const { return n_awaited_ > 0; }
  // What was read last.
  const uint8_t* landed() const { return page_.base(); }

 private:
  Loopback() = default;

  const Pages page_{kMostBytes};
  std::shared_ptr<Registration> landing_;
  std::unique_ptr<QueuePair> pair_;  // destroyed before what it lands in
  uint64_t id_ = 0;
  uint32_t n_awaited_ = 0;
};

}  // namespace p2pkv::verbs
