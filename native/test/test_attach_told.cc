// Engines tell their node what they have published, missed and found, and have pages published again.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "attach/untold.h"
#include "base/checksum.h"
#include "hosts_node.h"

TEST(attach_what_an_engine_has_not_told_of_when_it_ends_is_told_by_the_node) {
  HostsNode node;
  auto engine = node.attach();
  Bytes memory(4 * kPage);
  const EnginePages pages(memory.data(), 4);
  CHECK(!engine->publish(pages.get(), Deadline::after(60)).is_lost);
  CHECK(node.shard.take_doubted(16).empty());
  engine.reset();
  std::vector<Key> told;
  for (const auto end = Deadline::after(30); told.size() < 4 && !end.passed(); std::this_thread::yield()) {
    for (const Key& key : node.shard.take_doubted(16)) told.push_back(key);
  }
  CHECK_EQ(told.size(), 4U);
}

TEST(attach_what_an_owner_has_missed_is_told_by_the_node) {
  HostsNode node;
  const auto engine = node.attach();
  std::vector<Key> keys;
  for (uint64_t i = 0; i < 5000; ++i) keys.push_back(key_of(i));
  engine->tell_missed(keys.data(), keys.size(), Deadline::after(30));
  CHECK_EQ(node.shard.take_doubted(10000).size(), keys.size());
}

TEST(attach_what_lies_in_the_pool_is_published_again_without_its_bytes) {
  HostsNode node;
  auto engine = node.attach();
  for (const uint64_t there : {1, 2}) CHECK(publish(*node.pool, there, kPage).status == PoolStatus::kStored);
  const std::vector<Key> keys{key_of(0), key_of(1), key_of(2)};
  const auto answer = engine->publish_again(keys.data(), keys.size(), Deadline::after(60));
  CHECK(!answer.is_lost);
  CHECK(answer.statuses[0] == PoolStatus::kNotTried);
  CHECK_EQ(answer.is_found[0], 0);
  for (size_t i = 1; i < keys.size(); ++i) {
    CHECK(answer.statuses[i] == PoolStatus::kExists);
    CHECK(answer.is_found[i] != 0);
    CHECK_EQ(answer.locations[i].length, kPage);
    CHECK(answer.sequences[i] != 0);
  }
  CHECK(!contains(*node.pool, 0));
  CHECK_EQ(node.host->stats().n_stored_pages, 0U);
  engine.reset();  // before it has told anybody: the node does
  std::vector<Key> told;
  for (const auto end = Deadline::after(30); told.size() < 2 && !end.passed(); std::this_thread::yield()) {
    for (const Key& key : node.shard.take_doubted(16)) told.push_back(key);
  }
  CHECK_EQ(told.size(), 2U);
}

// Guests come all the time; what is answered as published must be none, or it goes with another's page.
TEST(attach_no_guest_is_published_again) {
  constexpr uint64_t kSource = 77, kLog = 9;
  constexpr size_t kPages = 4096;  // so that looking for them takes a while
  HostsNode node;
  const auto engine = node.attach();
  const std::vector<uint8_t> bytes(kGranule, 0x5a);
  std::vector<Key> keys;
  for (uint64_t i = 0; i < kPages; ++i) keys.push_back(key_of(i));
  node.guests.followed(kSource, {kLog, 1});
  std::atomic<bool> has_ended{false};
  std::thread guests([&] {
    p2pkv::Location location{};
    location.length = static_cast<uint32_t>(bytes.size());
    location.checksum = p2pkv::checksum(bytes.data(), bytes.size());
    const auto address = reinterpret_cast<int64_t>(bytes.data());
    const p2pkv::Origin origin{kSource, {kLog, 1}};
    while (!has_ended) {  // the last page comes again
      p2pkv::Location at = location;
      p2pkv::StoreStatus status;
      node.guests.store(&keys.back(), &address, &origin, 1, 0, &at, &status);
    }
  });
  size_t n_guests = 0;
  for (const auto end = Deadline::after(10);
       n_guests == 0 && node.host->stats().n_requests < 10'000 && !end.passed();) {
    const auto answer = engine->publish_again(keys.data(), kPages, Deadline::after(60));
    const uint64_t generation = answer.locations.back().generation;
    n_guests += answer.is_found.back() != 0 && node.guests.has(keys.back(), generation) ? 1 : 0;
  }
  has_ended = true;
  guests.join();
  CHECK_EQ(n_guests, 0U);
}

