// Page-locked host memory through which bytes go on their way to and from devices, lent out a piece at a
// time.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/exact_blocks.h"
#include "cuda/device.h"

namespace p2pkv::cuda {

struct StagingStats {
  uint64_t nbytes = 0;
  uint64_t used_bytes = 0;
  uint64_t lost_bytes = 0;  // of used_bytes: abandoned, and never lent again
};

// Thread-safe. Its memory stays until the last loan is given back, and for ever if one was abandoned.
class Staging : public std::enable_shared_from_this<Staging> {
 public:
  static constexpr uint64_t kGranule = 65536;

  // A piece of the memory, given back when it goes.
  class Loan {
   public:
    Loan() = default;
    Loan(std::shared_ptr<Staging> owner, uint32_t granule, uint64_t nbytes)
        : owner_(std::move(owner)), granule_(granule), nbytes_(nbytes) {}
    ~Loan() { release(); }
    Loan(Loan&& other) noexcept
        : owner_(std::move(other.owner_)), granule_(other.granule_), nbytes_(other.nbytes_) {}
    Loan& operator=(Loan&& other) noexcept {
      if (this != &other) {
        release();
        owner_ = std::move(other.owner_);
        granule_ = other.granule_;
        nbytes_ = other.nbytes_;
      }
      return *this;
    }

    explicit operator bool() const { return owner_ != nullptr; }
    uint8_t* data() const { return owner_->base_ + granule_ * kGranule; }
    uint64_t nbytes() const { return nbytes_; }
    // Idempotent, as is `abandon`; then it is empty.
    void release();
    // After CopyOutcome::kLost: a device may write here at any time.
    void abandon();

   private:
    std::shared_ptr<Staging> owner_;
    uint32_t granule_ = 0;
    uint64_t nbytes_ = 0;
  };

  // Null, with the reason in `error`. Every page of the memory is touched and locked: keep it out of
  // deadlines.
  static std::shared_ptr<Staging> create(std::shared_ptr<Device> device, uint64_t nbytes, std::string* error);
  // The same, of memory that other processes of this host may map to read it, by `fd`.
  static std::shared_ptr<Staging> create_shared(std::shared_ptr<Device> device, uint64_t nbytes,
                                                std::string* error);
  // Over memory of somebody else's, a multiple of kGranule long, which `owner` keeps: a region that peers may
  // read, say.
  static std::shared_ptr<Staging> over(std::shared_ptr<Device> device, uint8_t* base, uint64_t nbytes,
                                       std::shared_ptr<void> owner, std::string* error);
  ~Staging();

  // `wanted` bytes or what there is of them, at least `least`, in the order of asking; waits for others to
  // give back. At most half of all unless `least` is more, so that two calls can work at once. Empty: the
  // deadline has passed, or `least` is more than `largest()`.
  Loan borrow(uint64_t least, uint64_t wanted, const Deadline& deadline);

  uint8_t* base() const { return base_; }
  uint64_t nbytes() const { return nbytes_; }
  // Its memfd, which stays its own; -1 if it is not shared.
  int fd() const { return fd_; }
  uint64_t largest() const { return kGranule * blocks_.n_granules(); }
  StagingStats stats();

 private:
  // `owner`: null if the memory is its own.
  Staging(std::shared_ptr<Device> device, uint8_t* base, uint64_t nbytes, std::shared_ptr<void> owner);

  // With the lock: kNone if there is not even `least`.
  uint32_t take(uint64_t least, uint64_t wanted);

  const std::shared_ptr<Device> device_;
  uint8_t* const base_;
  const uint64_t nbytes_;
  int fd_ = -1;
  std::shared_ptr<void> owner_;
  const pid_t pid_ = getpid();
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  ExactBlocks blocks_;
  std::list<const void*> waiting_;  // in the order of asking
  uint64_t lost_bytes_ = 0;
};

}  // namespace p2pkv::cuda
