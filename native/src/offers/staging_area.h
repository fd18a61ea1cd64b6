// Page-locked host memory between devices and the transports: rows of devices lie in it while peers read
// them, or are read into it before they are copied to their device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/staging.h"
#include "offers/offer_messages.h"
#include "offers/row_memories.h"
#include "offers/transfers.h"

namespace p2pkv::offers {

// Thread-safe. Known to every transport of the node, all of which read what is shared memory.
class StagingArea {
 public:
  // What a row takes of a loan. Only of rows whose sum was checked when they came.
  static uint64_t padded(uint64_t nbytes) {
    return (nbytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  }

  // `is_readable`: by peers. Null, with the reason in `error`. Takes about 0.3 ms a MiB: its pages are
  // touched and locked.
  static std::shared_ptr<StagingArea> create(const std::shared_ptr<cuda::Device>& device, uint64_t nbytes,
                                             bool is_readable, const std::vector<Transfers::Way>& ways,
                                             std::string* error);
  ~StagingArea() { close(); }

  // Blocks for room until the deadline, or until `gives_up` says so after `wake`. Empty: no room.
  cuda::Staging::Loan borrow(uint64_t least, uint64_t wanted, const Deadline& deadline,
                             const std::function<bool()>& gives_up);
  // At once or not at all.
  cuda::Staging::Loan try_borrow(uint64_t nbytes);
  // Gives back, and lets those who wait look again.
  void release(cuda::Staging::Loan lease);
  void wake();

  // As a row's local or remote memory. Its id is set when it is registered.
  const std::shared_ptr<const RowMemory>& memory() const { return memory_; }
  void set_memory(std::shared_ptr<const RowMemory> memory) { memory_ = std::move(memory); }
  uint64_t offset_of(const cuda::Staging::Loan& loan) const {
    return static_cast<uint64_t>(loan.data() - staging_->base());
  }
  // The most that one loan can be of, and the most that one should be of, so that others find room.
  uint64_t largest() const { return staging_->largest(); }
  uint64_t piece_nbytes() const;
  uint64_t used_nbytes() { return staging_->stats().used_bytes; }
  // From here on nothing is read from or into it.
  void close();

 private:
  StagingArea(std::shared_ptr<cuda::Staging> staging, std::shared_ptr<const RowMemory> memory)
      : staging_(std::move(staging)), memory_(std::move(memory)) {}

  const std::shared_ptr<cuda::Staging> staging_;
  std::shared_ptr<const RowMemory> memory_;
  std::mutex mutex_;  // held to look for room and to tell of it, so that nobody sleeps through it
  std::condition_variable changed_;
};

}  // namespace p2pkv::offers
