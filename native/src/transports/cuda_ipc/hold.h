// What a reader has of an owner's memory, and letting go of it.
//
// An owner that is about to free memory asks for it back by ending its half of the connection, and takes the
// end of the other half for the answer. So a connection is closed after the last mapping that was made over
// it, whoever had that; and mappings go when the owner hangs up, whether or not anybody reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/fd.h"
#include "base/thread.h"
#include "cuda/sharing.h"
#include "transports/region_endpoint.h"

namespace p2pkv::cuda_ipc {

// A mapping, good for as long as somebody has it.
struct Mapped {
  std::shared_ptr<OwnerSocket> connection;  // first: it outlives the memory
  std::unique_ptr<cuda::MappedMemory> memory;
  // Of the next slice that is copied from there: as much as was seen to take as long as one may. 0: not seen.
  std::atomic<uint64_t> slice_nbytes = 0;
};

// Thread-safe.
class Hold {
 public:
  explicit Hold(std::shared_ptr<OwnerSocket> connection) : connection_(std::move(connection)) {}

  // Null once it is let go.
  std::shared_ptr<OwnerSocket> connection();
  // The mapping of a region for a device; null if there is none, or it is let go.
  std::shared_ptr<Mapped> find(uint32_t region, int device);
  // Keeps a mapping that was made meanwhile; null if it is let go.
  std::shared_ptr<Mapped> keep(uint32_t region, int device, std::unique_ptr<cuda::MappedMemory> memory);
  // Gives up the connection and every mapping: those in use go with their last user. Idempotent.
  void let_go();

 private:
  using Mappings = std::map<std::pair<uint32_t, int>, std::shared_ptr<Mapped>>;

  std::mutex mutex_;  // guards all below
  std::shared_ptr<OwnerSocket> connection_;
  Mappings mappings_;
};

// Lets go for owners that hang up. One thread for all holds of a transport. Thread-safe.
class HangUps {
 public:
  ~HangUps() { close(); }
  // False, with the reason in `error`.
  bool start(std::string* error);
  void close();
  void watch(const std::shared_ptr<Hold>& hold);

 private:
  void run();

  UniqueFd epoll_;
  Wakeup stop_;
  NamedThread thread_;
  std::mutex mutex_;  // guards all below
  std::unordered_map<uint64_t, std::weak_ptr<Hold>> holds_;
  uint64_t last_id_ = 0;
};

}  // namespace p2pkv::cuda_ipc
