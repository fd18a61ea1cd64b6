// Pages that somebody else brings into the pool, in rounds, and not all of them: nobody reads one that is not
// whole, what is not brought costs no room, and what may be written to for ever is nobody else's.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "keys.h"
#include "pool/pool.h"
#include "seed.h"

namespace {

using namespace p2pkv;
using p2pkv::test::key_of;

constexpr uint32_t kGranule = 4096;
constexpr uint64_t kPoolGranules = 512;
constexpr uint64_t kNames = 160;
constexpr size_t kBatch = 12;
constexpr size_t kThreads = 3;
constexpr uint64_t kRound = 40 << 10;  // so that a batch has several
constexpr int kBatches = 300;
constexpr int64_t kNowhere = 16;  // an address at which nobody may look

uint64_t nbytes_of(uint64_t name) {
  return 8 * (1 + name * 613 % 4000);
}

// Every 8 bytes of a page are its name.
void fill(uint8_t* to, uint64_t name, uint64_t first, uint64_t end) {
  for (uint64_t at = first; at < end; at += 8) std::memcpy(to + at, &name, 8);
}

// Writes to blocks for as long as it lives, as a device may that no longer answers.
class Scribbler {
 public:
  ~Scribbler() {
    is_over_ = true;
    thread_.join();
  }
  void add(uint8_t* at, uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    lost_.emplace_back(at, nbytes);
  }
  uint64_t n_granules() {
    const std::lock_guard lock(mutex_);
    uint64_t n = 0;
    for (const auto& [at, nbytes] : lost_) n += (nbytes + kGranule - 1) / kGranule;
    return n;
  }

 private:
  void scribble() {
    while (!is_over_) {
      std::vector<std::pair<uint8_t*, uint64_t>> lost;
      {
        const std::lock_guard lock(mutex_);
        lost = lost_;
      }
      for (const auto& [at, nbytes] : lost) std::memset(at, 0xDB, nbytes);
      std::this_thread::sleep_for(std::chrono::microseconds(200));  // a processor of its own it is not worth
    }
  }

  std::mutex mutex_;
  std::vector<std::pair<uint8_t*, uint64_t>> lost_;
  std::atomic<bool> is_over_ = false;
  std::thread thread_{[this] { scribble(); }};
};

// Brings some of the pages it is asked for, each by a thread of its own that has all of it only when it was
// waited for.
class UnsteadyGiver final : public PageGiver {
 public:
  UnsteadyGiver(std::mt19937_64& random, std::vector<uint64_t> names, Scribbler* scribbler)
      : random_(random), names_(std::move(names)), scribbler_(scribbler) {}
  ~UnsteadyGiver() override { CHECK(rounds_.empty()); }

  std::vector<GivenPage> begin(const std::vector<GivenPage>& pages, const MappedBytes& memory) override {
    Round round{{}, Outcome::kBrought, {}};
    for (const GivenPage& given : pages) {
      CHECK(given.to >= memory.base &&
            given.to + nbytes_of(names_[given.page]) <= memory.base + memory.nbytes);
      if (random_() % 6 != 0) round.pages.push_back(given);
    }
    if (random_() % 5 == 0) round.outcome = Outcome::kFailed;
    if (scribbler_ != nullptr && random_() % 40 == 0) round.outcome = Outcome::kLost;
    auto begun = round.pages;
    if (!begun.empty()) {
      round.bringing = std::thread([this, pages = begun] {
        for (const GivenPage& given : pages) fill(given.to, ~names_[given.page], 0, nbytes(given));
        std::this_thread::yield();
        for (const GivenPage& given : pages) fill(given.to, names_[given.page], 0, nbytes(given));
      });
      rounds_.push_back(std::move(round));
    }
    return begun;
  }

  Outcome wait() override {
    Round round = std::move(rounds_.front());
    rounds_.pop_front();
    round.bringing.join();
    for (const GivenPage& given : round.pages) {
      if (round.outcome == Outcome::kFailed)
        fill(given.to, ~uint64_t{0}, nbytes(given) / 2 / 8 * 8, nbytes(given));
      if (round.outcome == Outcome::kLost) scribbler_->add(given.to, nbytes(given));
    }
    return round.outcome;
  }

 private:
  struct Round {
    std::vector<GivenPage> pages;
    Outcome outcome;
    std::thread bringing;
  };
  uint64_t nbytes(const GivenPage& given) const { return nbytes_of(names_[given.page]); }

