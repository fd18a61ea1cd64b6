// Processes that publish, evict and retract in one memory, one after the other, each killed at any moment:
// what the next one finds is what was published, and nothing that was taken back. A reader that knows where
// pages lay in any of their lives never has another page's bytes proven.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <iostream>

#include "kept_pool.h"
#include "seed.h"

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kLives = 10;
#else
constexpr int kLives = 40;
#endif
constexpr uint32_t kNames = 96;
constexpr uint32_t kThreads = 2;
constexpr uint64_t kWordsOf = 512;  // 8-byte words a granule

enum class Phase : uint64_t { kNone, kPublishing, kPublished, kRetracting, kRetracted };

// What the world knows of a name. One thread writes it, in one life after the other.
struct Known {
  std::atomic<uint64_t> version;
  std::atomic<Phase> phase;
  // Where it was published last, under a count that is odd while that is written.
  std::atomic<uint64_t> n_written;
  Location location;
  uint64_t value;
};

struct World {
  std::atomic<uint64_t> n_calls;
  Known names[kNames];
};

World* make_world() {
  void* memory = mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  return new (memory) World{};
}

size_t nbytes_of(uint64_t name, uint64_t version) {
  return (1 + (name + version) % 5) * kGranule - 8 * (name % 3);
}

uint64_t value_of(uint64_t name, uint64_t version) {
  return version << 16 | name;
}

bool is_all(const uint64_t* words, size_t nbytes, uint64_t value) {
  return std::all_of(words, words + nbytes / 8, [&](uint64_t word) { return word == value; });
}

void tell_location(Known& known, const Location& location, uint64_t value) {
  known.n_written = known.n_written | 1;  // it may be odd, since who wrote it before was killed
  known.location = location;
  known.value = value;
  known.n_written.fetch_add(1);
}

void publish_version(Pool& pool, Known& known, uint64_t name, std::vector<uint64_t>& words) {
  const uint64_t version = known.version + 1;
  const size_t nbytes = nbytes_of(name, version);
  std::fill_n(words.begin(), nbytes / 8, value_of(name, version));
  known.version = version;
  known.phase = Phase::kPublishing;
  const Key key = key_of(name);
  const Piece piece{reinterpret_cast<int64_t>(words.data()), static_cast<int64_t>(nbytes)};
  PoolStatus status{};
  Location location{};
  pool.publish({1, 1, &key, &piece}, &status, &location);
  if (status == PoolStatus::kNoRoom) {
    known.phase = Phase::kRetracted;
    return;
  }
  CHECK(status == PoolStatus::kStored);
  known.phase = Phase::kPublished;
  tell_location(known, location, value_of(name, version));
}

// Publishes and retracts for ever. A name is published only when it is surely gone.
void work(Pool& pool, World& world, uint32_t thread, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> words(8 * kWordsOf);
  for (;;) {
    const uint64_t name = random() % (kNames / kThreads) * kThreads + thread;
    Known& known = world.names[name];
    if (!contains(pool, name)) {
      publish_version(pool, known, name, words);
    } else {
      known.phase = Phase::kRetracting;
      retract(pool, name);
      known.phase = Phase::kRetracted;
    }
    ++world.n_calls;
  }
}

[[noreturn]] void live(const KeptMemory& memory, World& world, uint64_t n_granules, uint64_t seed) {
  const auto pool = adopt(memory, n_granules);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { work(*pool, world, i, seed + i); });
  for (auto& thread : threads) thread.join();
  std::abort();
}

// Reads behind everybody's back until `end`, where any life has said that a page lies.
struct Reader {
  const p2pkv::ReadOnlyMapping& mapping;
  World& world;
  std::mt19937_64& random;
  std::vector<std::pair<Location, uint64_t>> old = {};  // of any life
  uint64_t n_proven = 0;
  uint64_t n_refused = 0;

  void read_until(const p2pkv::Deadline& end) {
    while (!end.passed()) {
      Known& known = world.names[random() % kNames];
      const uint64_t before = known.n_written;
      const Location location = known.location;
      const uint64_t value = known.value;
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 == 0 && before == known.n_written && location.length != 0) {
        if (old.size() < 4096) old.emplace_back(location, value);
        old[random() % old.size()] = {location, value};
        read(location, value);
      }
      if (!old.empty()) {
        const auto& [where, what] = old[random() % old.size()];
        read(where, what);
      }
    }
  }

