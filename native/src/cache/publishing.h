// A publish and what the directory is told of it, without the interpreter in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "directory/ask_batch.h"
#include "directory/channel.h"
#include "directory/shard.h"
#include "disk/tier.h"
#include "net/wire.h"
#include "pool/pool.h"

namespace p2pkv {

// Used by one thread: `run`, `wait`, then `end`. If it ends without `end` its channels can't be used again.
class Publishing {
 public:
  // `lines`: channels to the ring's `peers_of` the keys that will be published; asking an owner without one
  // is left to the caller.
  Publishing(std::shared_ptr<const RingTable> ring, std::vector<DirectoryLine> lines);

  // Copies the batch into the pool; then, when it is sealed, tells `own`, this node's shard, and the owners
  // on the lines of the pages that are there, and `tier`, if there is one. What is not copied by the deadline
  // is left out. Waits for no answer.
  void run(Pool& pool, const PageBatch& batch, Shard& own, Sequences& sequences, Tier* tier,
           const Deadline& deadline);
  // Take the answers; as DirectoryExchange has them.
  void wait(const Deadline& deadline, const Deadline& patience);
  bool is_waiting() const { return exchange_->is_any_waiting(); }
  std::vector<uint8_t> end(const Deadline& patience);

  // What `run` has seen: pages that can be read now, stored or found, the bytes that were copied, the pages
  // that there was no time for, and those that changed while they were packed.
  size_t n_readable() const { return n_readable_; }
  uint64_t stored_bytes() const { return stored_bytes_; }
  size_t n_late() const { return n_late_; }
  size_t n_changed() const { return n_changed_; }
  // Whether a page that `run` found or stored may be gone from the pool by now.
  bool has_lost(Pool& pool) const { return pool.n_hidden() != n_hidden_; }
  // Who was asked and who has answered. Nobody is asked of pages that are not there.
  AskBatch& asked() const { return *ask_; }
  // These are the entries that are put, one a page.
  const std::vector<wire::PutEntry>& entries() const { return entries_; }

 private:
  const std::shared_ptr<const RingTable> ring_;
  const std::vector<DirectoryLine> lines_;
  size_t n_readable_ = 0;
  uint64_t stored_bytes_ = 0;
  size_t n_late_ = 0;
  size_t n_changed_ = 0;
  uint64_t n_hidden_ = 0;
  std::vector<wire::PutEntry> entries_;
  std::unique_ptr<AskBatch> ask_;
  std::unique_ptr<DirectoryExchange> exchange_;
};

}  // namespace p2pkv
