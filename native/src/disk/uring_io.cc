// The engine of io_uring: any thread submits, one thread takes what is done.
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <iterator>

#include "base/fd.h"
#include "disk/io.h"

namespace p2pkv::disk {
namespace {

constexpr unsigned kEntries = 128;
// Writes under way at once: few, because reads queue behind them inside the device.
constexpr size_t kMaxWrites = 8;
constexpr uint64_t kStop = ~uint64_t{0};

// The two rings, shared with the kernel.
class Ring {
 public:
  ~Ring() {
    if (sqes_ != MAP_FAILED) munmap(sqes_, sqes_nbytes_);
    if (rings_ != MAP_FAILED) munmap(rings_, rings_nbytes_);
  }

  bool open(std::string* error) {
    io_uring_params params{};
    params.flags = IORING_SETUP_CLAMP;
    fd_ = UniqueFd(static_cast<int>(syscall(__NR_io_uring_setup, kEntries, &params)));
    if (fd_.get() < 0) return refuse("io_uring_setup", error);
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0 || (params.features & IORING_FEAT_NODROP) == 0) {
      *error = "this kernel's io_uring is older than 5.6";
      return false;
    }
    rings_nbytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                                     params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    rings_ = mmap(nullptr, rings_nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(),
                  IORING_OFF_SQ_RING);
    sqes_nbytes_ = params.sq_entries * sizeof(io_uring_sqe);
    sqes_ = mmap(nullptr, sqes_nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(),
                 IORING_OFF_SQES);
    if (rings_ == MAP_FAILED || sqes_ == MAP_FAILED) return refuse("mapping io_uring's rings", error);
    auto at = [this](uint32_t offset) {
      return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(rings_) + offset);
    };
    sq_tail_ = at(params.sq_off.tail);
    sq_mask_ = *at(params.sq_off.ring_mask);
    sq_array_ = at(params.sq_off.array);
    cq_head_ = at(params.cq_off.head);
    cq_tail_ = at(params.cq_off.tail);
    cq_mask_ = *at(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(static_cast<uint8_t*>(rings_) + params.cq_off.cqes);
    return true;
  }

  bool register_buffers(const std::vector<iovec>& buffers) {
    return syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_BUFFERS, buffers.data(),
                   static_cast<unsigned>(buffers.size())) == 0;
  }

  // By one thread at a time, as are `submit`'s. There is always room: the engine counts.
  void push(const io_uring_sqe& sqe) {
    const uint32_t tail = *sq_tail_;
    static_cast<io_uring_sqe*>(sqes_)[tail & sq_mask_] = sqe;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++n_pushed_;
  }

  // Hands what was pushed to the kernel; 0 or -errno, and then the rest stays in the ring.
  int submit() {
    while (n_pushed_ > 0) {
      const int n = enter(n_pushed_, 0, 0);
      if (n < 0 && n != -EINTR) return n;
      if (n > 0) n_pushed_ -= static_cast<unsigned>(n);
    }
    return 0;
  }

  // Takes out what was pushed and the kernel does not take; `user_data` of each.
  std::vector<uint64_t> take_back() {
    std::vector<uint64_t> refused;
    uint32_t tail = *sq_tail_;
    for (; n_pushed_ > 0; --n_pushed_)
      refused.push_back(static_cast<io_uring_sqe*>(sqes_)[--tail & sq_mask_].user_data);
    __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
    return refused;
  }

  // By one thread. Waits for at least one.
  template <typename Take>
  void take(Take take_one) {
    uint32_t head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) enter(0, 1, IORING_ENTER_GETEVENTS);
    const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    while (head != tail) {
      const io_uring_cqe cqe = cqes_[head & cq_mask_];
      __atomic_store_n(cq_head_, ++head, __ATOMIC_RELEASE);
      take_one(cqe.user_data, cqe.res);
    }
  }

 private:
  int enter(unsigned to_submit, unsigned min_complete, unsigned flags) {
    const long n =
        syscall(__NR_io_uring_enter, fd_.get(), to_submit, min_complete, flags, nullptr, size_t{0});
    return n < 0 ? -errno : static_cast<int>(n);
  }

  static bool refuse(const char* what, std::string* error) {
    *error = std::string(what) + ": " + std::strerror(errno);
    return false;
  }

  UniqueFd fd_;
  void* rings_ = MAP_FAILED;
  void* sqes_ = MAP_FAILED;
  size_t rings_nbytes_ = 0;
  size_t sqes_nbytes_ = 0;
  uint32_t* sq_tail_ = nullptr;
  uint32_t* sq_array_ = nullptr;
  uint32_t sq_mask_ = 0;
  uint32_t* cq_head_ = nullptr;
  uint32_t* cq_tail_ = nullptr;
  uint32_t cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  unsigned n_pushed_ = 0;
};

