#include "offers/receive_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace p2pkv::offers {

Arena::Arena(uint8_t* base, uint64_t nbytes)
    : base_(base), nbytes_(nbytes), blocks_(static_cast<uint32_t>(nbytes / kGranule)) {}

std::unique_ptr<Arena> Arena::create(uint64_t nbytes, bool is_pinned, bool is_readable,
                                     const std::vector<Transfers::Way>& ways, std::string* error) {
  nbytes = (nbytes + kGranule - 1) / kGranule * kGranule;
  if (nbytes / kGranule > ExactBlocks::kMostGranules) {
    *error = "a receive buffer of " + std::to_string(nbytes) + " bytes is too large";
    return nullptr;
  }
  void* base =
      mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    *error = "cannot map " + std::to_string(nbytes) + " bytes to receive into: " + std::strerror(errno);
    return nullptr;
  }
  std::unique_ptr<Arena> arena(new Arena(static_cast<uint8_t*>(base), nbytes));
  arena->is_pinned_ = is_pinned && mlock(base, nbytes) == 0;
  RowMemory memory{0, reinterpret_cast<uint64_t>(base), nbytes, true, {}, {}};
  for (const Transfers::Way& way : ways) {
    std::string ignored;
    auto region =
        is_readable ? way.transport->register_memory(arena->base_, nbytes, -1, true, &ignored) : nullptr;
    memory.descriptions.push_back(region ? region->describe() : std::string());
    if (!region) region = way.transport->register_memory(arena->base_, nbytes, -1, false, error);
    if (!region) return nullptr;
    memory.regions.push_back(std::move(region));
  }
  arena->memory_ = std::make_shared<const RowMemory>(std::move(memory));
  return arena;
}

Arena::~Arena() {
  close();
}

bool Arena::lock_for(const std::shared_ptr<cuda::Device>& device, std::string* error) {
  if (locked_for_) return true;
  // As in cuda::Staging: a forked child must not share pages that a device knows.
  madvise(base_, nbytes_, MADV_DONTFORK);
  if (!device->lock_memory(base_, nbytes_, error)) return false;
  locked_for_ = device;
  return true;
}

void Arena::close() {
  if (memory_) {
    for (const auto& region : memory_->regions) region->close();
  }
  if (const auto device = std::exchange(locked_for_, nullptr)) device->unlock_memory(base_);
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  unmap_if_unused();
}

// With the lock.
void Arena::unmap_if_unused() {
  if (!is_closed_ || blocks_.n_free() < blocks_.n_granules()) return;
  if (std::exchange(is_mapped_, false)) munmap(base_, nbytes_);
}

std::optional<uint64_t> Arena::allocate(uint64_t nbytes) {
  if (nbytes > nbytes_) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (is_closed_) return std::nullopt;
  const uint32_t granule =
      blocks_.allocate(static_cast<uint32_t>((std::max<uint64_t>(nbytes, 1) + kGranule - 1) / kGranule));
  if (granule == ExactBlocks::kNone) return std::nullopt;
  return granule * kGranule;
}

void Arena::release(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  blocks_.release(static_cast<uint32_t>(offset / kGranule));
  unmap_if_unused();
}

uint64_t Arena::used_nbytes() {
  const std::lock_guard lock(mutex_);
  return kGranule * (blocks_.n_granules() - blocks_.n_free());
}

bool ReceiveBuffers::start(const Transfers::Options& options, std::string* error) {
  if (options.buffer_nbytes > 0) {
    buffer_ = Arena::create(options.buffer_nbytes, false, false, options.ways, error);
    if (!buffer_) return false;
  }
  if (options.buddy_pool_nbytes > 0) {
    pool_ = Arena::create(options.buddy_pool_nbytes, true, true, options.ways, error);
    if (!pool_) return false;
  }
  return true;
}

std::shared_ptr<Block> ReceiveBuffers::allocate(uint64_t nbytes, bool* is_in_pool) {
  for (const auto& arena : {buffer_, pool_}) {
    const auto offset = arena ? arena->allocate(nbytes) : std::nullopt;
    *is_in_pool = arena == pool_;
    if (offset) return std::make_shared<Block>(arena, *offset);
  }
  return nullptr;
}

bool ReceiveBuffers::lock_for(const std::shared_ptr<cuda::Device>& device, std::string* error) {
  for (const auto& arena : {buffer_, pool_}) {
    if (arena && !arena->lock_for(device, error)) return false;
  }
  return true;
}

void ReceiveBuffers::close() {
  for (const auto& arena : {buffer_, pool_}) {
    if (arena) arena->close();
  }
}

std::vector<Transfers::Reading> ReceiveBuffers::readings() {
  return {{"p2pkv_receive_buffer_used_bytes", buffer_ ? buffer_->used_nbytes() : 0},
          {"p2pkv_buddy_pool_used_bytes", pool_ ? pool_->used_nbytes() : 0},
          {"p2pkv_buddy_pool_pinned", pool_ && pool_->is_pinned() ? 1 : 0}};
}

}  // namespace p2pkv::offers
