// Two nodes of transfers over the emulated driver, with rows in host or device memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda/library.h"
#include "link_peers.h"
#include "moments.h"
#include "offers/transfers.h"
#include "page/region.h"
#include "seed.h"
#include "transports/transports.h"
#include "zmq_library.h"

namespace {

using p2pkv::Deadline;
using p2pkv::Grant;
using p2pkv::Offer;
using p2pkv::RowStatus;
using p2pkv::RowStatuses;
using p2pkv::Transfers;
using p2pkv::test::FakeCuda;
using p2pkv::test::Moments;
using p2pkv::test::spin;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

constexpr size_t kRowBytes = 64 << 10;
constexpr double kLong = 30.0;

enum class Over { kTcp, kShm };
enum class On { kHost, kDevice };

// A node's transfers, with rows in host or device memory. Both kinds can be filled and read by a test.
struct Party {
  Party(uint64_t key, size_t n_rows, bool is_readable, Over over, On on, Transfers::Options options)
      : key(key), fake(FakeCuda::get()), on(on), n_rows(n_rows) {
    transport =
        over == Over::kTcp ? p2pkv::make_tcp_transport({}, &error) : p2pkv::make_shm_transport(&error);
    options.ways = {{0, "it", transport}};
    options.peers = peers;
    transfers = Transfers::start(std::move(options), &error);
    CHECK(transfers != nullptr);
    transfers->announce(key, 1);
    if (on == On::kDevice) {
      device = p2pkv::cuda::Device::open(0, &error);
      address = fake.allocate(0, n_rows * kRowBytes);
      std::vector<Transfers::Refusal> refusals;
      memory = transfers->add_device_memory(address, n_rows * kRowBytes, is_readable, true, device, &refusals,
                                            &error);
      CHECK(memory != 0 && refusals.empty());
      return;
    }
    shared = p2pkv::SharedRegion::create(n_rows * kRowBytes, &error);
    address = reinterpret_cast<uint64_t>(shared->base());
    region = transport->register_memory(shared->base(), shared->nbytes(), shared->fd(), is_readable, &error);
    memory = transfers->add_memory(address, shared->nbytes(), true, {region}, {region->describe()});
  }
  ~Party() {
    transfers->close();
    peers->close();
    transport->close();
    if (on == On::kDevice) fake.free(address);
  }

  p2pkv::Rows rows(const std::string& request, size_t n, uint32_t first = 0) const {
    p2pkv::Rows rows{request, first, {}};
    for (size_t i = first; i < first + n; ++i)
      rows.spans.push_back({static_cast<int64_t>(address + i * kRowBytes), kRowBytes});
    return rows;
  }
  void fill(uint64_t value, size_t first, size_t n) {
    const std::vector<uint64_t> words(n * kRowBytes / 8, value);
    const uint64_t to = address + first * kRowBytes;
    if (on == On::kDevice) {
      fake.write(to, words.data(), n * kRowBytes);
    } else {
      std::memcpy(reinterpret_cast<void*>(to), words.data(), n * kRowBytes);
    }
  }
  bool holds(uint64_t value, size_t row) const {
    std::vector<uint64_t> words(kRowBytes / 8);
    const uint64_t from = address + row * kRowBytes;
    if (on == On::kDevice) {
      fake.read(words.data(), from, kRowBytes);
    } else {
      std::memcpy(words.data(), reinterpret_cast<void*>(from), kRowBytes);
    }
    return std::all_of(words.begin(), words.end(), [value](uint64_t word) { return word == value; });
  }
  uint64_t reading(const std::string& name) const {
    for (const auto& [known, value] : transfers->readings()) {
      if (known == name) return value;
    }
    return UINT64_MAX;
  }