TEST(attach_what_is_confirmed_is_answered_as_published_again) {
  HostsNode node;
  const auto engine = node.attach();
  CHECK(publish(*node.pool, 1, kPage).status == PoolStatus::kStored);
  const std::vector<Key> keys{key_of(0), key_of(1)};
  const auto answer = engine->confirm(keys.data(), keys.size(), Deadline::after(60));
  CHECK(answer.statuses[0] == PoolStatus::kNotTried);
  CHECK(answer.statuses[1] == PoolStatus::kExists);
  CHECK_EQ(answer.is_found[0], 0);
  CHECK_EQ(answer.is_found[1], 1);
  CHECK(answer.sequences[1] != 0);
}

TEST(attach_a_node_that_leaves_publishes_nothing_again) {
  HostsNode node;
  const auto engine = node.attach();
  CHECK(publish(*node.pool, 1, kPage).status == PoolStatus::kStored);
  node.host->drain();
  const Key key = key_of(1);
  const auto answer = engine->publish_again(&key, 1, Deadline::after(60));
  CHECK(answer.is_draining);
  CHECK_EQ(answer.is_found[0], 0);
}

TEST(attach_what_an_engine_withdrew_too_late_is_untold) {
  p2pkv::attaching::Untold untold;
  untold.add(1, {key_of(1)}, Deadline::after(60));
  untold.add(2, {key_of(2), key_of(3)}, Deadline::after(60));
  CHECK(untold.take_withdrawn(0).empty());
  CHECK(untold.take_withdrawn(1).empty());  // it was answered, since another one came after it
  CHECK_EQ(untold.take_withdrawn(2).size(), 2U);
  CHECK(untold.take_withdrawn(2).empty());
  CHECK_EQ(untold.take().size(), 1U);
  untold.add(3, {key_of(4)}, Deadline::after(0));
  CHECK(untold.take().empty());  // its time was over
  const size_t batch = 4096;
  for (uint64_t id = 4; id < 64; ++id) untold.add(id, std::vector<Key>(batch), Deadline::after(60));
  CHECK(untold.take().size() <= p2pkv::attaching::Untold::kMost + 2 * batch);
}

TEST(attach_a_node_hears_what_its_engines_find) {
  HostsNode node(64, {.takes_finds = true});
  const auto first = node.attach(), second = node.attach();
  CHECK(first->takes_finds());
  const Key keys[] = {key_of(1), key_of(2), key_of(3)};
  const p2pkv::attaching::Finds of_first[] = {{500, 5, 0}, {3000, 40, 0}, {10, 1, 0}};
  // Returns what is heard of that, which is said once more where it had lapsed: the machine stood still.
  const auto hear = [&](const auto& tell) {
    const std::chrono::nanoseconds lasts(p2pkv::attaching::EngineFinds::kLastsNs);
    for (const auto until = Deadline::after(60);;) {
      const auto began = Deadline::Clock::now();
      tell();
      auto heard = node.host->finds(0.5, 100);
      if (Deadline::Clock::now() - began < lasts || until.passed()) return heard;
    }
  };
  auto heard = hear([&] {
    first->tell_finds(keys, of_first, 3, Deadline::after(10));
    second->tell_finds(keys, of_first + 1, 1, Deadline::after(10));
  });
  CHECK_EQ(heard.size(), size_t{2});
  if (heard.size() != 2) return;
  const uint64_t engine_of_first = heard[0].engine;
  CHECK(heard[0].engine != heard[1].engine);
  CHECK_EQ(heard[0].pages.size(), size_t{2});
  CHECK(heard[0].pages[0].key == keys[1] && heard[0].pages[0].finds.in_1000_s == 3000);
  CHECK(heard[0].pages[1].key == keys[0] && heard[0].pages[1].finds.n_looks == 5);
  CHECK(heard[1].pages.size() == 1 && heard[1].pages[0].key == keys[0]);
  heard = hear([&] { first->tell_finds(keys + 2, of_first, 1, Deadline::after(10)); });
  CHECK(!heard.empty() && heard[0].engine == engine_of_first);
  if (heard.empty()) return;
  CHECK(heard[0].pages.size() == 1 && heard[0].pages[0].key == keys[2]);  // what it said before is over

  HostsNode other;
  const auto engine = other.attach();
  CHECK(!engine->takes_finds());
  engine->tell_finds(keys, of_first, 3, Deadline::after(10));
  CHECK(other.host->finds(0.0, 100).empty());
  CHECK(!engine->look_up(keys, 1, Deadline::after(10)).is_lost);  // it was answered all the same
}

TEST(attach_guests_are_found_while_the_node_is_awake_and_not_when_it_ends) {
  HostsNode node;
  const auto engine = node.attach();
  const auto pool = engine->take_pool();
  CHECK(!pool->are_guests_believed());
  node.epochs->vigil().keep(30'000'000'000);
  node.epochs->vigil().turned();
  CHECK(pool->are_guests_believed());
  CHECK(engine->is_believed());
  node.host->close();
  CHECK(!pool->are_guests_believed());
  CHECK(!engine->is_believed());
}
