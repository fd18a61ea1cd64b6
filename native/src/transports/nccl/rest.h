// How a thread of the nccl transport waits: for messages, to be woken, and for a device, which tells nobody
// when it is done.
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>

#include "base/fd.h"
#include "net/sealed_stream.h"

namespace p2pkv::nccl {

// What is looked after now and then.
constexpr std::chrono::milliseconds kTick{1000};
constexpr std::chrono::microseconds kFirstNap{20};
constexpr std::chrono::microseconds kLongestNap{500};

// Returns when there is a message, room to send what is queued, or a wake-up; after `most`; or, if there is a
// `nap`, which means that the device is to be asked again, after that, which then is twice as long.
inline void rest_for(const SealedStream& stream, const Wakeup& wakeup, std::chrono::microseconds* nap,
                     std::chrono::milliseconds most) {
  std::chrono::microseconds time = most;
  if (nap != nullptr) {
    *nap = std::clamp(2 * *nap, kFirstNap, kLongestNap);
    time = *nap;
  }
  const timespec limit{time.count() / 1'000'000, time.count() % 1'000'000 * 1000};
  const short events = stream.has_outgoing() ? POLLIN | POLLOUT : POLLIN;
  pollfd waiting[] = {{stream.fd(), events, 0}, {wakeup.fd(), POLLIN, 0}};
  if (ppoll(waiting, 2, &limit, nullptr) > 0 && waiting[1].revents != 0) wakeup.clear();
}

}  // namespace p2pkv::nccl
