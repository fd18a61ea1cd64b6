// A directory's server with its shard, and a reader's calls to it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "directory/channel.h"
#include "directory/server.h"
#include "keys.h"
#include "net/listener.h"
#include "net/sealed_door.h"
#include "net/sealed_stream.h"
#include "zmq_library.h"

namespace {

using p2pkv::Address;
using p2pkv::AskBatch;
using p2pkv::Deadline;
using p2pkv::DirectoryChannel;
using p2pkv::DirectoryServer;
using p2pkv::DoorBlob;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::RingTable;
using p2pkv::SealedStream;
using p2pkv::Shard;
using p2pkv::Side;
using p2pkv::UniqueFd;
using p2pkv::test::key_of;
using p2pkv::wire::Kind;

constexpr uint64_t kBoot = 5;
constexpr uint64_t kOwner = 1;

struct Served {
  p2pkv::test::ZmqContext loads_the_library;
  std::shared_ptr<Shard> shard = std::make_shared<Shard>(1 << 20);
  std::string error;
  std::shared_ptr<DirectoryServer> server;

  Served() {
    shard->set_view(&kOwner, &kBoot, 1);
    server = DirectoryServer::start({}, shard, &error);
    CHECK(server != nullptr);
    server->announce(kBoot);
  }

  std::string door() { return server->accept(DirectoryChannel::request(), &error); }
  std::shared_ptr<DirectoryChannel> channel(uint64_t boot = kBoot) {
    return DirectoryChannel::open(door(), boot, 10.0, &error);
  }
};

// A ring of one member, whom another one asks.
std::shared_ptr<RingTable> ring_of_one() {
  return std::make_shared<RingTable>(RingTable{{0}, {0}, 1, {1}, -1});
}

std::vector<Key> keys_from(uint64_t first, size_t n) {
  std::vector<Key> keys;
  for (size_t i = 0; i < n; ++i) keys.push_back(key_of(first + i));
  return keys;
}

struct Answer {
  size_t n_found = 0;
  bool is_usable = false;
  bool is_answered = false;
};

std::vector<uint8_t> ask(AskBatch& batch, const p2pkv::DirectoryQuestion& question,
                         const std::shared_ptr<DirectoryChannel>& channel, double timeout) {
  p2pkv::DirectoryExchange exchange(batch, question, {{0, channel}});
  exchange.wait(Deadline::after(timeout), Deadline::after(timeout));
  return exchange.end(Deadline::after(0));
}

Answer look_up(const std::shared_ptr<DirectoryChannel>& channel, const std::vector<Key>& keys,
               double timeout = 10.0) {
  AskBatch batch(keys.data(), keys.size(), nullptr, ring_of_one());
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  const p2pkv::DirectoryQuestion question{Kind::kGet, reinterpret_cast<const uint8_t*>(keys.data()),
                                          sizeof(Key), found.data(), locations.data()};
  const auto usable = ask(batch, question, channel, timeout);
  Answer answer;
  answer.is_usable = usable.front() != 0;
  answer.is_answered = batch.asks().front().is_answered;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (found[i] == 0) continue;
    ++answer.n_found;
    CHECK_EQ(locations[i].owner, kOwner);
    CHECK_EQ(locations[i].offset, keys[i].bytes[0] * uint64_t{4096});
  }
  return answer;
}

constexpr uint64_t kLease = 0x1ea5e;

// Holds promotions until the test answers them.
class HeldPromoter final : public p2pkv::Promoter {
 public:
  void promote(std::vector<Key> keys, Lease lease, Deadline, Done done) override {
    const std::lock_guard lock(mutex_);
    CHECK_EQ(lease.seconds, 2.0);
    CHECK_EQ(lease.id, kLease);
    CHECK(lease.asker != 0);
    asker_ = lease.asker;
    held_.push_back({std::move(keys), std::move(done)});
    came_.notify_all();
  }
  void release(uint64_t lease) override {
    const std::lock_guard lock(mutex_);
    CHECK_EQ(lease, kLease);
    ++n_released_;
    came_.notify_all();
  }
  void leave(uint64_t asker) override {
    const std::lock_guard lock(mutex_);
    if (asker != asker_) return;  // a channel that asked for nothing
    ++n_left_;
    came_.notify_all();
  }
  void wait_left(size_t n) {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [&] { return n_left_ >= n; });
  }
  void wait_released(size_t n) {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [&] { return n_released_ >= n; });
  }
  // Waits for one, and finds every other key of it.
  void answer_one() {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [this] { return !held_.empty(); });
    const Held held = std::move(held_.front());
    held_.pop_front();
    lock.unlock();
    std::vector<uint8_t> found(held.keys.size());
    std::vector<Location> locations(held.keys.size());
    for (size_t i = 0; i < found.size(); i += 2) {
      found[i] = 1;
      locations[i].owner = kOwner;
      locations[i].offset = held.keys[i].bytes[0] * uint64_t{4096};
      locations[i].flags = p2pkv::kResident;
    }
    held.done(std::move(found), std::move(locations));
  }

 private:
  struct Held {
    std::vector<Key> keys;
    Done done;
  };
  std::mutex mutex_;  // guards all below
  std::condition_variable came_;
  std::deque<Held> held_;
  size_t n_released_ = 0;
  size_t n_left_ = 0;
  uint64_t asker_ = 0;
};

Answer promote(const std::shared_ptr<DirectoryChannel>& channel, const std::vector<Key>& keys,
               double timeout = 10.0) {
  const std::vector<int32_t> members(keys.size(), 0);
  AskBatch batch(members.data(), members.size(), ring_of_one());
  std::vector<p2pkv::wire::PromoteEntry> entries;
  for (const Key& key : keys) entries.push_back({key, 1000, 2000, kLease});
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  const p2pkv::DirectoryQuestion question{Kind::kPromote, reinterpret_cast<const uint8_t*>(entries.data()),
                                          sizeof entries[0], found.data(), locations.data()};
  const auto usable = ask(batch, question, channel, timeout);
  Answer answer;
  answer.is_usable = usable.front() != 0;
  answer.is_answered = batch.asks().front().is_answered;
  for (const uint8_t there : found) answer.n_found += there;
  return answer;
}

bool tell(const std::shared_ptr<DirectoryChannel>& channel, Kind kind, const std::vector<Key>& keys,
          uint64_t sequence) {
  AskBatch batch(keys.data(), keys.size(), nullptr, ring_of_one());
  std::vector<p2pkv::wire::PutEntry> puts;
  std::vector<p2pkv::wire::DropEntry> drops;
  for (const Key& key : keys) {
    Location location{};
    location.owner = kOwner;
    location.boot = kBoot;
    location.offset = key.bytes[0] * uint64_t{4096};
    location.generation = 2;
    puts.push_back({key, sequence, location});
    drops.push_back({key, sequence, kOwner, kBoot, 2});
  }
  const bool is_put = kind == Kind::kPut;
  const auto* records =
      is_put ? reinterpret_cast<const uint8_t*>(puts.data()) : reinterpret_cast<const uint8_t*>(drops.data());
  const size_t size = is_put ? sizeof puts[0] : sizeof drops[0];
  ask(batch, {kind, records, size}, channel, 10.0);
  return batch.asks().front().is_answered;
}

}  // namespace
