// A communicator of two ranks on a stream of its own, driven without blocking: whoever has it begins
// something and then asks whether it is done.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cuda/device.h"
#include "transports/nccl/api.h"

namespace p2pkv::nccl {

// A piece of page-locked memory, as the device finds it, that is sent or received as one.
struct Part {
  uint64_t address;
  uint64_t nbytes;
};

enum class Progress : uint8_t { kBusy, kDone, kFailed };

struct CommOptions {
  int channels = 4;  // at most so many of the device's multiprocessors copy at a time
};

// Used by one thread at a time. No call waits for the peer, except that abort() waits for NCCL to let go.
class Communicator {
 public:
  // Begins to meet the other rank. Null, with the reason in `error`.
  static std::unique_ptr<Communicator> begin(std::shared_ptr<cuda::Device> device, const UniqueId& id,
                                             int rank, const CommOptions& options, std::string* error);
  ~Communicator() { abort(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Whether what was begun has been taken: the meeting, or a batch of parts by the stream.
  Progress poll();
  // Queues parts for the other rank, or from it; poll() says when the stream has them. Only after kDone.
  bool send(std::span<const Part> parts) { return queue(parts, true); }
  bool receive(std::span<const Part> parts) { return queue(parts, false); }
  // Marks what the stream has by now. Null if the device fails.
  std::unique_ptr<cuda::StreamMark> mark();
  // Whether what was marked has been done: then nothing reads or writes those parts any more.
  Progress look(cuda::StreamMark& mark);

  // Ends what is under way, and gives everything back. False if the stream still has work after `patience`
  // seconds: then the memory of parts that were received into must never be used again. Idempotent.
  bool abort(double patience = 5.0);
  // Why something failed; empty while nothing has.
  const std::string& failure() const { return failure_; }

 private:
  Communicator(std::shared_ptr<cuda::Device> device, std::unique_ptr<cuda::Stream> stream, int peer)
      : device_(std::move(device)), stream_(std::move(stream)), peer_(peer) {}
  bool queue(std::span<const Part> parts, bool is_send);
  bool note(const char* call, Result result);

  const std::shared_ptr<cuda::Device> device_;
  const std::unique_ptr<cuda::Stream> stream_;
  const int peer_;  // the other rank
  const pid_t pid_ = getpid();
  Handle comm_ = nullptr;
  bool is_quiet_ = true;
  std::string failure_;
};

}  // namespace p2pkv::nccl
