// How copies are handed to the driver: what lies in a row on both sides as one, small pieces to a kernel if
// one was asked for, and the others gathered, many to a launch, where the driver can do that (CUDA 12.8 and
// newer).
//
// A launch takes a microsecond or two whatever it copies, which is as long as PCIe takes for 64 KiB: a page
// of many small pieces would otherwise cost more to launch than to copy.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/piece_kernel.h"

namespace p2pkv::cuda {

// Of one device, within whose context all is called. Thread-safe.
class Launches {
 public:
  explicit Launches(const Driver& driver) : driver_(driver), kernel_(driver) {}

  PieceKernel& kernel() { return kernel_; }
  // When all copies have ended.
  void end() { kernel_.end(); }

  // False, with the reason in `error`, if not all could be launched; those that were go on.
  bool launch(std::span<const DeviceCopy> copies, Direction direction, HostMemory host, StreamHandle stream,
              std::string* error);
  bool launch_within(std::span<const InnerCopy> copies, InnerMemory memory, StreamHandle stream,
                     std::string* error);

  // Whether several go to a launch: the driver can, and has not refused.
  bool are_gathered() const { return driver_.copy_batch != nullptr && !is_refused_; }

 private:
  // As cuMemcpyBatchAsync takes them.
  struct Gathered {
    std::vector<DevicePointer> to;
    std::vector<DevicePointer> from;
    std::vector<size_t> nbytes;

    void add(DevicePointer to, DevicePointer from, uint64_t nbytes, bool is_apart = false);
  };

  template <typename LaunchOne>
  bool launch_all(Gathered& copies, StreamHandle stream, const char* call, const LaunchOne& launch_one,
                  std::string* error);
  Result launch_gathered(Gathered& copies, StreamHandle stream);
  void have_kernel_copy(Gathered* copies, uint64_t largest, StreamHandle stream);

  const Driver& driver_;
  PieceKernel kernel_;
  // The driver has refused together what it took one by one, and not for want of memory: it is not asked
  // again.
  std::atomic<bool> is_refused_ = false;
};

}  // namespace p2pkv::cuda
