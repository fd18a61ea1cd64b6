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

#include "base/thread.h"
#include "disk/key_log.h"
#include "disk/store.h"
#include "disk/tier.h"
#include "page/promoter.h"
#include "pool/pool.h"

namespace p2pkv {

// Thread-safe. Two threads load, one answers those whose time is over. A page is loaded once, however many
// ask for it, and pinned once for each of them.
//
// Pages that nobody waits for come after the others, at a bounded rate, and for as long as there is room: in
// what is free of the pool, and beyond that in a quarter of it in ten seconds. What finds no room is not
// loaded. So warming evicts what was used longest ago, and never what was used or promoted since.
class Promotions {
 public:
  Promotions(Pool& pool, uint64_t warm_rate, TierCounters* counters);
  ~Promotions() { close(); }
  bool start();

  void attach(disk::DiskStore* store);
  // See Promoter::promote.
  void ask(std::vector<Key> keys, Promoter::Lease lease, Deadline answer_by, Promoter::Done done);
  // See Promoter::release, and Promoter::leave.
  void release(uint64_t lease);
  void leave(uint64_t asker);
  // After pages were taken back from the store: those loaded before are in the pool when it returns, and no
  // others come.
  void wait_committed();
  // Keys of which the directory is to be told again, oldest first: pages that came into the pool, and pages
  // that were asked for here and are nowhere.
  std::vector<Key> drain(size_t max) { return changed_->drain(max, Deadline::after(0)); }
  // For others who have the directory told again; they wake the pool's drainer as well.
  std::shared_ptr<disk::KeyLog> changed() const { return changed_; }
  // Answers all with what is there; nothing is called back once it has returned. Idempotent.
  void close();

 private:
  using Clock = Deadline::Clock;
  // The pins of one reader, of all its questions under one id.
  struct Lease {
    double seconds;
    Clock::time_point end;
    uint64_t id;
    uint64_t asker;
    std::vector<uint64_t> tickets;
    uint64_t nbytes = 0;  // that it pins
    bool is_over = false;
  };
  struct Question {
    std::shared_ptr<Lease> lease;
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

  std::shared_ptr<Lease> lease_of(Promoter::Lease asked);
  void end(Lease& lease, std::vector<uint64_t>* tickets);
  uint64_t room_of(uint64_t asker) const;
  void find_in_pool(const std::vector<Key>& keys, Promoter::Lease lease, Question* question,
                    std::vector<uint64_t>* tickets, uint64_t* nbytes);
  void tell_changed(const std::vector<Key>& keys);
  void enlist(const Key& key, const Shared& question, size_t row, bool is_urgent);
  static void answer(const Shared& question);
  void answer_in_time();
  void load_all();
  bool take(std::vector<Block>* blocks, double* lease_seconds);
  uint64_t take_from(std::deque<Key>& queue, uint64_t limit, std::vector<Block>* blocks,
                     double* lease_seconds);
  bool may_warm();
  uint64_t warm_room(uint64_t* n_free);
  void stop_warming();
  void fill(std::vector<Block>& blocks, double lease_seconds);
  std::vector<Block> read_into_pool(std::vector<Block>& blocks, std::vector<PoolStatus>* reserved);
  // What became of a page that was loaded; the ticket is 0 where it has no pin.
  struct Loaded {
    std::vector<uint8_t> found;
    std::vector<Location> locations;
    std::vector<uint64_t> tickets;
  };
  void settle(const std::vector<Block>& blocks, const Loaded& loaded);
  void pin_again(const Key& key, Lease& lease);
  void unpin(const std::vector<uint64_t>& tickets);

  // This part of the pool may be evicted for pages that nobody waits for.
  static constexpr uint64_t kWarmPart = 4;

  Pool& pool_;
  const double warm_rate_;  // bytes a second
  TierCounters& counters_;
  const std::shared_ptr<disk::KeyLog> changed_;

  std::mutex mutex_;                  // guards all below but the threads; nothing is called back with it held
  std::condition_variable wanted_;    // loaders wait
  std::condition_variable due_soon_;  // the answerer waits
  disk::DiskStore* store_ = nullptr;
  std::unordered_map<Key, Load, KeyHash> loads_;
  std::deque<Key> urgent_;
  std::deque<Key> warm_;
  std::unordered_map<uint64_t, std::shared_ptr<Lease>> leases_;  // by id, of those that can be released
  // All that have not ended, those as well whose id is known already.
  std::unordered_map<uint64_t, std::vector<std::shared_ptr<Lease>>> by_asker_;
  Clock::time_point swept_ = Clock::now();         // when those that had ended were forgotten
  std::multimap<Clock::time_point, Shared> open_;  // by when they must be answered
  double warm_bytes_;                              // may be loaded for nobody now; below 0: in debt
  double share_bytes_;                             // may be evicted for that now
  Clock::time_point warmed_ = Clock::now();        // when these two were counted
  bool is_closing_ = false;
  NamedThread loaders_[2];
  NamedThread answerer_;
  std::mutex closing_;  // held by the one close() that does the work
};

}  // namespace p2pkv
