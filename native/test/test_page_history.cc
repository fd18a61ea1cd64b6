#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "keys.h"
#include "page/change_log.h"
#include "page/page_history.h"

namespace {

using p2pkv::ChangeLog;
using p2pkv::Key;
using p2pkv::Medium;
using p2pkv::PageEvent;
using p2pkv::PageHistory;
using p2pkv::test::key_of;

TEST(page_history_says_what_became_of_a_page_the_youngest_first) {
  PageHistory history(8);
  history.note(key_of(1), PageEvent::kStored);
  history.note(key_of(2), PageEvent::kStored);
  history.note(key_of(1), PageEvent::kEvicted);
  history.note(key_of(1), PageEvent::kRetracted);
  history.note(key_of(1), PageEvent::kOwnerGone, 7);
  const auto found = history.find(key_of(1));
  CHECK_EQ(found.size(), 4u);
  CHECK(found[0].event() == PageEvent::kStored);
  CHECK(found[1].event() == PageEvent::kRetracted);
  CHECK(found[2].event() == PageEvent::kEvicted);
  CHECK(found[3].event() == PageEvent::kOwnerGone);
  CHECK_EQ(found[3].owner, 7u);
  CHECK(found[0].micros() > uint64_t{1'600'000'000} * 1'000'000);
  CHECK_EQ(history.stored_at(key_of(2)), history.find(key_of(2)).front().micros());
  CHECK_EQ(history.stored_at(key_of(3)), 0u);
  CHECK(history.find(key_of(3)).empty());
}

TEST(page_history_tells_what_differs_however_often_a_page_was_asked_for_since) {
  PageHistory history(256);
  history.note(key_of(1), PageEvent::kMissed, 5);  // its owner was lost
  history.note(key_of(1), PageEvent::kMissed, 6);
  for (int again = 0; again < 100; ++again) history.note(key_of(1), PageEvent::kMissed);
  const auto found = history.find(key_of(1));
  CHECK_EQ(found.size(), 18u);
  CHECK_EQ(found.front().owner, 0u);
  CHECK_EQ(found[16].owner, 6u);
  CHECK_EQ(found[17].owner, 5u);
}

TEST(page_history_forgets_the_oldest_of_a_kind_only) {
  PageHistory history(4);
  const uint64_t began = history.reach()[1];
  history.note(key_of(1), PageEvent::kEvicted);
  for (uint64_t name = 2; name <= 4; ++name) history.note(key_of(name), PageEvent::kEvicted);
  CHECK_EQ(history.find(key_of(1)).size(), 1u);
  CHECK_EQ(history.reach()[1], began);
  history.note(key_of(5), PageEvent::kEvicted);
  for (uint64_t name = 10; name < 20; ++name) history.note(key_of(name), PageEvent::kStored);
  CHECK(history.find(key_of(1)).empty());
  for (uint64_t name = 2; name <= 5; ++name) CHECK_EQ(history.find(key_of(name)).size(), 1u);
  CHECK_EQ(history.reach()[1], history.find(key_of(2)).front().micros());
  CHECK_EQ(history.stored_at(key_of(12)), 0u);
  CHECK(history.stored_at(key_of(16)) != 0u);
}

// Whoever looks while others note gets records that were noted, of the page that was asked for.
TEST(page_history_is_read_while_it_is_written) {
  PageHistory history(64);
  std::atomic<bool> is_over{false};
  std::vector<std::thread> writers;
  for (uint64_t writer = 0; writer < 2; ++writer) {
    writers.emplace_back([&, writer] {
      for (uint64_t i = 0; i < 20'000; ++i) {
        history.note(key_of(i % 8), PageEvent::kMissed, writer * 8 + i % 8);
      }
      is_over = true;
    });
  }
  while (!is_over) {
    for (const auto& record : history.find(key_of(3))) {
      CHECK(record.key == key_of(3));
      CHECK_EQ(record.owner % 8, 3u);
    }
  }
  for (std::thread& writer : writers) writer.join();
}

TEST(change_log_tells_its_history_even_if_nobody_drains_it) {
  const auto history = std::make_shared<PageHistory>(8);
  ChangeLog log(0, history);
  log.push(key_of(1), Medium::kMemory, PageEvent::kEvicted);
  log.note_refused(key_of(2), PageEvent::kNoRoom);
  bool is_lost = true;
  CHECK(log.drain(8, &is_lost).empty());
  CHECK(!is_lost);
  CHECK(history->find(key_of(1)).front().event() == PageEvent::kEvicted);
  CHECK(history->find(key_of(2)).front().event() == PageEvent::kNoRoom);
}

TEST(change_log_is_not_told_of_pages_that_were_not_taken) {
  ChangeLog log(4);
  log.note_refused(key_of(1), PageEvent::kNoRoom);
  log.push(key_of(2), Medium::kDisk, PageEvent::kWritten);
  bool is_lost = false;
  const auto changes = log.drain(8, &is_lost);
  CHECK_EQ(changes.size(), 1u);
  CHECK(changes.front().key == key_of(2));
  CHECK(changes.front().is_stored);
}

}  // namespace