  std::mt19937_64& random_;
  const std::vector<uint64_t> names_;
  Scribbler* const scribbler_;
  std::deque<Round> rounds_;
};

struct Counts {
  std::atomic<uint64_t> given{0};
  std::atomic<uint64_t> not_brought{0};
  std::atomic<uint64_t> hits{0};
  std::atomic<uint64_t> wrong{0};
};

std::shared_ptr<Pool> make_pool() {
  PoolOptions options{};
  options.nbytes = kPoolGranules * kGranule;
  options.granule = kGranule;
  options.given_at_once = kRound;
  std::string error;
  auto pool = Pool::create(options, &error);
  CHECK(pool != nullptr && pool->takes_given());
  return pool;
}

void give_and_read(Pool& pool, uint64_t seed, Scribbler* scribbler, Counts* counts) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<uint8_t>> memory(kBatch, std::vector<uint8_t>(8 * 4000));
  for (int turn = 0; turn < kBatches; ++turn) {
    std::vector<uint64_t> names;
    std::vector<Key> keys;
    std::vector<Piece> given, own;
    const uint64_t first = random() % kNames;
    for (size_t i = 0; i < kBatch; ++i) {
      names.push_back((first + i) % kNames);
      keys.push_back(key_of(names[i]));
      given.push_back({kNowhere, static_cast<int64_t>(nbytes_of(names[i]))});
      own.push_back({reinterpret_cast<int64_t>(memory[i].data()), given[i].nbytes});
    }
    std::vector<PoolStatus> statuses(kBatch);
    std::vector<Location> locations(kBatch);
    UnsteadyGiver giver(random, names, scribbler);
    const Deadline deadline = Deadline::after(random() % 8 == 0 ? 0.0 : 60.0);
    pool.publish({kBatch, 1, keys.data(), given.data()}, statuses.data(), locations.data(), deadline, nullptr,
                 {}, &giver);
    for (size_t i = 0; i < kBatch; ++i) {
      counts->given += statuses[i] == PoolStatus::kStored;
      counts->not_brought += statuses[i] == PoolStatus::kNotTried;
      const bool is_there = statuses[i] == PoolStatus::kStored || statuses[i] == PoolStatus::kExists;
      CHECK_EQ(locations[i].length, is_there ? nbytes_of(names[i]) : 0);
      fill(memory[i].data(), names[i], 0, nbytes_of(names[i]));
      if (statuses[i] == PoolStatus::kStored)
        counts->wrong += locations[i].checksum != checksum(memory[i].data(), nbytes_of(names[i]));
    }
    if (random() % 3 == 0)
      pool.publish({kBatch, 1, keys.data(), own.data()}, statuses.data(), locations.data());
    for (size_t i = 0; i < kBatch; ++i) std::fill(memory[i].begin(), memory[i].end(), uint8_t{0});
    std::vector<FetchStatus> fetched(kBatch);
    pool.fetch({kBatch, 1, keys.data(), own.data()}, fetched.data());
    for (size_t i = 0; i < kBatch; ++i) {
      if (fetched[i] != FetchStatus::kHit) continue;
      ++counts->hits;
      std::vector<uint8_t> wanted(nbytes_of(names[i]));
      fill(wanted.data(), names[i], 0, wanted.size());
      counts->wrong += std::memcmp(wanted.data(), memory[i].data(), wanted.size()) != 0;
    }
  }
}

void hunt(const char* test, bool is_lossy) {
  const uint64_t seed = p2pkv::test::seed(test);
  const auto pool = make_pool();
  Counts counts;
  Scribbler scribbler;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i)
    threads.emplace_back(
        [&, i] { give_and_read(*pool, seed + i, is_lossy ? &scribbler : nullptr, &counts); });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(counts.wrong, 0u);
  CHECK(counts.given > 0 && counts.not_brought > 0 && counts.hits > 0);
  pool->purge();
  CHECK_EQ(pool->stats().pages, 0u);
  CHECK_EQ(pool->stats().used, scribbler.n_granules() * kGranule);
  CHECK(is_lossy || pool->release_memory());
}

}  // namespace

TEST(given_pages_are_whole_and_what_is_not_brought_costs_no_room) {
  hunt("given_pages_are_whole", false);
}

TEST(given_blocks_that_were_lost_are_nobodys_again) {
  hunt("given_blocks_that_were_lost", true);
}
