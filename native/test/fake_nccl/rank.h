// One rank of an emulated communicator: two processes, or two threads of one, that meet at a Unix socket
// named by the unique id, and pass bytes over it in the order of their streams. Stricter than NCCL where that
// finds mistakes: memory must be page-locked, and both sides must mean as many bytes.
//
// Its own code throughout: nothing but names, types and numbers is NCCL's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "fake_nccl.h"

namespace fake {

constexpr int kSuccess = 0;
constexpr int kCudaError = 1;
constexpr int kSystemError = 2;
constexpr int kInvalidArgument = 4;
constexpr int kInvalidUsage = 5;
constexpr int kRemoteError = 6;
constexpr int kInProgress = 7;

// What a test has asked for. Never destroyed: streams' threads may still run when the process ends.
struct Wishes {
  std::mutex mutex;  // guards the next four
  std::condition_variable let_go;
  bool is_held = false;
  int meeting_to_fail = 0, meeting_result = 0;
  int operation_to_fail = 0, operation_result = 0;
  std::atomic<bool> never_meet = false;
  std::atomic<int> delay_us = 0;
  std::atomic<int> abort_delay_us = 0;
  std::atomic<int64_t> communicators = 0, met = 0, aborts = 0, sends = 0, sent_bytes = 0;
};
inline Wishes& wishes = *new Wishes;

// The calls of the driver that it stands on.
struct Driver {
  int (*launch)(void* stream, void (*function)(void*), void* data);
  int (*attributes)(unsigned n, int* attributes, void** data, uint64_t pointer);
  static const Driver& get();
  bool is_page_locked(uint64_t address) const;
};

struct Operation {
  bool is_send;
  uint64_t address;
  uint64_t nbytes;
  void* stream;
};

class Rank : public std::enable_shared_from_this<Rank> {
 public:
  Rank(std::string name, int rank) : name_(std::move(name)), rank_(rank) {}

  // Meets the other rank, on a thread of its own.
  void begin();
  // Puts operations on their streams, on that thread; the first time, when the other side has some as well.
  void queue(std::deque<Operation> operations);
  int state();
  // Ends what is under way; its operations leave their streams.
  void abort();

 private:
  void run();
  bool meet();
  bool set_up();
  void put(const Operation& operation);
  void move(const Operation& operation);
  bool send_all(const uint8_t* from, uint64_t nbytes, int64_t fails_after);
  bool receive_all(uint8_t* to, uint64_t nbytes, int64_t fails_after);
  bool wait_for(int fd, short events);
  void fail(int result);
  int take_failure();

  const std::string name_;
  const int rank_;
  int connection_ = -1;
  int ending_ = -1;   // an eventfd: readable from abort() on
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<Operation> queued_;
  int state_ = kInProgress;
  bool is_set_up_ = false;
  std::atomic<bool> is_aborted_ = false;
  std::atomic<int> n_moving_ = 0;  // operations on streams
  std::thread thread_;
};

}  // namespace fake
