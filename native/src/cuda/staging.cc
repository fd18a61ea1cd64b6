#include "cuda/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "page/region.h"

namespace p2pkv::cuda {
namespace {

uint64_t whole_granules(uint64_t nbytes) {
  constexpr uint64_t kGranule = Staging::kGranule;
  return std::max<uint64_t>(1, (nbytes + kGranule - 1) / kGranule) * kGranule;
}

}  // namespace

std::shared_ptr<Staging> Staging::create(std::shared_ptr<Device> device, uint64_t nbytes,
                                         std::string* error) {
  nbytes = whole_granules(nbytes);
  // Mapped here and locked by the driver, not allocated by it: so it stays when the engine resets the device.
  void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    *error = "cannot allocate " + std::to_string(nbytes) +
             " bytes to stage device memory: " + std::strerror(errno);
    return nullptr;
  }
  // A forked child that wrote to it would leave one of the two with pages that the device does not know.
  madvise(base, nbytes, MADV_DONTFORK);
  if (!device->lock_memory(base, nbytes, error)) {
    munmap(base, nbytes);
    return nullptr;
  }
  return std::shared_ptr<Staging>(
      new Staging(std::move(device), static_cast<uint8_t*>(base), nbytes, nullptr));
}

std::shared_ptr<Staging> Staging::create_shared(std::shared_ptr<Device> device, uint64_t nbytes,
                                                std::string* error) {
  const std::shared_ptr<SharedRegion> region = SharedRegion::create(whole_granules(nbytes), error);
  if (!region) return nullptr;
  auto staging = over(std::move(device), region->base(), region->nbytes(), region, error);
  if (staging) staging->fd_ = region->fd();
  return staging;
}

std::shared_ptr<Staging> Staging::over(std::shared_ptr<Device> device, uint8_t* base, uint64_t nbytes,
                                       std::shared_ptr<void> owner, std::string* error) {
  if (!device->lock_memory(base, nbytes, error)) return nullptr;
  return std::shared_ptr<Staging>(new Staging(std::move(device), base, nbytes, std::move(owner)));
}

Staging::Staging(std::shared_ptr<Device> device, uint8_t* base, uint64_t nbytes, std::shared_ptr<void> owner)
    : device_(std::move(device)),
      base_(base),
      nbytes_(nbytes),
      owner_(std::move(owner)),
      blocks_(static_cast<uint32_t>(nbytes / kGranule)) {}

Staging::~Staging() {
  // A forked child never had it: what lies there is the child's own, and the owner would unmap it.
  if (getpid() != pid_) {
    [[maybe_unused]] const auto& forgotten = *new std::shared_ptr<void>(std::move(owner_));
    return;
  }
  // A device may still write there: better lost than somebody else's.
  if (lost_bytes_ > 0) {
    static std::mutex keeping;
    static auto& kept = *new std::vector<std::shared_ptr<void>>;  // for ever
    const std::lock_guard lock(keeping);
    kept.push_back(std::move(owner_));
    return;
  }
  device_->unlock_memory(base_);
  if (owner_ == nullptr) munmap(base_, nbytes_);
}

Staging::Loan Staging::borrow(uint64_t least, uint64_t wanted, const Deadline& deadline) {
  if (least > largest()) return {};
  std::unique_lock lock(mutex_);
  const int here = 0;
  const auto place = waiting_.insert(waiting_.end(), &here);
  uint32_t granule = ExactBlocks::kNone;
  const bool is_in_time = changed_.wait_until(lock, deadline.at(), [&] {
    if (waiting_.front() != &here) return false;
    granule = take(least, wanted);
    return granule != ExactBlocks::kNone;
  });
  waiting_.erase(place);
  changed_.notify_all();  // the next in the row may be served, or be the first now
  if (!is_in_time) return {};
  return Loan(shared_from_this(), granule, kGranule * blocks_.length_of(granule));
}

uint32_t Staging::take(uint64_t least, uint64_t wanted) {
  const auto granules_for = [](uint64_t nbytes) {
    return (std::max<uint64_t>(nbytes, 1) + kGranule - 1) / kGranule;
  };
  const auto fewest = static_cast<uint32_t>(granules_for(least));
  const uint32_t half = std::max(blocks_.n_granules() / 2, 1u);
  const uint32_t most =
      std::max(fewest, static_cast<uint32_t>(std::min<uint64_t>(granules_for(wanted), half)));
  if (const uint32_t block = blocks_.allocate(most); block != ExactBlocks::kNone) return block;
  const uint32_t longest = blocks_.find_longest();
  if (longest == ExactBlocks::kNone || blocks_.length_of(longest) < fewest) return ExactBlocks::kNone;
  blocks_.take(longest, std::min(most, blocks_.length_of(longest)));
  return longest;
}

StagingStats Staging::stats() {
  const std::lock_guard lock(mutex_);
  return {nbytes_, nbytes_ - kGranule * blocks_.n_free(), lost_bytes_};
}

void Staging::Loan::release() {
  if (owner_ == nullptr) return;
  {
    const std::lock_guard lock(owner_->mutex_);
    owner_->blocks_.release(granule_);
    owner_->changed_.notify_all();
  }
  owner_.reset();
}

void Staging::Loan::abandon() {
  if (owner_ == nullptr) return;
  {
    const std::lock_guard lock(owner_->mutex_);
    owner_->lost_bytes_ += nbytes_;
  }
  owner_.reset();
}

}  // namespace p2pkv::cuda
