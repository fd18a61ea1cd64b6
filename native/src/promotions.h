// Pages on their way from the disk into the pool, and who waits for them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "p2pkv/disk/key_log.h"
#include "p2pkv/disk/store.h"
#include "p2pkv/pool.h"
#include "p2pkv/promoter.h"
#include "p2pkv/thread.h"
#include "p2pkv/tier.h"

namespace p2pkv {

// Thread-safe. Two threads load, one answers those whose time is over. A page is loaded once, however many
// ask for it. Pages that nobody waits for come after the others, at a bounded rate.
class Promotions {
 public:
  Promotions(Pool& pool, uint64_t warm_rate, TierCounters* counters);
  ~Promotions() { close(); }
  bool start();

  void attach(disk::DiskStore* store);
  // See Promoter::promote.
  void ask(std::vector<Key> keys, double lease_seconds, Deadline answer_by, Promoter::Done done);
  // Keys that came into the pool, oldest first.
  std::vector<Key> drain(size_t max) { return promoted_.drain(max, Deadline::after(0)); }
  // Answers all with what is there; nothing is called back once it has returned. Idempotent.
  void close();

 private:
  using Clock = Deadline::Clock;
  struct Question {
    double lease_seconds;
    Promoter::Done done;
    std::vector<uint8_t> found;
    std::vector<Location> locations;
    size_t n_open = 0;
    bool is_answered = false;
  };
  using Shared = std::shared_ptr<Question>;
  // One page: on its queue, or in a loader's hands.
  struct Load {
    std::vector<std::pair<Shared, size_t>> waiting;
    double lease_seconds = 0;
    bool is_urgent = false;
    bool is_taken = false;
  };
  using Lock = std::unique_lock<std::mutex>;

  void find_in_pool(const std::vector<Key>& keys, Question& question);
  void enlist(const Key& key, const Shared& question, size_t row, bool is_urgent);
  static void answer(const Shared& question);
  void answer_in_time();
  void load_all();
  bool take(std::vector<Block>* blocks, double* lease_seconds);
  bool may_warm();
  void fill(std::vector<Block>& blocks, double lease_seconds);
  void settle(const std::vector<Block>& blocks, const std::vector<uint8_t>& found,
              const std::vector<Location>& locations);

  Pool& pool_;
  const double warm_rate_;  // bytes a second
  TierCounters& counters_;
  disk::KeyLog promoted_;

  std::mutex mutex_;                  // guards all below but the threads; nothing is called back with it held
  std::condition_variable wanted_;    // loaders wait
  std::condition_variable due_soon_;  // the answerer waits
  disk::DiskStore* store_ = nullptr;
  std::unordered_map<Key, Load, KeyHash> loads_;
  std::deque<Key> urgent_;
  std::deque<Key> warm_;
  std::multimap<Clock::time_point, Shared> open_;  // by when they must be answered
  double warm_bytes_;                              // may be loaded for nobody now; below 0: in debt
  Clock::time_point warmed_ = Clock::now();        // when `warm_bytes_` was counted
  bool is_closing_ = false;
  NamedThread loaders_[2];
  NamedThread answerer_;
  std::mutex closing_;  // held by the one close() that does the work
};

}  // namespace p2pkv
