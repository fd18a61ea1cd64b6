// Copies that two threads share: each is made once, from the front, and none is under way afterwards.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "base/copy_team.h"
#include "check.h"
#include "seed.h"

namespace {

using p2pkv::Copies;
using p2pkv::CopyTeam;
using p2pkv::make_copies;
using p2pkv::TwoWays;

size_t n_threads() {
  size_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) n += entry.exists();
  return n;
}

// One batch of bytes, as the oracle sees it: how often each copy was made, and how many are under way.
class Watched {
 public:
  Watched(std::mt19937_64& random, size_t most_nbytes)
      : from_(1 + random() % most_nbytes), to_(from_.size()), n_made_(1 + random() % 64) {
    std::mt19937_64 bytes(random());
    // a prime, so that no copy looks like its neighbour
    const size_t n_drawn = std::min<size_t>(from_.size(), 4093);
    for (size_t i = 0; i < from_.size(); ++i) {
      from_[i] = i < n_drawn ? static_cast<uint8_t>(bytes() | 1) : from_[i - n_drawn];
    }
  }

  Copies copies() {
    return {n_made_.size(), from_.size(), [this](size_t i) { make(i); }};
  }

  // Checks what must hold once `n` copies are said to be made.
  void check(size_t n) const {
    CHECK_EQ(n_under_way_.load(), 0);
    for (size_t i = 0; i < n_made_.size(); ++i) CHECK_EQ(n_made_[i].load(), i < n ? 1 : 0);
    const size_t end = begin_of(n);
    CHECK(std::memcmp(from_.data(), to_.data(), end) == 0);
    CHECK(
        std::all_of(to_.begin() + static_cast<ptrdiff_t>(end), to_.end(), [](uint8_t b) { return b == 0; }));
  }

 private:
  size_t begin_of(size_t i) const { return from_.size() * i / n_made_.size(); }

  void make(size_t i) {
    ++n_under_way_;
    std::memcpy(&to_[begin_of(i)], &from_[begin_of(i)], begin_of(i + 1) - begin_of(i));
    ++n_made_[i];
    --n_under_way_;
  }

  std::vector<uint8_t> from_;
  std::vector<uint8_t> to_;
  std::vector<std::atomic<int>> n_made_;
  std::atomic<int> n_under_way_{0};
};

TEST(copy_team_makes_each_copy_once_from_the_front_and_none_afterwards) {
  std::mt19937_64 random(
      p2pkv::test::seed("copy_team_makes_each_copy_once_from_the_front_and_none_afterwards"));
  const auto team = CopyTeam::hire();
  if (!team) return;  // one core: there is none to share with
  size_t n_helped = 0;
  size_t n_cut_short = 0;
  for (int round = 0; round < 500 || n_helped == 0; ++round) {
    Watched watched(random, round % 4 == 0 ? 4 << 20 : 64 << 10);
    const int patience = random() % 3 == 0 ? static_cast<int>(random() % 8) : 1000;
    int n_asked = 0;
    size_t n_by_helper = 0;
    const Copies copies = watched.copies();
    const size_t n = team->share(copies, [&] { return ++n_asked > patience; }, &n_by_helper);
    watched.check(n);
    CHECK(n == copies.n || n_asked > patience);
    n_helped += n_by_helper;
    n_cut_short += n < copies.n;
  }
  CHECK(n_cut_short > 0);
}

TEST(copy_team_two_threads_are_at_copies_at_once) {
  const auto team = CopyTeam::hire();
  if (!team) return;
  std::atomic<int> n_there{0};
  // each waits for the other: alone, neither would end
  const Copies copies{2, 1 << 20, [&](size_t) {
                        ++n_there;
                        while (n_there < 2) std::this_thread::yield();
                      }};
  size_t n_helped = 0;
  CHECK_EQ(team->share(copies, [] { return false; }, &n_helped), size_t{2});
  CHECK_EQ(n_helped, size_t{1});
}

