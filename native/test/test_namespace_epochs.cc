// Epochs of namespaces: they only grow, merge in any order, and are bounded; who raises one returns when the
// pages of before are taken back.
#include <algorithm>
#include <atomic>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "keys.h"
#include "numbers.h"
#include "page/namespace_epochs.h"
#include "seed.h"

using p2pkv::Key;
using p2pkv::NamespaceEpoch;
using p2pkv::NamespaceEpochs;
using p2pkv::test::key_of;

namespace {

bool raise(NamespaceEpochs& epochs, uint64_t name, uint64_t to) {
  const NamespaceEpoch told{key_of(name), to};
  return epochs.raise(&told, 1);
}

bool are_equal(const std::vector<NamespaceEpoch>& a, const std::vector<NamespaceEpoch>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& one, const auto& other) {
    return one.name_space == other.name_space && one.epoch == other.epoch;
  });
}

}  // namespace

TEST(epochs_are_the_greatest_that_were_told_in_whatever_order) {
  p2pkv::test::Numbers numbers(p2pkv::test::seed("namespace epochs"));
  for (int round = 0; round < 100; ++round) {
    std::vector<NamespaceEpoch> told;
    std::map<uint64_t, uint64_t> model;
    for (int i = 0; i < 60; ++i) {
      const uint64_t name = numbers.below(12);
      const uint64_t epoch = numbers.below(1000);
      told.push_back({key_of(name), epoch});
      model[name] = std::max(model[name], epoch);
    }
    NamespaceEpochs one;
    NamespaceEpochs other;
    one.follow({key_of(3), key_of(5)});
    CHECK(one.raise(told.data(), told.size()));
    std::reverse(told.begin(), told.end());
    for (const NamespaceEpoch& epoch : told) CHECK(other.raise(&epoch, 1));
    CHECK(are_equal(one.all(), other.all()));
    CHECK_EQ(one.own(), std::max(model[3], model[5]));
    CHECK_EQ(other.own(), uint64_t{0});
  }
}

TEST(an_epoch_of_every_namespace_counts_for_each) {
  NamespaceEpochs epochs;
  epochs.follow({key_of(1)});
  const NamespaceEpoch every{Key{}, 7};
  CHECK(epochs.raise(&every, 1));
  CHECK_EQ(epochs.own(), uint64_t{7});
  CHECK(raise(epochs, 1, 5));
  CHECK_EQ(epochs.own(), uint64_t{7});
  CHECK(raise(epochs, 1, 9));
  CHECK_EQ(epochs.own(), uint64_t{9});
  CHECK_EQ(epochs.n_raised(), uint64_t{2});
}

TEST(more_namespaces_than_are_kept_cost_others_pages_and_forget_nothing) {
  NamespaceEpochs epochs;
  epochs.follow({key_of(0)});
  for (uint64_t name = 0; name < NamespaceEpochs::kMost + 10; ++name) CHECK(raise(epochs, name, 1000 + name));
  CHECK_EQ(epochs.all().size(), NamespaceEpochs::kMost + 1);
  CHECK_EQ(epochs.own(), uint64_t{1009});  // the tenth and last that went
}

TEST(epochs_that_are_told_again_are_no_news) {
  NamespaceEpochs epochs;
  for (uint64_t name = 0; name < NamespaceEpochs::kMost + 10; ++name) CHECK(raise(epochs, name, 1000 + name));
  const std::vector<NamespaceEpoch> known = epochs.all();
  const uint64_t version = epochs.version();
  CHECK(epochs.raise(known.data(), known.size()));
  CHECK(epochs.raise(nullptr, 0));
  CHECK(raise(epochs, 3, 1003));  // which is one of every namespace by now
  CHECK_EQ(epochs.version(), version);
  CHECK(raise(epochs, 20, 5000));
  CHECK(epochs.version() != version);
}

TEST(an_epoch_beyond_every_clock_is_refused_with_all_that_came_with_it) {
  NamespaceEpochs epochs;
  epochs.follow({key_of(1)});
  const NamespaceEpoch told[] = {{key_of(1), 5}, {key_of(2), NamespaceEpochs::kEnd}};
  CHECK(!epochs.raise(told, 2));
  CHECK_EQ(epochs.own(), uint64_t{0});
  CHECK(epochs.all().empty());
}