  const uint64_t key;
  const FakeCuda& fake;
  const On on;
  const size_t n_rows;
  std::string error;
  std::shared_ptr<p2pkv::Transport> transport;
  const std::shared_ptr<p2pkv::PeerConnections> peers = p2pkv::test::peers_of_links(1);
  std::shared_ptr<Transfers> transfers;
  std::shared_ptr<p2pkv::cuda::Device> device;
  std::unique_ptr<p2pkv::SharedRegion> shared;
  std::shared_ptr<p2pkv::MemoryRegion> region;
  uint64_t address = 0;
  uint32_t memory = 0;
};

struct Setting {
  Over over = Over::kTcp;
  On from = On::kDevice;
  On to = On::kDevice;
  uint64_t staging_nbytes = 16 * kRowBytes;
  uint64_t buffer_nbytes = 0;
  uint64_t buddy_pool_nbytes = 0;
  bool is_validating = true;
};

struct Pair {
  explicit Pair(size_t n_rows, const Setting& setting = {})
      : reset(),
        producer(1, n_rows, true, setting.over, setting.from, options(setting)),
        consumer(2, n_rows, false, setting.over, setting.to, options(setting)) {
    std::string error;
    const std::string door = consumer.transfers->accept(Transfers::request(), &error);
    CHECK(producer.transfers->connect(2, 1, door, 10.0, &error));
    while (!consumer.transfers->is_connected(1)) std::this_thread::yield();
    for (size_t row = 0; row < n_rows; ++row) producer.fill(value_of(row), row, 1);
  }
  ~Pair() { FakeCuda::get().reset(); }

  static Transfers::Options options(const Setting& setting) {
    Transfers::Options options;
    options.staging_nbytes = setting.staging_nbytes;
    options.buffer_nbytes = setting.buffer_nbytes;
    options.buddy_pool_nbytes = setting.buddy_pool_nbytes;
    options.is_validating = setting.is_validating;
    return options;
  }
  static uint64_t value_of(size_t row) { return 0x0101010101010101u * (row % 251 + 1); }

  std::shared_ptr<Offer> put(const std::string& request, size_t n, uint32_t first = 0, double lease = kLong) {
    return offered(producer.transfers->offer(2, producer.rows(request, n, first), Deadline::after(lease),
                                             &producer.error));
  }
  std::shared_ptr<Offer> leave(const std::string& request, size_t n, uint32_t first = 0) {
    return offered(producer.transfers->offer(std::nullopt, producer.rows(request, n, first),
                                             Deadline::after(kLong), &producer.error));
  }
  std::shared_ptr<Grant> grant(const std::string& request, size_t n, uint32_t first = 0,
                               double timeout = kLong) {
    return granted(std::nullopt, consumer.rows(request, n, first), timeout);
  }
  std::shared_ptr<Grant> get(const std::string& request, size_t n, uint32_t first = 0,
                             double timeout = kLong) {
    return granted(1, consumer.rows(request, n, first), timeout);
  }
  std::shared_ptr<Grant> granted(std::optional<uint64_t> from, p2pkv::Rows rows, double timeout) {
    auto grant = consumer.transfers->grant(from, std::move(rows), Deadline::after(timeout), &consumer.error);
    CHECK(grant != nullptr);
    return grant;
  }
  static std::shared_ptr<Offer> offered(std::shared_ptr<Offer> offer) {
    CHECK(offer != nullptr);
    return offer;
  }
  bool is_right(size_t n, size_t first = 0) const {
    for (size_t row = first; row < first + n; ++row) {
      if (!consumer.holds(value_of(row), row)) return false;
    }
    return true;
  }
  // Nobody has any of the staging, which whoever ended last gives back a moment after it said so.
  bool has_all_staging() const {
    const auto until = Deadline::after(10.0);
    while (!until.passed()) {
      if (producer.reading("p2pkv_outgoing_staging_used_bytes") == 0 &&
          consumer.reading("p2pkv_incoming_staging_used_bytes") == 0)
        return true;
      std::this_thread::yield();
    }
    return false;
  }

  struct Reset {
    Reset() { FakeCuda::get().reset(); }
  };
  p2pkv::test::ZmqContext loads_the_library;
  Reset reset;
  Party producer;
  Party consumer;
};

RowStatuses wait(const std::shared_ptr<Grant>& grant) {
  grant->wait(Deadline::after(kLong));
  return grant->statuses();
}
RowStatuses wait(const std::shared_ptr<Offer>& offer) {
  offer->wait(Deadline::after(kLong));
  return offer->statuses();
}

bool all_are(const RowStatuses& statuses, RowStatus status) {
  return !statuses.empty() &&
         std::all_of(statuses.begin(), statuses.end(), [status](RowStatus s) { return s == status; });
}

}  // namespace
