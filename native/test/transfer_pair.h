// Two nodes' transfers in one process, and memory of each, in rows of 64 KiB.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "check.h"
#include "link_peers.h"
#include "offers/transfers.h"
#include "page/region.h"
#include "transports/transports.h"
#include "zmq_library.h"

namespace p2pkv::test {

constexpr size_t kRowBytes = 64 << 10;

enum class Over { kTcp, kShm };

struct Party {
  Party(uint64_t key, size_t n_rows, bool is_readable, Over over, Transfers::Options options) : key(key) {
    if (over == Over::kTcp) {
      transport = make_tcp_transport({}, &error);
    } else {
      transport = make_shm_transport(&error);
    }
    options.ways = {{0, "it", transport}};
    options.peers = peers;
    transfers = Transfers::start(std::move(options), &error);
    CHECK(transfers != nullptr);
    transfers->announce(key, 1);
    shared = SharedRegion::create(n_rows * kRowBytes, &error);
    bytes = {shared->base(), shared->nbytes()};
    region = transport->register_memory(bytes.data(), bytes.size(), shared->fd(), is_readable, &error);
    memory = transfers->add_memory(address(), bytes.size(), true, {region}, {region->describe()});
  }
  ~Party() {
    transfers->close();
    peers->close();
    transport->close();
  }

  uint64_t address() const { return reinterpret_cast<uint64_t>(bytes.data()); }
  Rows rows(const std::string& request, size_t n, uint32_t first = 0) const {
    Rows rows{request, first, {}};
    for (size_t i = first; i < first + n; ++i)
      rows.spans.push_back({static_cast<int64_t>(address() + i * kRowBytes), kRowBytes});
    return rows;
  }
  void fill(uint64_t value, size_t n_rows) {
    auto* words = reinterpret_cast<uint64_t*>(bytes.data());
    std::fill(words, words + n_rows * kRowBytes / 8, value);
  }
  bool holds(uint64_t value, size_t row) const {
    const auto* words = reinterpret_cast<const uint64_t*>(bytes.data() + row * kRowBytes);
    return std::all_of(words, words + kRowBytes / 8, [value](uint64_t word) { return word == value; });
  }
  uint64_t reading(const std::string& name) const {
    for (const auto& [known, value] : transfers->readings()) {
      if (known == name) return value;
    }
    return UINT64_MAX;
  }

  const uint64_t key;
  std::string error;
  std::shared_ptr<Transport> transport;
  const std::shared_ptr<PeerConnections> peers = peers_of_links(1);
  std::shared_ptr<Transfers> transfers;
  std::unique_ptr<SharedRegion> shared;
  std::span<uint8_t> bytes;
  std::shared_ptr<MemoryRegion> region;
  uint32_t memory = 0;
};

struct Pair {
  explicit Pair(size_t n_rows, Transfers::Options options = {}, Over over = Over::kTcp)
      : producer(1, n_rows, true, over, options), consumer(2, n_rows, false, over, options) {
    std::string error;
    const std::string door = consumer.transfers->accept(Transfers::request(), &error);
    CHECK(producer.transfers->connect(2, 1, door, 10.0, &error));
    // The other way round as well: get asks over a link of its own if it has none.
    while (!consumer.transfers->is_connected(1)) std::this_thread::yield();
  }

  std::shared_ptr<Offer> put(const std::string& request, size_t n_rows, uint32_t first = 0) {
    auto offer = producer.transfers->offer(2, producer.rows(request, n_rows, first), Deadline::after(30.0),
                                           &producer.error);
    CHECK(offer != nullptr);
    return offer;
  }
  std::shared_ptr<Grant> grant(const std::string& request, size_t n_rows) {
    auto grant = consumer.transfers->grant(std::nullopt, consumer.rows(request, n_rows),
                                           Deadline::after(30.0), &consumer.error);
    CHECK(grant != nullptr);
    return grant;
  }

  ZmqContext loads_the_library;
  Party producer;
  Party consumer;
};

inline bool all_are(const RowStatuses& statuses, RowStatus status) {
  return std::all_of(statuses.begin(), statuses.end(), [status](RowStatus s) { return s == status; });
}

}  // namespace p2pkv::test