TEST(whoever_raises_an_epoch_returns_when_the_pages_are_taken_back) {
  NamespaceEpochs epochs;
  epochs.follow({key_of(1)});
  std::atomic<uint64_t> taken_back{0};
  epochs.on_raised([&] {
    const uint64_t own = epochs.own();
    std::this_thread::yield();
    taken_back = own;
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (uint64_t epoch = 1; epoch <= 2000; ++epoch) {
        CHECK(raise(epochs, 1, epoch));
        CHECK(taken_back >= epoch);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(epochs.n_raised(), uint64_t{2000});
}

namespace {

constexpr int64_t kBelieved = 500;

}  // namespace

TEST(a_vigil_is_shown_as_long_as_somebody_is_awake) {
  p2pkv::Vigil vigil;
  int64_t until = 0;
  vigil.show_in(&until);
  vigil.turned(1000);
  CHECK_EQ(until, int64_t{0});  // nobody has said for how long it is to be believed
  vigil.keep(kBelieved);
  for (int64_t now = 2000; now <= 9000; now += kBelieved) {
    vigil.turned(now);
    CHECK_EQ(until, now + kBelieved);
  }
  vigil.show_in(nullptr);
  CHECK_EQ(until, int64_t{0});  // who ends hears of nothing from here on
  vigil.turned(9100);
  CHECK_EQ(until, int64_t{0});
}

TEST(who_has_slept_keeps_no_vigil_until_it_has_asked_after_that) {
  p2pkv::Vigil vigil;
  int64_t until = 0;
  vigil.show_in(&until);
  vigil.keep(kBelieved);
  vigil.turned(1000);
  const uint64_t n_before = vigil.n_sleeps();
  vigil.turned(1000 + kBelieved + 1);
  CHECK_EQ(until, 1000 + kBelieved);
  vigil.caught_up(n_before);  // asked before it slept
  vigil.turned(1600);
  CHECK_EQ(until, 1000 + kBelieved);
  vigil.caught_up(vigil.n_sleeps());
  CHECK_EQ(until, 1000 + kBelieved);  // it may sleep again by now: only who is awake says so
  vigil.turned(1700);
  CHECK_EQ(until, 1700 + kBelieved);
}

TEST(who_has_slept_answers_for_no_guest_until_their_sources_were_asked_after_that) {
  p2pkv::Vigil vigil;
  int64_t until = 0, guests = 0;
  vigil.show_in(&until, &guests);
  vigil.keep(kBelieved);
  vigil.turned(1000);
  CHECK_EQ(guests, 1000 + kBelieved);
  vigil.turned(1000 + kBelieved + 1);
  vigil.caught_up(vigil.n_sleeps());
  vigil.guests_caught_up(vigil.n_sleeps() - 1);  // asked before it slept
  vigil.turned(1600);
  CHECK_EQ(until, 1600 + kBelieved);
  CHECK_EQ(guests, 1000 + kBelieved);
  vigil.guests_caught_up(vigil.n_sleeps());
  CHECK_EQ(guests, 1000 + kBelieved);
  vigil.turned(1700);
  CHECK_EQ(guests, 1700 + kBelieved);
  vigil.show_in(nullptr);
  CHECK_EQ(guests, int64_t{0});
}

TEST(who_was_given_up_while_it_was_awake_keeps_no_vigil_until_it_has_asked_after_that) {
  p2pkv::Vigil vigil;
  int64_t until = 0, guests = 0;
  vigil.show_in(&until, &guests);
  vigil.keep(kBelieved);
  vigil.turned(1000);
  const uint64_t n_before = vigil.n_sleeps();
  vigil.was_given_up();
  vigil.caught_up(n_before);  // asked before it heard of that
  vigil.guests_caught_up(n_before);
  vigil.turned(1100);
  CHECK_EQ(until, int64_t{0});
  CHECK_EQ(guests, int64_t{0});
  vigil.caught_up(vigil.n_sleeps());
  vigil.guests_caught_up(vigil.n_sleeps());
  vigil.turned(1200);
  CHECK_EQ(until, 1200 + kBelieved);
  CHECK_EQ(guests, 1200 + kBelieved);
}
