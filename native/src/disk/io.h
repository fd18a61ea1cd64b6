// Batches of reads and writes that go to the disk together, while the caller does something else.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread.h"
#include "disk/arena.h"
#include "disk/files.h"

namespace p2pkv::disk {

struct IoOp {
  bool is_write = false;
  int fd = -1;       // or
  std::string path;  // a file to be opened for this one read
  uint64_t offset = 0;
  uint8_t* buffer = nullptr;
  uint32_t nbytes = 0;
  int64_t result = 0;  // bytes, fewer than asked for only at the end of a file, or -errno
};

// Operations submitted together, and whatever must live until the last of them is done: derive from it. The
// engine holds it until then, so a caller whose deadline passes just lets go.
class IoBatch {
 public:
  virtual ~IoBatch() = default;

  std::vector<IoOp> ops;  // untouched by others between submission and the end

  // Whether all are done; waits until the deadline.
  bool wait(const Deadline& deadline);

 private:
  friend class IoEngine;
  std::mutex mutex_;  // guards `n_left_`
  std::condition_variable done_;
  size_t n_left_ = 0;
};

// Thread-safe. Reads overtake writes that wait. Batches are settled on the engine's own threads.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  // "io_uring" or "threads".
  virtual const char* name() const = 0;
  void submit(std::shared_ptr<IoBatch> batch);
  // Waits until nothing is under way; false if something still is at the deadline. Then the engine, its
  // arenas and its files must be left alone for ever: the kernel may still write to them.
  bool drain(const Deadline& deadline);
  // How long the oldest read has been under way; seconds.
  double oldest_read() const;

 protected:
  struct Ticket {
    std::shared_ptr<IoBatch> batch;
    size_t index;
    int64_t submitted_ns;
    IoOp& op() const { return batch->ops[index]; }
  };
  virtual void start(std::vector<Ticket> tickets) = 0;
  // To be called once for each ticket, without locks.
  void settle(Ticket ticket, int64_t result);

 private:
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable idle_;
  size_t n_under_way_ = 0;
  std::vector<int64_t> reads_ns_;  // when the reads under way were submitted, unordered
};

// Blocking calls on a few threads: where io_uring is not to be had, and for injected faults. Null if the
// system has no threads to give.
std::unique_ptr<IoEngine> thread_io(Files& files);

// io_uring by raw system calls; operations within an arena use its registration. Null, with the reason, where
// the kernel or the container forbids it.
std::unique_ptr<IoEngine> uring_io(const std::vector<const Arena*>& arenas, std::string* error);

}  // namespace p2pkv::disk
