// Raw streams, which the benchmark compares p2pkv with: as fast as C gets. Nothing else uses this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transports/transport.h"

namespace p2pkv::bench {

// Asks the other end of a connected stream for `n` spans, `batch` at a time, and receives each batch with
// scatter-gather straight to its place. 0 or an errno.
int receive_spans(int fd, uint8_t* base, const Span* spans, size_t n, size_t batch);

// Answers receive_spans out of `base` until the peer hangs up. 0 or an errno.
int serve_spans(int fd, const uint8_t* base, size_t nbytes);

}  // namespace p2pkv::bench
