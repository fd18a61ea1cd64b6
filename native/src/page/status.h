// What became of one span of a batched read. The values are those of p2pkv.transports.base.Status.
#pragma once

#include <cstdint>

namespace p2pkv {

enum class Status : uint8_t {
  kOk = 0,          // the bytes are in local memory and the generation word vouched for them
  kPending = 1,     // not settled yet
  kOutOfRange = 2,  // outside the local or the remote region; never posted
  kRejected = 3,    // the word did not have the expected value: the bytes are something else's
  kCanceled = 4,    // the endpoint was closed first
  kPeerLost = 5,    // the peer or the way to it is gone
  kTimedOut = 6,    // the caller's deadline came first
};

// Whether an endpoint whose batch had such a span can't be used any more.
constexpr bool ends_endpoint(Status status) {
  return status == Status::kCanceled || status == Status::kPeerLost || status == Status::kTimedOut;
}

}  // namespace p2pkv
