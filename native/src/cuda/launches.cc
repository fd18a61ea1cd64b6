#include "cuda/launches.h"

#include <algorithm>
#include <utility>

namespace p2pkv::cuda {
namespace {

// In one launch. A guess: the driver documents no bound, and a thousand share its cost well enough.
constexpr size_t kMostTogether = 1024;

}  // namespace

// Copies that go on where the last one ends, on both sides, are one with it.
void Launches::Gathered::add(DevicePointer to_, DevicePointer from_, uint64_t n, bool is_apart) {
  if (n == 0) return;
  const bool goes_on =
      !is_apart && !to.empty() && to.back() + nbytes.back() == to_ && from.back() + nbytes.back() == from_;
  if (goes_on) {
    nbytes.back() += n;
    return;
  }
  to.push_back(to_);
  from.push_back(from_);
  nbytes.push_back(n);
}

bool Launches::launch(std::span<const DeviceCopy> copies, Direction direction, HostMemory host,
                      StreamHandle stream, std::string* error) {
  Gathered gathered;
  const bool is_to_device = direction == Direction::kToDevice;
  for (const DeviceCopy& copy : copies) {
    const auto host = reinterpret_cast<DevicePointer>(copy.host);
    is_to_device ? gathered.add(copy.device, host, copy.nbytes, copy.is_apart)
                 : gathered.add(host, copy.device, copy.nbytes, copy.is_apart);
  }
  if (host == HostMemory::kLocked) have_kernel_copy(&gathered, PieceKernel::kLargestPiece, stream);
  const auto launch_one = [&](DevicePointer to, DevicePointer from, uint64_t nbytes) {
    return is_to_device ? driver_.copy_to_device(to, reinterpret_cast<const void*>(from), nbytes, stream)
                        : driver_.copy_to_host(reinterpret_cast<void*>(to), from, nbytes, stream);
  };
  const char* const call = is_to_device ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync";
  return launch_all(gathered, stream, call, launch_one, error);
}

bool Launches::launch_within(std::span<const InnerCopy> copies, InnerMemory memory, StreamHandle stream,
                             std::string* error) {
  Gathered gathered;
  for (const InnerCopy& copy : copies) gathered.add(copy.to, copy.from, copy.nbytes);
  if (memory == InnerMemory::kOwn) have_kernel_copy(&gathered, kernel_.largest_inner(), stream);
  const auto launch_one = [&](DevicePointer to, DevicePointer from, uint64_t nbytes) {
    return driver_.copy_on_devices(to, from, nbytes, stream);
  };
  return launch_all(gathered, stream, "cuMemcpyDtoDAsync", launch_one, error);
}

// Takes out what the kernel copies. What it does not launch the engines copy as before.
void Launches::have_kernel_copy(Gathered* copies, uint64_t largest, StreamHandle stream) {
  std::vector<InnerCopy> small;
  Gathered rest;
  for (size_t i = 0; i < copies->to.size(); ++i) {
    const InnerCopy copy{copies->to[i], copies->from[i], copies->nbytes[i]};
    if (kernel_.takes(copy, largest)) {
      small.push_back(copy);
    } else {
      rest.add(copy.to, copy.from, copy.nbytes, true);
    }
  }
  if (!small.empty() && kernel_.launch(small, stream) == kSuccess) *copies = std::move(rest);
}

template <typename LaunchOne>
bool Launches::launch_all(Gathered& copies, StreamHandle stream, const char* call,
                          const LaunchOne& launch_one, std::string* error) {
  const bool is_worth_it = copies.to.size() > 1 && are_gathered();
  const Result together = is_worth_it ? launch_gathered(copies, stream) : kSuccess;
  if (is_worth_it && together == kSuccess) return true;
  // Some may have been launched already: a copy that is made twice brings the same bytes.
  for (size_t i = 0; i < copies.to.size(); ++i) {
    const Result result = launch_one(copies.to[i], copies.from[i], copies.nbytes[i]);
    if (result == kSuccess) continue;
    *error = driver_.describe(
        (std::string(call) + " of " + std::to_string(copies.nbytes[i]) + " bytes").c_str(), result);
    return false;
  }
  if (is_worth_it && together != kOutOfMemory) is_refused_ = true;
  return true;
}

Result Launches::launch_gathered(Gathered& copies, StreamHandle stream) {
  // The source is read in the order of the stream, and engines copy, not multiprocessors, if the driver heeds
  // that hint.
  CopyAttributes attributes{kSourceInStreamOrder, {}, {}, kPreferCopyEngines};
  size_t first_of_attributes = 0;
  for (size_t i = 0; i < copies.to.size(); i += kMostTogether) {
    const size_t n = std::min(kMostTogether, copies.to.size() - i);
    size_t failed = 0;
    const Result result = driver_.copy_batch(&copies.to[i], &copies.from[i], &copies.nbytes[i], n,
                                             &attributes, &first_of_attributes, 1, &failed, stream);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

}  // namespace p2pkv::cuda
