// What readers note of what they read, and how much of it an owner takes.
#include <algorithm>
#include <set>
#include <thread>
#include <vector>

#include "cache/touches.h"
#include "check.h"
#include "directory/requests.h"
#include "directory/touch_budget.h"
#include "keys.h"
#include "served_directory.h"

namespace {

using p2pkv::PeerId;
using p2pkv::TouchBudget;
using p2pkv::Touches;

constexpr PeerId kPeer{7, 1};
constexpr PeerId kOther{8, 1};

std::vector<size_t> all_of(const std::vector<Key>& keys) {
  std::vector<size_t> rows(keys.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = i;
  return rows;
}

void note(Touches& touches, PeerId peer, uint64_t first, size_t n) {
  const std::vector<Key> keys = keys_from(first, n);
  touches.note(peer, keys, all_of(keys));
}

TEST(touches_name_the_last_reads_first_and_each_once) {
  Touches touches;
  note(touches, kPeer, 0, 3);
  note(touches, kOther, 10, 2);
  note(touches, kPeer, 2, 2);
  const auto drained = touches.drain(0);
  CHECK_EQ(drained.size(), 2u);
  CHECK(drained[0].peer == kPeer && drained[1].peer == kOther);
  CHECK(drained[0].keys == (std::vector<Key>{key_of(2), key_of(3), key_of(0), key_of(1)}));
  CHECK(drained[1].keys == keys_from(10, 2));
  CHECK(touches.drain(0).empty());
}

TEST(touches_are_bounded_and_every_read_has_the_same_chance) {
  constexpr size_t kBatch = 64, kBatches = 4 * Touches::kMost / kBatch;
  std::vector<size_t> n_kept(kBatches);
  constexpr size_t kRounds = 50;
  Touches touches;
  for (size_t round = 0; round < kRounds; ++round) {
    for (size_t batch = 0; batch < kBatches; ++batch) note(touches, kPeer, batch * kBatch, kBatch);
    const auto drained = touches.drain(0);
    CHECK_EQ(drained.size(), 1u);
    CHECK(drained[0].keys.size() <= Touches::kMost);
    CHECK(drained[0].keys.size() > Touches::kMost / 2);
    const std::set<uint64_t> numbers = [&] {
      std::set<uint64_t> all;
      for (const Key& key : drained[0].keys) all.insert(p2pkv::hash_of(key));
      return all;
    }();
    for (size_t batch = 0; batch < kBatches; ++batch) {
      n_kept[batch] += numbers.count(p2pkv::hash_of(key_of(batch * kBatch)));
    }
  }
  // A quarter of the reads is kept: of the first ones as of the last.
  const auto of_quarter = [&](size_t quarter) {
    size_t n = 0;
    for (size_t i = 0; i < kBatches / 4; ++i) n += n_kept[quarter * kBatches / 4 + i];
    return static_cast<double>(n) / static_cast<double>(kRounds * kBatches / 4);
  };
  for (size_t quarter = 0; quarter < 4; ++quarter) {
    CHECK(of_quarter(quarter) > 0.17);
    CHECK(of_quarter(quarter) < 0.33);
  }
}

TEST(touches_wake_who_waits_for_them) {
  Touches touches;
  std::thread reader([&] { note(touches, kPeer, 0, 1); });
  CHECK_EQ(touches.drain(60).size(), 1u);
  reader.join();
  std::thread closer([&] { touches.close(); });
  CHECK(touches.drain(60).empty());
  closer.join();
  note(touches, kPeer, 0, 1);
  CHECK(touches.drain(0).empty());
}

int64_t now = 0;

TEST(touches_beyond_an_owners_budget_do_not_count) {
  now = 0;
  TouchBudget budget([] { return now; });
  CHECK_EQ(budget.take(1000), 1000u);
  CHECK_EQ(budget.take(1 << 20), size_t{TouchBudget::kBurst} - 1000);
  CHECK_EQ(budget.take(1), 0u);
  now += 100'000'000;
  CHECK_EQ(budget.take(1 << 20), size_t{TouchBudget::kASecond / 10});
  now += 3'600'000'000'000;
  CHECK_EQ(budget.take(1 << 20), size_t{TouchBudget::kBurst});
  // However often it is asked, what a moment earns is not lost.
  size_t n = 0;
  for (int i = 0; i < 100'000; ++i) {
    now += 10'000;
    n += budget.take(1 << 20);
  }
  CHECK(n > size_t{TouchBudget::kASecond} * 9 / 10);
}

// Notes which pages a directory's server was told of.
struct Heard {
  std::mutex mutex;
  std::vector<Key> keys;

  p2pkv::Touch touch() {
    return [this](const Key* touched, size_t n) {
      const std::lock_guard lock(mutex);
      keys.insert(keys.end(), touched, touched + n);
      return n;
    };
  }
};

TEST(touches_reach_the_owner_and_look_ups_skip_their_answers) {
  Served served;
  Heard heard;
  served.server->serve_touches(heard.touch());
  const auto channel = served.channel();
  const std::vector<Key> keys = keys_from(0, 1000);
  for (size_t i = 0; i < 3; ++i) {
    const auto told = channel->touch(keys.data(), keys.size());
    CHECK(told.is_usable);
    CHECK_EQ(told.n_pages, 1000u);
    CHECK(channel->n_late() >= 2);
    const Answer answer = look_up(channel, keys_from(0, 3));  // answered in the order of the questions
    CHECK(answer.is_answered);
    CHECK(answer.is_usable);
    CHECK_EQ(channel->n_late(), 0u);
    CHECK_EQ(served.server->stats().touches, 1000 * (i + 1));
  }
  CHECK_EQ(heard.keys.size(), 3000u);
  // The first page comes last, and with it the front of its hundreds.
  CHECK(heard.keys[512 - 128] == keys[0]);
  CHECK(heard.keys[0] == keys[512 - 128]);
  served.server->serve_touches({});
  CHECK(channel->touch(keys.data(), 1).is_usable);
  CHECK(look_up(channel, keys_from(0, 3)).is_answered);
  CHECK_EQ(served.server->stats().touches, 3000u);
}

TEST(touches_are_few_to_an_owner_that_answers_nothing) {
  Served served;
  const auto channel = served.channel();
  const auto promoter = std::make_shared<HeldPromoter>();
  served.server->serve_promotions(promoter);
  CHECK(!promote(channel, keys_from(0, 10), 0.01).is_answered);  // no other question is heard until it is
  const std::vector<Key> keys = keys_from(0, 100'000);
  size_t n_told = 0;
  for (int i = 0; i < 10; ++i) n_told += channel->touch(keys.data(), keys.size()).n_pages;
  CHECK(n_told > 0 && n_told <= 8 * 512);
  promoter->answer_one();
}

// Owners of a p2pkv from before answer as they do to any kind that they don't know.
TEST(touches_are_not_told_to_who_does_not_know_of_them) {
  p2pkv::test::ZmqContext loads_the_library;
  Shard shard(1024);
  shard.set_view(&kOwner, &kBoot, 1);
  std::atomic<size_t> n_touches{0};
  std::mutex mutex;
  std::vector<std::thread> owners;
  const auto answer_all = [&](SealedStream stream) {
    for (;;) {
      if (p2pkv::receive_by(stream, Deadline::after(10)) != SealedStream::Progress::kFrame) return;
      p2pkv::wire::Reader body(stream.message());
      const auto header = *body.value<p2pkv::wire::Header>();
      if (static_cast<Kind>(header.kind) == Kind::kTouch) ++n_touches;
      stream.put(p2pkv::answer_directory_request(shard, header, body, kBoot), {});
      stream.flush();
    }
  };
  std::string error;
  p2pkv::SealedDoor door(p2pkv::kDirectoryDoor, [&](SealedStream stream) {
    const std::lock_guard lock(mutex);
    owners.emplace_back(answer_all, std::move(stream));
  });
  CHECK(door.start({}, &error));
  {
    const auto channel =
        DirectoryChannel::open(door.accept(DirectoryChannel::request(), &error), kBoot, 10, &error);
    CHECK(channel != nullptr);
    const std::vector<Key> keys = keys_from(0, 3);
    CHECK_EQ(channel->touch(keys.data(), 3).n_pages, 3u);
    for (int i = 0; i < 3; ++i) {
      const Answer answer = look_up(channel, keys);
      CHECK(answer.is_answered);
      CHECK(answer.is_usable);
      CHECK_EQ(channel->touch(keys.data(), 3).n_pages, 0u);
    }
    CHECK_EQ(n_touches, 1u);
  }
  door.close();
  for (std::thread& owner : owners) owner.join();
}

}  // namespace
