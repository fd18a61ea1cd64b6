// A pool whose memory outlives it, as a node and its successor see it.
#pragma once

#include <fcntl.h>

#include <string>
#include <utility>

#include "base/fd.h"
#include "page/writer_lock.h"
#include "pool_calls.h"

namespace {

// What a keeper has of a pool.
struct KeptMemory {
  p2pkv::UniqueFd pool, records;

  explicit KeptMemory(const Pool& of)
      : pool(fcntl(of.region().fd(), F_DUPFD_CLOEXEC, 3)),
        records(fcntl(of.records_fd(), F_DUPFD_CLOEXEC, 3)) {
    CHECK(pool && records);
  }
};

PoolOptions kept_options(uint64_t n_granules) {
  PoolOptions options{};
  options.nbytes = n_granules * kGranule;
  options.granule = kGranule;
  options.owner = 7;
  options.boot = 8;
  options.now_ns = fake_now_ns;
  options.memory.is_kept = true;
  options.is_shown = true;
  return options;
}

std::shared_ptr<Pool> make_kept_pool(uint64_t n_granules) {
  std::string error;
  auto pool = Pool::create(kept_options(n_granules), &error);
  CHECK(pool != nullptr);
  return pool;
}

// Stores a page as an own one or as a guest, and returns where it lies.
[[maybe_unused]] Location store_as(bool is_guest, Pool& pool, uint64_t name, const Bytes& bytes) {
  p2pkv::Block block;
  block.key = key_of(name);
  block.length = bytes.size();
  block.is_guest = is_guest;
  PoolStatus status{};
  pool.reserve_blocks(&block, 1, &status);
  std::memcpy(block.data, bytes.data(), bytes.size());
  const uint8_t is_filled = 1;
  uint8_t found = 0;
  uint64_t ticket = 0;
  Location location{};
  pool.commit_blocks(&block, 1, &is_filled, 0, &found, &ticket, &location);
  CHECK(found != 0);
  return location;
}

// Null, with the reason in `error`.
std::shared_ptr<Pool> try_to_adopt(const KeptMemory& memory, const PoolOptions& options, std::string* error) {
  auto lock = p2pkv::WriterLock::take(memory.records.get(), p2pkv::Deadline::after(20), error);
  if (!lock) return nullptr;
  return Pool::adopt(options, memory.pool.get(), memory.records.get(), std::move(lock), error);
}

std::shared_ptr<Pool> adopt(const KeptMemory& memory, uint64_t n_granules) {
  std::string error;
  auto pool = try_to_adopt(memory, kept_options(n_granules), &error);
  if (!pool) std::fprintf(stderr, "not adopted: %s\n", error.c_str());
  CHECK(pool != nullptr);
  return pool;
}

}  // namespace
