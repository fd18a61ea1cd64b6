// Small pieces copied by multiprocessors that the operator has lent, instead of by the copy engines.
//
// Copy engines take about a microsecond a piece, in which PCIe moves 50 KiB: KV that lies in pieces of 8 KiB
// comes at a fifth of what it could. Within a device a piece costs three to five. A kernel reads and writes
// page-locked memory and its device's by itself, some thousand pieces a launch. It takes away from what else
// the device computes, and memory that is not what it was said to be breaks the context, where an engine's
// copy only fails: so it is off unless it was asked for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"

namespace p2pkv::cuda {

// Of one device, within whose context all is called. Thread-safe.
class PieceKernel {
 public:
  // The largest piece that a copy engine is too slow for, between host and device.
  static constexpr uint64_t kLargestPiece = 128 << 10;
  // Returns the largest piece within the device, which depends on the blocks: 16 copy pieces of 1 MiB at 500
  // GB/s, and an engine copies them at 300. How few are slower than an engine was not measured.
  uint64_t largest_inner() const {
    return std::clamp<uint64_t>(n_blocks_ * uint64_t{64 << 10}, kLargestPiece, 1 << 20);
  }

  explicit PieceKernel(const Driver& driver) : driver_(driver) {}

  // Each copy may have so many blocks of 1,024 threads; the most that anybody has lent count. False, with the
  // reason in `error`, if this device, or its driver, has no use for them.
  bool lend(DeviceHandle device, unsigned n_blocks, std::string* error);
  // Before the context goes, and when all copies have ended.
  void end();

  // Whether it copies such a piece; both addresses are ones that the device reads and writes by itself.
  bool takes(const InnerCopy& copy, uint64_t largest) const {
    return n_blocks_ > 0 && copy.nbytes <= largest && (copy.to | copy.from | copy.nbytes) % kAlignment == 0;
  }
  // Some may have been launched where it gives an error.
  Result launch(std::span<const InnerCopy> copies, StreamHandle stream);

 private:
  static constexpr uint64_t kAlignment = 16;

  Result load(DeviceHandle device, std::string* error);
  template <typename Parameters>
  Result launch_some(std::span<const InnerCopy> slices, FunctionHandle function, StreamHandle stream);

  const Driver& driver_;
  std::mutex loading_;
  ModuleHandle module_ = nullptr;  // with loading_
  FunctionHandle few_ = nullptr;   // set before n_blocks_ is more than 0; the next as well
  FunctionHandle many_ = nullptr;
  std::atomic<unsigned> n_blocks_ = 0;
};

}  // namespace p2pkv::cuda
