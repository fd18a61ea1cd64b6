// The engine of blocking calls.
#include <fcntl.h>

#include <deque>

#include "base/fd.h"
#include "disk/io.h"

namespace p2pkv::disk {
namespace {

// A guess: enough to keep an SSD's queue from running dry with pages of 64 KiB and more.
constexpr size_t kThreads = 4;
// So that a read never waits for writes alone.
constexpr size_t kWriters = kThreads - 2;

class ThreadIo : public IoEngine {
 public:
  explicit ThreadIo(Files& files) : files_(files) {}

  ~ThreadIo() override {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    wanted_.notify_all();
    threads_.clear();
  }

  bool start_threads() {
    threads_.resize(kThreads);
    for (NamedThread& thread : threads_) {
      if (!thread.start("p2pkv-disk-io", [this] { serve(); })) return false;
    }
    return true;
  }

  const char* name() const override { return "threads"; }

 private:
  void start(std::vector<Ticket> tickets) override {
    {
      const std::lock_guard lock(mutex_);
      for (Ticket& ticket : tickets) {
        const bool is_write = ticket.op().is_write;
        (is_write ? writes_ : reads_).push_back(std::move(ticket));
      }
    }
    wanted_.notify_all();
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wanted_.wait(lock, [this] { return is_stopping_ || !reads_.empty() || can_write(); });
      if (reads_.empty() && !can_write()) return;
      const bool is_write = reads_.empty();
      std::deque<Ticket>& queue = is_write ? writes_ : reads_;
      Ticket ticket = std::move(queue.front());
      queue.pop_front();
      n_writing_ += is_write;
      lock.unlock();
      const int64_t result = perform(ticket.op());
      settle(std::move(ticket), result);
      lock.lock();
      n_writing_ -= is_write;
      if (is_write) wanted_.notify_all();
    }
  }

  bool can_write() const { return !writes_.empty() && n_writing_ < kWriters; }

  int64_t perform(const IoOp& op) {
    if (op.is_write) return files_.write(op.fd, op.buffer, op.nbytes, op.offset);
    if (op.path.empty()) return files_.read(op.fd, op.buffer, op.nbytes, op.offset);
    const UniqueFd fd(files_.open(op.path, O_RDONLY));
    if (fd.get() < 0) return fd.get();
    const int64_t n = files_.read(fd.get(), op.buffer, op.nbytes, op.offset);
    // the page goes to the pool next: a second copy in the page cache would only push out somebody else's
    posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
    return n;
  }

  Files& files_;
  std::mutex mutex_;  // guards all below but the threads
  std::condition_variable wanted_;
  std::deque<Ticket> reads_;
  std::deque<Ticket> writes_;
  size_t n_writing_ = 0;
  bool is_stopping_ = false;
  std::vector<NamedThread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> thread_io(Files& files) {
  auto engine = std::make_unique<ThreadIo>(files);
  return engine->start_threads() ? std::move(engine) : nullptr;
}

}  // namespace p2pkv::disk