#if defined(__GNUC__)
  __attribute__((no_sanitize("thread")))
#endif
  void
  read(const Location& location, uint64_t value) {
    std::vector<uint64_t> words(location.length / 8);
    std::memcpy(words.data(), mapping.base() + location.offset, location.length);
    if (p2pkv::load_word_after_bytes(mapping.base() + location.word_offset) != location.generation) {
      ++n_refused;
      return;
    }
    CHECK(is_all(words.data(), location.length, value));
    ++n_proven;
  }
};

// What a successor finds of each name. Returns how many pages there are.
size_t check_found(Pool& pool, World& world, bool may_evict) {
  size_t n_found = 0;
  std::vector<uint64_t> words(8 * kWordsOf);
  for (uint64_t name = 0; name < kNames; ++name) {
    const Known& known = world.names[name];
    const size_t nbytes = nbytes_of(name, known.version);
    const bool is_there = contains(pool, name);
    const Phase phase = known.phase;
    if (phase == Phase::kNone || phase == Phase::kRetracted) CHECK(!is_there);
    if (phase == Phase::kPublished && !may_evict) CHECK(is_there);
    if (!is_there) continue;
    ++n_found;
    const Key key = key_of(name);
    const Piece piece{reinterpret_cast<int64_t>(words.data()), static_cast<int64_t>(nbytes)};
    FetchStatus status{};
    pool.fetch({1, 1, &key, &piece}, &status);
    CHECK(status == FetchStatus::kHit);
    CHECK(is_all(words.data(), nbytes, value_of(name, known.version)));
  }
  return n_found;
}

void hunt(uint64_t n_granules, bool may_evict, uint64_t seed) {
  std::mt19937_64 random(seed);
  World& world = *make_world();
  auto first = make_kept_pool(n_granules);
  const KeptMemory memory(*first);
  CHECK(first->leave_memory());
  const p2pkv::UniqueFd fd = p2pkv::open_read_only(memory.pool.get());
  std::string error;
  const auto mapping =
      p2pkv::ReadOnlyMapping::map(fd.get(), first->data_offset() + first->data_nbytes(), &error);
  CHECK(mapping != nullptr);
  first.reset();
  Reader reader{*mapping, world, random};
  size_t n_found = 0;
  uint64_t n_calls = 0;
  for (int life = 0; life < kLives; ++life) {
    const uint64_t its_seed = random();
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) live(memory, world, n_granules, its_seed);
    while (world.n_calls == n_calls) {
      reader.read_until(p2pkv::Deadline::after(0.0005));
      if (waitpid(child, nullptr, WNOHANG) != 0) {
        CHECK(!"a life has ended before anybody killed it");
        return;
      }
    }
    reader.read_until(p2pkv::Deadline::after(static_cast<double>(random() % 4000) / 1e6));
    CHECK_EQ(kill(child, SIGKILL), 0);
    if (life % 2 == 0) CHECK_EQ(waitpid(child, nullptr, 0), child);
    const auto pool = adopt(memory, n_granules);  // else the lock alone says that it writes no more
    n_calls = world.n_calls;
    n_found += check_found(*pool, world, may_evict);
    CHECK(pool->leave_memory());
    if (life % 2 == 1) CHECK_EQ(waitpid(child, nullptr, 0), child);
  }
  std::cout << "        " << n_calls << " calls, " << n_found << " pages taken over, " << reader.n_proven
            << " reads proven, " << reader.n_refused << " refused" << std::endl;
  CHECK(n_found > 0 && reader.n_proven > 0 && reader.n_refused > 0);
  munmap(&world, sizeof(World));
}

TEST_FIRST(pool_kept_through_kills_loses_nothing_that_was_acknowledged) {
  hunt(kNames * 6, false, p2pkv::test::seed("pool_kept_through_kills_loses_nothing_that_was_acknowledged"));
}

TEST_FIRST(pool_kept_through_kills_while_it_evicts_serves_nothing_else) {
  hunt(kNames, true, p2pkv::test::seed("pool_kept_through_kills_while_it_evicts_serves_nothing_else"));
}

}  // namespace
