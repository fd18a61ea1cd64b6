// This log holds what came to this node's memory and disk and what went from there, in order, for the thread
// that tells others; and passes it on to the history that is asked what became of a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/zeroed_array.h"
#include "page/location.h"
#include "page/page_history.h"

namespace p2pkv {

enum class Medium : uint8_t { kMemory = 0, kDisk = 1 };

struct Change {
  Key key;
  Medium medium;
  bool is_stored;  // else the page has gone
};

// A bounded ring. Who pushes holds the lock under which the change is made, so the last record of a page says
// what became of it. When nobody drains, all records are given up at once: from a part of them nobody could
// tell what is there, while a listing that is begun after the loss was seen, followed by the records since,
// can. Thread-safe.
class ChangeLog {
 public:
  // `capacity` 0: nobody is told, and only the history, which may be null, remembers.
  explicit ChangeLog(size_t capacity, std::shared_ptr<PageHistory> history = nullptr)
      : history_(std::move(history)), ring_(capacity) {}

  // Of what changes a medium: an event that brings a page to it, or takes one from it.
  void push(const Key& key, Medium medium, PageEvent event);
  // Of a page that was not taken: nothing has changed.
  void note_refused(const Key& key, PageEvent event);
  // Takes the oldest records, at most `max`. `is_lost`: records were given up since the last call.
  std::vector<Change> drain(size_t max, bool* is_lost);

 private:
  const std::shared_ptr<PageHistory> history_;
  std::mutex mutex_;  // guards all below; taken after the pool's or the catalog's
  ZeroedArray<Change> ring_;
  size_t first_ = 0;
  size_t size_ = 0;
  bool is_lost_ = false;
};

}  // namespace p2pkv
