// A publish and what the directory is told of it, without the interpreter in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "p2pkv/ask_batch.h"
#include "p2pkv/clock.h"
#include "p2pkv/directory_channel.h"
#include "p2pkv/pool.h"
#include "p2pkv/shard.h"

namespace p2pkv {

// Used by one thread: `run`, then `wait`. If it ends without `wait` its channels can't be used again.
class Publishing {
 public:
  // `lines`: a channel to each of the ring's `peers_of` the keys that will be published; an owner without
  // one counts as having refused what it would have been asked.
  Publishing(std::shared_ptr<const RingTable> ring, std::vector<DirectoryLine> lines);

  // Copies the batch into the pool; then, when it is sealed, tells `own`, this node's shard, and the owners
  // on the lines of the pages that are there. Waits for no answer.
  void run(Pool& pool, const PageBatch& batch, Shard& own, Sequences& sequences);
  // Takes the answers; as DirectoryExchange::wait.
  std::vector<uint8_t> wait(const Deadline& deadline, const Deadline& patience);

  // What `run` has seen: pages that can be read now, stored or found, and the bytes that were copied.
  size_t n_readable() const { return n_readable_; }
  uint64_t stored_bytes() const { return stored_bytes_; }
  // Whether a page that `run` found or stored may be gone from the pool by now.
  bool has_lost(Pool& pool) const { return pool.n_hidden() != n_hidden_; }
  // Who was asked and who has answered. Nobody is asked of pages that are not there.
  const AskBatch& asked() const { return *ask_; }

 private:
  const std::shared_ptr<const RingTable> ring_;
  const std::vector<DirectoryLine> lines_;
  size_t n_readable_ = 0;
  uint64_t stored_bytes_ = 0;
  uint64_t n_hidden_ = 0;
  std::unique_ptr<AskBatch> ask_;
  std::unique_ptr<DirectoryExchange> exchange_;
};

}  // namespace p2pkv
