// The disk tier under sanitizers: publishers, evictions, writers and promotions at once, and a disk that
// hangs.
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <random>
#include <thread>

#include "base/checksum.h"
#include "check.h"
#include "disk/faulty_files.h"
#include "disk/tier.h"
#include "keys.h"
#include "seed.h"

namespace {

using p2pkv::Deadline;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::Piece;
using p2pkv::Pool;
using p2pkv::Tier;
using p2pkv::disk::DiskOptions;
using p2pkv::disk::DiskStore;
using p2pkv::disk::FaultyFiles;
using p2pkv::disk::FileCall;
using p2pkv::disk::ReadStatus;
using p2pkv::test::key_of;

constexpr size_t kPage = 8192;
constexpr size_t kBatch = 8;

// A pool of 32 pages with a tier of a temporary folder below it.
struct Node {
  std::string path;
  std::shared_ptr<Pool> pool;
  std::shared_ptr<DiskStore> store;
  std::shared_ptr<Tier> tier;
  FaultyFiles faults;

  explicit Node(p2pkv::TierOptions options = {}) {
    char pattern[] = "/tmp/p2pkv-tier-XXXXXX";
    path = mkdtemp(pattern);
    std::string error;
    p2pkv::PoolOptions pool_options{};
    pool_options.nbytes = 32 * kPage;
    pool = Pool::create(pool_options, &error);
    CHECK(pool != nullptr);
    DiskOptions disk;
    disk.capacity = 64 << 20;
    disk.read_buffer = 4 << 20;
    disk.files = &faults;
    disk.release = [pool = pool](const uint64_t* tickets, size_t n) {
      std::vector<uint8_t> held(n);
      pool->unpin(tickets, n, held.data());
    };
    disk.changed = [pool = pool] { pool->wake_drainer(); };
    store = DiskStore::open(path, {"n1", "ns"}, disk, &error);
    if (!store) std::cerr << error << "\n";
    CHECK(store != nullptr);
    tier = Tier::start(pool, options);
    tier->attach(store);
  }
  ~Node() {
    tier->close();
    CHECK(store->close(Deadline::after(10)));
    tier.reset();
    std::filesystem::remove_all(path);
  }

  // Every 8 bytes of a page are its name.
  void publish(uint64_t first) {
    std::vector<std::vector<uint64_t>> memory(kBatch, std::vector<uint64_t>(kPage / 8));
    Key keys[kBatch];
    Piece pieces[kBatch];
    for (size_t i = 0; i < kBatch; ++i) {
      keys[i] = key_of(first + i);
      std::fill(memory[i].begin(), memory[i].end(), first + i);
      pieces[i] = {reinterpret_cast<int64_t>(memory[i].data()), kPage};
    }
    p2pkv::PoolStatus statuses[kBatch];
    Location locations[kBatch];
    pool->publish({kBatch, 1, keys, pieces}, statuses, locations);
    tier->note_published(keys, kBatch);
  }
  // Publishes until the disk has it all.
  void fill(uint64_t n) {
    for (uint64_t first = 0; first < n; first += kBatch) {
      publish(first);
      CHECK(store->flush(Deadline::after(20)));
    }
    CHECK_EQ(store->n_pages(), n);
  }

