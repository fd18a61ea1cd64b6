#include "offers/staging_area.h"

#include <algorithm>
#include <utility>

#include "page/region.h"

namespace p2pkv::offers {
namespace {

// Large enough for copies and reads to run at full speed, small enough for revocations not to wait long.
constexpr uint64_t kPieceBytes = 8 << 20;
// So many pulls, or offers' parts, find room at once.
constexpr uint64_t kPieces = 4;

}  // namespace

std::shared_ptr<StagingArea> StagingArea::create(const std::shared_ptr<cuda::Device>& device, uint64_t nbytes,
                                                 bool is_readable, const std::vector<Transfers::Way>& ways,
                                                 std::string* error) {
  constexpr uint64_t kGranule = cuda::Staging::kGranule;
  nbytes = std::max<uint64_t>(1, (nbytes + kGranule - 1) / kGranule) * kGranule;
  const std::shared_ptr<SharedRegion> region = SharedRegion::create(nbytes, error);
  if (!region) return nullptr;
  RowMemory memory{0, reinterpret_cast<uint64_t>(region->base()), nbytes, false, {}, {}};
  auto staging = cuda::Staging::over(device, region->base(), nbytes, region, error);
  if (!staging) return nullptr;
  for (const Transfers::Way& way : ways) {
    auto known = way.transport->register_memory(region->base(), nbytes, region->fd(), is_readable, error);
    if (!known) return nullptr;
    memory.descriptions.push_back(is_readable ? known->describe() : std::string());
    memory.regions.push_back(std::move(known));
  }
  return std::shared_ptr<StagingArea>(
      new StagingArea(std::move(staging), std::make_shared<const RowMemory>(std::move(memory))));
}

cuda::Staging::Loan StagingArea::borrow(uint64_t least, uint64_t wanted, const Deadline& deadline,
                                        const std::function<bool()>& gives_up) {
  std::unique_lock lock(mutex_);
  cuda::Staging::Loan loan;
  changed_.wait_until(lock, deadline.at(), [&] {
    if (gives_up()) return true;
    loan = staging_->borrow(least, wanted, Deadline::after(0));
    return bool(loan);
  });
  return loan;
}

cuda::Staging::Loan StagingArea::try_borrow(uint64_t nbytes) {
  return staging_->borrow(nbytes, nbytes, Deadline::after(0));
}

void StagingArea::release(cuda::Staging::Loan loan) {
  loan.release();
  wake();
}

void StagingArea::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

uint64_t StagingArea::piece_nbytes() const {
  return std::max(cuda::Staging::kGranule, std::min(kPieceBytes, staging_->nbytes() / kPieces));
}

void StagingArea::close() {
  for (const auto& region : memory_->regions) region->close();
}

}  // namespace p2pkv::offers
