// A limit of calls: never more are in, and who came first goes in first.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/call_limit.h"
#include "check.h"

namespace {

using p2pkv::CallLimit;
using p2pkv::Deadline;

}  // namespace

TEST(call_limit_never_lets_more_in) {
  CallLimit limit(3);
  std::atomic<int> n_in{0}, most{0}, n_refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        // Some give up at once, or while they are given a place.
        if (!limit.enter(Deadline::after(t % 2 == 0 ? 60 : 1e-6))) {
          ++n_refused;
          continue;
        }
        const int n = ++n_in;
        for (int seen = most; n > seen && !most.compare_exchange_weak(seen, n);) {
        }
        --n_in;
        limit.leave();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(most <= 3);
  CHECK_EQ(limit.n_refused(), static_cast<uint64_t>(n_refused));
  for (int i = 0; i < 3; ++i) CHECK(limit.enter(Deadline::after(0)));  // none was lost, and none is too many
  CHECK(!limit.enter(Deadline::after(0)));
}

TEST(call_limit_who_came_first_goes_in_first) {
  CallLimit limit(1);
  CHECK(limit.enter(Deadline::after(0)));
  std::vector<size_t> order;
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      CHECK(limit.enter(Deadline::after(60)));
      order.push_back(t);
      limit.leave();
    });
    while (limit.n_waiting() <= t) std::this_thread::yield();
  }
  limit.leave();
  for (std::thread& thread : threads) thread.join();
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST(call_limit_nobody_waits_at_a_closed_one) {
  CallLimit limit(1);
  CHECK(limit.enter(Deadline::after(0)));
  std::thread waiting([&] { CHECK(!limit.enter(Deadline::after(3600))); });
  while (limit.n_waiting() == 0) std::this_thread::yield();
  limit.close();
  waiting.join();
  limit.leave();
  CHECK(!limit.enter(Deadline::after(3600)));
}

TEST(call_limit_two_who_leave_at_once_give_back_two_places) {
  CallLimit limit(2);
  for (int round = 0; round < 500; ++round) {
    for (int i = 0; i < 2; ++i) CHECK(limit.enter(Deadline::after(0)));
    std::thread waiting([&] {
      CHECK(limit.enter(Deadline::after(60)));
      limit.leave();
    });
    while (limit.n_waiting() == 0) std::this_thread::yield();
    limit.leave();
    limit.leave();  // mostly before the one who waits has woken
    waiting.join();
  }
}

TEST(call_limit_is_left_by_who_gives_up_and_keeps_its_places) {
  CallLimit limit(1);
  CHECK(limit.enter(Deadline::after(0)));
  int n_asked = 0;
  CHECK(!limit.enter(Deadline::after(60), [&] { return ++n_asked == 2; }));
  CHECK_EQ(n_asked, 2);
  CHECK_EQ(limit.n_waiting(), size_t{0});
  CHECK_EQ(limit.n_refused(), uint64_t{0});
  // A place that comes while he is asked is his, for him to give back.
  CHECK(limit.enter(Deadline::after(60), [&] {
    limit.leave();
    return true;
  }));
  limit.leave();
  CHECK(limit.enter(Deadline::after(0)));
}
