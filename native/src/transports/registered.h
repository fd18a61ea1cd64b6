// Memory registered with a built-in transport, and the table in which peers' requests find it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/fd.h"
#include "transports/transport.h"

namespace p2pkv {

class RegionTable;

class RegisteredRegion final : public MemoryRegion {
 public:
  struct Options {
    uint8_t* base;
    uint64_t nbytes;
    UniqueFd fd;                                 // the memfd behind it, if peers map it
    bool readable;                               // by peers
    uint32_t blob_magic;                         // of the transport
    std::function<void(uint32_t id)> on_closed;  // called by the first close(), after the last use
    // Called by the first close(), before it waits for the last use: ends uses that last longer than a copy.
    std::function<void(const RegisteredRegion&)> on_closing = {};
    std::shared_ptr<void> registration = {};  // with devices; ends after the last use
    std::string keys = {};                    // appended to describe()
  };

  RegisteredRegion(Options options, std::shared_ptr<RegionTable> table, uint32_t id);
  ~RegisteredRegion() override { close(); }

  uint8_t* base() const override { return options_.base; }
  uint64_t nbytes() const override { return options_.nbytes; }
  std::string describe() const override;
  // Waits for uses to end; each lasts for one system call or the copies of some MiB, never for a peer. In a
  // forked child it only lets go of the child's own descriptor: all else is the parent's.
  void close() override;

  uint32_t id() const { return id_; }
  // Whether close() has been called: it waits for uses, which should end soon.
  bool is_closing() const { return (uses_.load(std::memory_order_acquire) & kClosed) != 0; }
  int fd() const { return options_.fd.get(); }
  // Only during a Use.
  const void* registration() const { return options_.registration.get(); }

  // Held while this memory is touched. False once the region is closed: then it must not be.
  class Use {
   public:
    explicit Use(RegisteredRegion& region) : region_(region.enter() ? &region : nullptr) {}
    ~Use() {
      if (region_) region_->leave();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return region_ != nullptr; }

   private:
    RegisteredRegion* region_;
  };

 private:
  static constexpr uint32_t kClosed = 1u << 31;
  bool enter();
  void leave();

  Options options_;
  const std::shared_ptr<RegionTable> table_;
  const uint32_t id_;
  const pid_t pid_ = getpid();
  std::atomic<uint32_t> uses_{0};  // how many; kClosed is set by the first close()
};

// The regions of one transport. Ids are random, so that a blob of an owner's earlier life names nothing in
// this one.
class RegionTable : public std::enable_shared_from_this<RegionTable> {
 public:
  // Local-only regions get an id as well, but `find` does not know them. Null once the table is closed.
  std::shared_ptr<RegisteredRegion> add(RegisteredRegion::Options options);
  std::shared_ptr<RegisteredRegion> find(uint32_t id);
  void remove(uint32_t id);
  // Closes every region.
  void close();

 private:
  struct Entry {
    std::weak_ptr<RegisteredRegion> region;
    bool readable;
  };
  std::mutex mutex_;  // guards all below
  std::unordered_map<uint32_t, Entry> entries_;
  bool is_closed_ = false;
};

}  // namespace p2pkv