  struct Answer {
    std::vector<uint8_t> found;
    std::vector<Location> locations;
    size_t n_found() const { return static_cast<size_t>(std::count(found.begin(), found.end(), 1)); }
  };
  std::future<Answer> ask(uint64_t first, double lease, double answer_in, uint64_t lease_id = 0) {
    std::vector<Key> keys;
    for (size_t i = 0; i < kBatch; ++i) keys.push_back(key_of(first + i));
    auto answered = std::make_shared<std::promise<Answer>>();
    std::future<Answer> answer = answered->get_future();
    // each lease is another reader's: one reader's share of the pool is a single batch
    tier->promote(std::move(keys), {lease, lease_id, lease_id}, Deadline::after(answer_in),
                  [answered](auto found, auto locations) {
                    answered->set_value({std::move(found), std::move(locations)});
                  });
    return answer;
  }
  static std::vector<Key> keys_from(uint64_t first) {
    std::vector<Key> keys;
    for (size_t i = 0; i < kBatch; ++i) keys.push_back(key_of(first + i));
    return keys;
  }
  // As p2pkv/cache/page_cache.py does it.
  void take_back(uint64_t first) {
    const std::vector<Key> keys = keys_from(first);
    std::vector<uint8_t> found(kBatch);
    std::vector<Location> locations(kBatch);
    tier->forget(keys.data(), kBatch);
    pool->retract(keys.data(), kBatch, found.data(), locations.data());
    tier->forget(keys.data(), kBatch);
  }
  void take_back_all() {
    tier->clear();
    pool->purge();
    tier->clear();
  }
  // Who has loaded pages lets go of them a moment after their readers have been answered.
  bool comes_to_pin(uint64_t nbytes) {
    const Deadline deadline = Deadline::after(20);
    while (pool->stats().pinned_bytes != nbytes && !deadline.passed()) std::this_thread::yield();
    return pool->stats().pinned_bytes == nbytes;
  }
  // In the pool or on disk.
  size_t n_there(uint64_t first) {
    const std::vector<Key> keys = keys_from(first);
    std::vector<uint8_t> found(kBatch);
    std::vector<Location> locations(kBatch);
    tier->locate(keys.data(), kBatch, found.data(), locations.data());
    return static_cast<size_t>(std::count(found.begin(), found.end(), 1));
  }
  // The pages of this node as a remote reader would validate them; the number of hits.
  size_t read(const Answer& answer, uint64_t first) {
    size_t n_hits = 0;
    for (size_t i = 0; i < kBatch; ++i) {
      if (answer.found[i] == 0) continue;
      std::vector<uint64_t> copy(kPage / 8);
      p2pkv::FetchStatus status;
      const Key key = key_of(first + i);
      const Piece piece{reinterpret_cast<int64_t>(copy.data()), kPage};
      pool->fetch({1, 1, &key, &piece}, &status);
      if (status != p2pkv::FetchStatus::kHit) continue;
      ++n_hits;
      for (const uint64_t word : copy) CHECK(word == first + i);
    }
    return n_hits;
  }
};

TEST(tier_promotes_what_the_pool_has_evicted) {
  Node node;
  node.fill(128);
  for (uint64_t first = 0; first < 128; first += kBatch) {
    const Node::Answer answer = node.ask(first, 0.01, 10).get();
    CHECK_EQ(answer.n_found(), kBatch);
    CHECK_EQ(node.read(answer, first), kBatch);
  }
  CHECK(node.tier->counters().promoted_pages > 0);
  CHECK_EQ(node.ask(1000, 1, 10).get().n_found(), 0u);
}

TEST(tier_loads_a_page_once_however_many_ask) {
  Node node;
  node.fill(64);
  node.pool->purge();
  std::vector<std::future<Node::Answer>> answers;
  for (int i = 0; i < 20; ++i) answers.push_back(node.ask(0, 1, 10));
  for (auto& answer : answers) CHECK_EQ(answer.get().n_found(), kBatch);
  CHECK_EQ(node.tier->counters().promoted_pages.load(), kBatch);
}

TEST(tier_warms_for_nobody_who_waits) {
  Node node;
  node.fill(64);
  node.pool->purge();
  CHECK_EQ(node.ask(0, 0, 0).get().n_found(), 0u);
  while (node.tier->counters().promoted_pages < kBatch) std::this_thread::yield();
  CHECK_EQ(node.ask(0, 0, 0).get().n_found(), kBatch);
}

TEST(tier_warming_goes_on_in_free_room_and_stops_at_a_share_of_the_pool) {
  Node node;
  node.fill(128);
  node.pool->purge();
  const p2pkv::TierCounters& counters = node.tier->counters();
  for (uint64_t first = 0; first < 128; first += kBatch) node.ask(first, 0, 0).get();
  while (counters.promoted_pages + counters.unwarmed_pages < 128) std::this_thread::yield();
  // the 32 of the empty pool and a quarter of it, and what time adds to that
  CHECK(counters.promoted_pages >= 32 + 8);
  CHECK(counters.promoted_pages <= 32 + 8 + 8);
}

TEST(tier_warming_leaves_what_was_promoted_even_if_nothing_pins_it) {
  Node node;
  node.fill(128);
  for (uint64_t first = 0; first < 32; first += kBatch) {
    CHECK_EQ(node.ask(first, 1e-9, 10).get().n_found(), kBatch);
  }
  for (uint64_t first = 32; first < 128; first += kBatch) node.ask(first, 0, 0).get();
  const p2pkv::TierCounters& counters = node.tier->counters();
  while (counters.promoted_pages + counters.unwarmed_pages < 128) std::this_thread::yield();
  std::vector<Key> keys;
  for (uint64_t i = 16; i < 32; ++i) keys.push_back(key_of(i));
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  node.pool->lookup(keys.data(), keys.size(), found.data(), locations.data());
  CHECK_EQ(std::count(found.begin(), found.end(), 1), 16);
}

TEST(tier_says_at_once_what_is_on_disk_and_nothing_of_what_is_found) {
  Node node;
  node.fill(64);
  CHECK(node.store->flush(Deadline::after(20)));
  node.pool->purge();
  std::vector<Key> keys;
  for (uint64_t i = 60; i < 68; ++i) keys.push_back(key_of(i));  // of which the last four are nowhere
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  node.tier->locate(keys.data(), keys.size(), found.data(), locations.data());
  std::vector<uint8_t> at_once(keys.size());
  std::vector<Location> told(keys.size());
  at_once[0] = 1;
  told[0].owner = 7;
  node.tier->locate_at_once(keys.data(), keys.size(), at_once.data(), told.data());
  CHECK(at_once == std::vector<uint8_t>({1, 1, 1, 1, 0, 0, 0, 0}));
  CHECK(at_once == found);
  CHECK_EQ(told[0].owner, 7U);
  CHECK(std::memcmp(&told[1], &locations[1], 3 * sizeof(Location)) == 0);
}

TEST(tier_readers_give_their_pins_back) {
  Node node;
  node.fill(64);
  node.pool->purge();
  for (uint64_t lease = 1; lease <= 2; ++lease) {
    CHECK_EQ(node.ask(0, 600, 10, lease).get().n_found(), kBatch);
  }
  CHECK(node.comes_to_pin(kBatch * kPage));
  node.tier->release(1);
  CHECK(node.comes_to_pin(kBatch * kPage));  // the other reader's
  node.tier->release(1);
  node.tier->release(2);
  CHECK(node.comes_to_pin(0));
  // more than all pins that the pool allows, one after another
  for (uint64_t first = 0; first < 64; first += kBatch) {
    CHECK_EQ(node.ask(first, 600, 10, 3 + first).get().n_found(), kBatch);
    CHECK(node.comes_to_pin(kBatch * kPage));
    node.tier->release(3 + first);
  }
}

TEST(tier_pins_for_as_long_as_each_reader_asked_for) {
  Node node;
  node.fill(64);
  node.pool->purge();
  node.faults.hang(FileCall::kRead);
  std::future<Node::Answer> brief = node.ask(0, 0.001, 60);
  std::future<Node::Answer> lasting = node.ask(0, 600, 60, 1);
  node.faults.heal();
  CHECK_EQ(brief.get().n_found(), kBatch);
  CHECK_EQ(lasting.get().n_found(), kBatch);
  node.tier->release(1);
  CHECK(node.comes_to_pin(0));
}

TEST(tier_pins_nothing_for_readers_who_gave_up) {
  Node node;
  node.fill(64);
  node.pool->purge();
  node.faults.hang(FileCall::kRead);
  CHECK_EQ(node.ask(0, 600, 0.05, 1).get().n_found(), 0u);
  std::future<Node::Answer> patient = node.ask(0, 600, 60, 2);
  node.tier->release(1);
  node.faults.heal();
  CHECK_EQ(patient.get().n_found(), kBatch);
  CHECK(node.comes_to_pin(kBatch * kPage));
  node.tier->release(2);
  CHECK(node.comes_to_pin(0));
}

TEST(tier_pins_for_a_reader_who_asks_while_pages_are_warmed) {
  Node node;
  node.fill(64);
  node.pool->purge();
  node.faults.hang(FileCall::kRead);
  node.ask(0, 0, 0).get();
  while (node.faults.n_hanging() == 0) std::this_thread::yield();
  std::future<Node::Answer> answer = node.ask(0, 600, 60, 1);
  node.faults.heal();
  CHECK_EQ(answer.get().n_found(), kBatch);
  CHECK(node.comes_to_pin(kBatch * kPage));
  node.tier->release(1);
  CHECK(node.comes_to_pin(0));
}

TEST(tier_does_not_write_what_was_taken_back) {
  Node node;
  node.faults.hang(FileCall::kWrite);
  node.publish(0);
  while (node.faults.n_hanging() == 0) std::this_thread::yield();
  node.publish(kBatch);  // the first are in the writer's hands, these follow them or wait in its queue
  node.take_back(0);
  node.take_back(kBatch);
  node.faults.heal();
  CHECK(node.store->flush(Deadline::after(20)));
  CHECK_EQ(node.n_there(0) + node.n_there(kBatch), 0u);
  node.publish(kBatch);  // what comes again is kept
  CHECK(node.store->flush(Deadline::after(20)));
  node.pool->purge();
  CHECK_EQ(node.n_there(0), 0u);
  CHECK_EQ(node.n_there(kBatch), kBatch);
}

TEST(tier_waits_for_what_is_being_written_of_a_clear) {
  Node node;
  node.fill(64);
  CHECK(node.store->flush(Deadline::after(20)));
  node.faults.hang(FileCall::kWrite);
  node.tier->clear();
  while (node.faults.n_hanging() == 0) std::this_thread::yield();
  CHECK(!node.tier->wait_cleared(Deadline::after(0.01)));
  node.faults.heal();
  CHECK(node.tier->wait_cleared(Deadline::after(20)));
}

TEST(tier_does_not_write_what_was_cleared) {
  Node node;
  node.faults.hang(FileCall::kWrite);
  node.publish(0);
  while (node.faults.n_hanging() == 0) std::this_thread::yield();
  node.publish(kBatch);
  node.take_back_all();
  node.publish(2 * kBatch);
  node.faults.heal();
  CHECK(node.store->flush(Deadline::after(20)));
  CHECK_EQ(node.n_there(0) + node.n_there(kBatch), 0u);
  CHECK_EQ(node.n_there(2 * kBatch), kBatch);
}

TEST(tier_does_not_bring_back_what_was_taken_back_meanwhile) {
  for (const bool is_all : {false, true}) {
    Node node;
    node.fill(64);
    node.pool->purge();
    node.faults.hang(FileCall::kRead);
    std::future<Node::Answer> answer = node.ask(0, 600, 60, 1);
    while (node.faults.n_hanging() == 0) std::this_thread::yield();
    is_all ? node.take_back_all() : node.take_back(0);
    node.faults.heal();
    CHECK_EQ(answer.get().n_found(), 0u);
    CHECK_EQ(node.n_there(0), 0u);
    CHECK_EQ(node.pool->stats().pages, 0u);
    CHECK_EQ(node.n_there(8), is_all ? 0u : kBatch);
  }
}

TEST(tier_answers_in_time_while_the_disk_hangs) {
  Node node;
  node.fill(64);
  node.pool->purge();
  node.faults.hang(FileCall::kRead);
  const auto began = Deadline::Clock::now();
  CHECK_EQ(node.ask(0, 1, 0.2).get().n_found(), 0u);
  const std::chrono::duration<double> taken = Deadline::Clock::now() - began;
  CHECK(taken.count() >= 0.19 && taken.count() < 20);  // the disk hangs until it is healed
  std::future<Node::Answer> open = node.ask(8, 1, 60);
  node.publish(1000);  // does not wait
  node.tier->close();
  CHECK(open.wait_for(std::chrono::seconds(0)) == std::future_status::ready);
  CHECK_EQ(node.ask(16, 1, 60).get().n_found(), 0u);
  node.faults.heal();
}

TEST(tier_races_give_no_wrong_byte_and_leak_no_pin) {
  const uint64_t seed = p2pkv::test::seed("tier_races_give_no_wrong_byte_and_leak_no_pin");
  for (const auto write : {p2pkv::WritePolicy::kWriteThrough, p2pkv::WritePolicy::kOnEvict}) {
    p2pkv::TierOptions options;
    options.write = write;
    Node node(options);
    std::atomic<bool> is_over{false};
    std::atomic<uint64_t> n_hits{0};
    std::vector<std::thread> threads;
    for (uint64_t number = 0; number < 2; ++number) {
      threads.emplace_back([&, number] {
        std::mt19937_64 random(seed + number);
        while (!is_over) {
          const uint64_t first = random() % 64 * kBatch;
          // some leases end by themselves, some are released
          const uint64_t lease = random() % 2 == 0 ? 0 : random();
          const double seconds = lease == 0 ? 0.001 : 600;
          n_hits += node.read(node.ask(first, seconds, random() % 3 * 0.01, lease).get(), first);
          if (lease != 0) node.tier->release(lease);
          if (random() % 50 == 0) {
            const Key key = key_of(random() % 512);
            node.tier->forget(&key, 1);
          }
        }
      });
    }
    threads.emplace_back([&] {
      while (!is_over) {
        node.tier->drain_changed(100);
        std::this_thread::yield();
      }
    });
    std::mt19937_64 random(seed);
    // on a busy machine the others may not have begun by then
    const auto has_raced = [&] { return n_hits > 0 && node.store->counters().stored_pages > 0; };
    for (int i = 0; i < 300 || !has_raced(); ++i) node.publish(random() % 64 * kBatch);
    CHECK(node.store->flush(Deadline::after(20)));
    is_over = true;
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(node.store->counters().bad_records.load(), 0u);
    // all leases were released or have ended, and the writer has given back all it had
    while (node.pool->stats().pinned_bytes > 0) std::this_thread::yield();
  }
}

}  // namespace
