// Pools with a clock of their own, and calls of one page each.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "keys.h"
#include "page/words.h"
#include "pool/pool.h"

namespace {

using p2pkv::FetchStatus;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::PageBatch;
using p2pkv::Piece;
using p2pkv::Pool;
using p2pkv::PoolOptions;
using p2pkv::PoolStatus;
using p2pkv::test::key_of;

using Bytes = std::vector<uint8_t>;

constexpr uint32_t kGranule = 4096;

int64_t now_ns = 0;  // the pools' clock
int64_t fake_now_ns() {
  return now_ns;
}

[[maybe_unused]] std::shared_ptr<Pool> make_pool(uint64_t n_granules, uint64_t pinned_limit = 0,
                                                 size_t evictions_kept = 1024) {
  PoolOptions options{};
  options.nbytes = n_granules * kGranule;
  options.granule = kGranule;
  options.owner = 7;
  options.boot = 8;
  options.region = 9;
  options.pinned_limit = pinned_limit;
  options.evictions_kept = evictions_kept;
  options.now_ns = fake_now_ns;
  options.is_shown = true;
  std::string error;
  auto pool = Pool::create(options, &error);
  CHECK(pool != nullptr);
  return pool;
}

Bytes bytes_of(uint64_t name, size_t nbytes) {
  return Bytes(nbytes, static_cast<uint8_t>(name * 37 + 1));
}

Piece piece_of(const Bytes& bytes) {
  return {reinterpret_cast<int64_t>(bytes.data()), static_cast<int64_t>(bytes.size())};
}

struct Stored {
  PoolStatus status;
  Location location;
};

[[maybe_unused]] Stored publish(Pool& pool, uint64_t name, size_t nbytes) {
  const Key key = key_of(name);
  const Bytes bytes = bytes_of(name, nbytes);
  const Piece piece = piece_of(bytes);
  Stored stored{};
  pool.publish({1, 1, &key, &piece}, &stored.status, &stored.location);
  return stored;
}

// The page's bytes, empty for a miss.
[[maybe_unused]] Bytes fetch(Pool& pool, uint64_t name, size_t nbytes) {
  const Key key = key_of(name);
  Bytes bytes(nbytes);
  const Piece piece = piece_of(bytes);
  FetchStatus status{};
  pool.fetch({1, 1, &key, &piece}, &status);
  return status == FetchStatus::kHit ? bytes : Bytes{};
}

bool contains(Pool& pool, uint64_t name) {
  const Key key = key_of(name);
  uint8_t found = 0;
  Location location{};
  pool.lookup(&key, 1, &found, &location);
  return found != 0;
}

[[maybe_unused]] uint64_t pin(Pool& pool, uint64_t name, double lease_seconds) {
  const Key key = key_of(name);
  uint8_t found = 0;
  uint64_t ticket = 0;
  Location location{};
  pool.pin(&key, 1, lease_seconds, &found, &ticket, &location);
  CHECK_EQ(found != 0, ticket != 0);
  return ticket;
}

[[maybe_unused]] bool unpin(Pool& pool, uint64_t ticket) {
  uint8_t held = 0;
  pool.unpin(&ticket, 1, &held);
  return held != 0;
}

bool retract(Pool& pool, uint64_t name) {
  const Key key = key_of(name);
  uint8_t found = 0;
  Location location{};
  pool.retract(&key, 1, &found, &location);
  return found != 0;
}

[[maybe_unused]] uint64_t word(const Pool& pool, const Location& location) {
  return p2pkv::load_word(pool.region().base() + location.word_offset);
}

}  // namespace