class UringIo : public IoEngine {
 public:
  ~UringIo() override {
    if (!is_open_) return;
    {
      const std::lock_guard lock(mutex_);
      io_uring_sqe sqe{};
      sqe.opcode = IORING_OP_NOP;
      sqe.user_data = kStop;
      ring_.push(sqe);
      // nothing else is under way, and nobody waits for the lock
      while (ring_.submit() < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    reaper_.join();
  }

  bool open(const std::vector<const Arena*>& arenas, std::string* error) {
    if (!ring_.open(error)) return false;
    std::vector<iovec> buffers;
    for (const Arena* arena : arenas) buffers.push_back({arena->base(), arena->nbytes()});
    // refused where RLIMIT_MEMLOCK is small: then the kernel pins the memory for each operation
    if (ring_.register_buffers(buffers)) registered_ = buffers;
    slots_.resize(kEntries - 1);  // one entry stays for the stop
    for (size_t i = 0; i < slots_.size(); ++i) free_.push_back(i);
    is_open_ = reaper_.start("p2pkv-disk-io", [this] { reap(); });
    if (!is_open_) *error = "the system has no thread to give";
    return is_open_;
  }

  const char* name() const override { return "io_uring"; }

 private:
  struct Refused {
    std::vector<Ticket> tickets;
    int error = 0;
  };

  void start(std::vector<Ticket> tickets) override {
    Refused refused;
    {
      const std::lock_guard lock(mutex_);
      for (Ticket& ticket : tickets) {
        const bool is_write = ticket.op().is_write;
        (is_write ? writes_ : reads_).push_back(std::move(ticket));
      }
      refused = push_waiting();
    }
    give_up(std::move(refused));
  }

  // Without the lock.
  void give_up(Refused refused) {
    for (Ticket& ticket : refused.tickets) settle(std::move(ticket), refused.error);
  }

  // With the lock. A kernel that takes nothing (its memory is used up) is the disk's trouble: what waits
  // fails, for nobody else might come to try again.
  Refused push_waiting() {
    while (!free_.empty()) {
      const bool is_write = reads_.empty();
      if (is_write && (writes_.empty() || n_writing_ >= kMaxWrites)) break;
      std::deque<Ticket>& queue = is_write ? writes_ : reads_;
      const size_t slot = free_.back();
      free_.pop_back();
      slots_[slot] = std::move(queue.front());
      queue.pop_front();
      n_writing_ += is_write;
      ring_.push(entry_of(slots_[slot].op(), slot));
    }
    Refused refused{{}, ring_.submit()};
    if (refused.error == 0) return refused;
    for (const uint64_t slot : ring_.take_back()) {
      n_writing_ -= slots_[slot].op().is_write;
      refused.tickets.push_back(std::move(slots_[slot]));
      free_.push_back(slot);
    }
    for (std::deque<Ticket>* queue : {&reads_, &writes_}) {
      std::move(queue->begin(), queue->end(), std::back_inserter(refused.tickets));
      queue->clear();
    }
    return refused;
  }

  io_uring_sqe entry_of(const IoOp& op, size_t slot) const {
    io_uring_sqe sqe{};
    sqe.opcode = op.is_write ? IORING_OP_WRITE : IORING_OP_READ;
    sqe.fd = op.fd;
    sqe.off = op.offset;
    sqe.addr = reinterpret_cast<uint64_t>(op.buffer);
    sqe.len = op.nbytes;
    sqe.user_data = slot;
    for (size_t i = 0; i < registered_.size(); ++i) {
      const auto* base = static_cast<const uint8_t*>(registered_[i].iov_base);
      if (op.buffer >= base && op.buffer + op.nbytes <= base + registered_[i].iov_len) {
        sqe.opcode = op.is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
        sqe.buf_index = static_cast<uint16_t>(i);
      }
    }
    return sqe;
  }

  void reap() {
    bool is_stopping = false;
    while (!is_stopping) {
      ring_.take([&](uint64_t slot, int32_t result) {
        if (slot == kStop) {
          is_stopping = true;
        } else {
          finish(slot, result);
        }
      });
    }
  }

  void finish(size_t slot, int64_t result) {
    Ticket ticket;
    Refused refused;
    {
      const std::lock_guard lock(mutex_);
      ticket = std::move(slots_[slot]);
      free_.push_back(slot);
      n_writing_ -= ticket.op().is_write;
      if (!reads_.empty() || !writes_.empty()) refused = push_waiting();
    }
    give_up(std::move(refused));
    // a write is cut short when space or the file's allowed size runs out
    const IoOp& op = ticket.op();
    if (op.is_write && result >= 0 && result < int64_t{op.nbytes}) result = -ENOSPC;
    settle(std::move(ticket), result);
  }

  Ring ring_;
  bool is_open_ = false;
  std::vector<iovec> registered_;
  std::mutex mutex_;  // guards the submission side of `ring_` and all below
  std::vector<Ticket> slots_;
  std::vector<size_t> free_;
  std::deque<Ticket> reads_;
  std::deque<Ticket> writes_;
  size_t n_writing_ = 0;
  NamedThread reaper_;
};

}  // namespace

std::unique_ptr<IoEngine> uring_io(const std::vector<const Arena*>& arenas, std::string* error) {
  auto engine = std::make_unique<UringIo>();
  if (!engine->open(arenas, error)) return nullptr;
  return engine;
}

}  // namespace p2pkv::disk