TEST(copy_team_serves_many_callers_of_whom_one_is_helped) {
  const uint64_t seed = p2pkv::test::seed("copy_team_serves_many_callers_of_whom_one_is_helped");
  const auto team = CopyTeam::hire();
  const p2pkv::LargeCopies before = p2pkv::large_copies();
  constexpr int kCallers = 4;
  constexpr int kRounds = 50;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([caller, seed] {
      std::mt19937_64 random(seed + static_cast<uint64_t>(caller));
      for (int round = 0; round < kRounds; ++round) {
        Watched watched(random, 4 << 20);
        watched.check(make_copies(watched.copies(), [] { return false; }));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  const p2pkv::LargeCopies after = p2pkv::large_copies();
  const uint64_t n_large = after.alone + after.shared - before.alone - before.shared;
  CHECK(n_large > 0);
  CHECK(n_large <= kCallers * kRounds);
  CHECK(!team || after.shared > before.shared);
}

TEST(copy_team_leaves_small_batches_and_single_copies_alone) {
  const auto team = CopyTeam::hire();
  const p2pkv::LargeCopies before = p2pkv::large_copies();
  size_t n = 0;
  const auto make = [&n](size_t) { ++n; };  // by this thread, or the sanitizer would say so
  CHECK_EQ(make_copies({100, CopyTeam::kLeastShared - 1, make}, [] { return false; }), size_t{100});
  CHECK_EQ(make_copies({1, uint64_t{1} << 40, make}, [] { return true; }), size_t{1});
  CHECK_EQ(make_copies({0, 0, make}, [] { return true; }), size_t{0});
  CHECK_EQ(make_copies({3, 0, make}, [] { return true; }), size_t{3});
  CHECK_EQ(n, size_t{104});
  CHECK_EQ(p2pkv::large_copies().shared, before.shared);
  CHECK_EQ(p2pkv::large_copies().alone, before.alone);
}

TEST(copy_team_asked_to_share_always_shares_what_is_small_until_it_is_gone) {
  auto team = CopyTeam::hire(CopyTeam::Zeal::kAlways);
  if (!team) return;
  const p2pkv::LargeCopies before = p2pkv::large_copies();
  make_copies({2, 2, [](size_t) {}}, [] { return false; });
  CHECK_EQ(p2pkv::large_copies().shared, before.shared + 1);
  team.reset();
  make_copies({2, 2, [](size_t) {}}, [] { return false; });
  CHECK_EQ(p2pkv::large_copies().shared, before.shared + 1);
}

TEST(copy_team_is_one_a_process_and_gone_with_who_hired_it) {
  const size_t before = n_threads();
  auto team = CopyTeam::hire();
  if (!team) return;
  CHECK_EQ(n_threads(), before + 1);
  auto again = CopyTeam::hire();
  CHECK(again == team);
  CHECK(CopyTeam::current() == team);
  CHECK_EQ(n_threads(), before + 1);
  team.reset();
  CHECK(CopyTeam::current() == again);
  again.reset();
  CHECK(CopyTeam::current() == nullptr);
  CHECK_EQ(n_threads(), before);
}

TEST(copy_team_stays_behind_in_a_fork_whose_child_may_hire_another) {
#if defined(__SANITIZE_THREAD__)
  return;  // it allows no threads in a child of a process that has some
#endif
  auto team = CopyTeam::hire();
  if (!team) return;
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    const bool is_alone = CopyTeam::current() == nullptr;
    team.reset();  // must not wait for a thread that is not there
    const auto own = CopyTeam::hire();
    std::mt19937_64 random(1);
    Watched watched(random, 4 << 20);
    watched.check(own->share(watched.copies(), [] { return false; }));
    _exit(is_alone ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(copy_team_takes_the_way_that_is_faster_and_learns_when_that_changes) {
  TwoWays ways;
  const auto n_shared = [&ways](int n_batches, double alone, double shared) {
    int n = 0;
    for (int i = 0; i < n_batches; ++i) {
      const TwoWays::Way way = ways.next();
      n += way == TwoWays::kShared;
      ways.took(way, way == TwoWays::kShared ? shared : alone);
    }
    return n;
  };
  CHECK(n_shared(320, 1.0, 0.6) >= 300);
  // a second thread that costs more than it brings goes within a few batches
  CHECK(n_shared(320, 1.0, 1.2) <= 25);
  // so does one that brings next to nothing
  CHECK(n_shared(320, 1.0, 0.95) <= 25);
  // what is tried rarely takes longer to be believed, but is
  CHECK(n_shared(640, 1.0, 0.5) >= 400);
}

}  // namespace
