#include "cuda/lockable.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

namespace p2pkv::cuda {
namespace {

std::atomic<uint64_t> n_locked{0};  // bytes of all mappings

}  // namespace

Lockable::Lockable(const uint8_t* base, uint64_t nbytes, bool is_read_only, std::shared_ptr<Device> device)
    : base_(base),
      nbytes_(nbytes),
      is_read_only_(is_read_only),
      device_(std::move(device)),
      chunks_((nbytes + kChunk - 1) / kChunk) {}

Lockable::~Lockable() {
  for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (chunks_[chunk] != State::kLocked) continue;
    device_->unlock_memory(const_cast<uint8_t*>(base_) + chunk * kChunk);
    n_locked.fetch_sub(nbytes_of(chunk), std::memory_order_relaxed);
  }
}

uint64_t Lockable::nbytes_of(size_t chunk) const {
  return std::min(kChunk, nbytes_ - chunk * kChunk);
}

bool Lockable::lock(const uint8_t* from, uint64_t nbytes, Budget* budget) {
  const auto first = static_cast<uint64_t>(from - base_);
  if (nbytes == 0 || first >= nbytes_ || nbytes > nbytes_ - first) return false;
  const std::lock_guard guard(mutex_);
  for (size_t chunk = first / kChunk; chunk <= (first + nbytes - 1) / kChunk; ++chunk) {
    if (chunks_[chunk] != State::kLocked && !lock_chunk(chunk, budget)) return false;
  }
  return true;
}

bool Lockable::lock_chunk(size_t chunk, Budget* budget) {
  const uint64_t nbytes = nbytes_of(chunk);
  if (chunks_[chunk] == State::kRefused || budget->left < nbytes) return false;
  const uint64_t before = n_locked.fetch_add(nbytes, std::memory_order_relaxed);
  std::string ignored;  // it is staged then, as if devices could not reach it
  const bool is_locked =
      before + nbytes <= budget->most &&
      device_->lock_memory(const_cast<uint8_t*>(base_) + chunk * kChunk, nbytes, &ignored, is_read_only_);
  budget->left -= nbytes;
  if (is_locked) {
    chunks_[chunk] = State::kLocked;
    return true;
  }
  n_locked.fetch_sub(nbytes, std::memory_order_relaxed);
  if (before + nbytes <= budget->most) chunks_[chunk] = State::kRefused;
  return false;
}

}  // namespace p2pkv::cuda
