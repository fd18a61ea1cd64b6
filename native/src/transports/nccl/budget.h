// How many communicators a transport may have: each takes memory of the device, and threads of NCCL's.
#pragma once

#include <atomic>
#include <memory>

namespace p2pkv::nccl {

class Budget {
 public:
  explicit Budget(int most) : most_(most) {}

  // One of them, given back when it goes.
  class Share {
   public:
    explicit Share(Budget* budget) : budget_(budget) {}
    ~Share() { budget_->n_taken_.fetch_sub(1); }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

   private:
    Budget* const budget_;
  };

  // Null if there is none left. The budget must outlive it.
  std::unique_ptr<Share> take() {
    if (n_taken_.fetch_add(1) < most_) return std::make_unique<Share>(this);
    n_taken_.fetch_sub(1);
    return nullptr;
  }
  int most() const { return most_; }

 private:
  const int most_;
  std::atomic<int> n_taken_{0};
};

}  // namespace p2pkv::nccl
