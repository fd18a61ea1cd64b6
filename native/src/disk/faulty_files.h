// A file system that breaks on purpose: errors, hangs, and death in the middle of a call.
#pragma once

#include <array>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "disk/files.h"

namespace p2pkv::disk {

enum class FileCall : uint8_t { kOpen, kRead, kWrite, kAllocate, kTruncate, kSync, kRemove, kRename };
constexpr size_t kFileCalls = 8;

// Passes calls on to the real file system but for the faults it was told. For tests. Thread-safe.
class FaultyFiles : public Files {
 public:
  static constexpr uint64_t kForEver = std::numeric_limits<uint64_t>::max();

  // The next `n` of these calls fail with this errno.
  void fail(FileCall call, int error, uint64_t n = kForEver);
  // These calls wait until `heal`.
  void hang(FileCall call);
  // The `nth` call from now on, of any kind, kills the process (SIGKILL) when it is done; a write when half
  // of its bytes are written, if `half`.
  void kill_at(uint64_t nth, bool half);
  void heal();
  uint64_t n_calls() const;
  // How many calls hang now.
  uint64_t n_hanging() const;

  int open(const std::string& path, int flags) override;
  int64_t read(int fd, void* to, size_t nbytes, uint64_t offset) override;
  int64_t write(int fd, const void* from, size_t nbytes, uint64_t offset) override;
  int allocate(int fd, uint64_t nbytes) override;
  int truncate(int fd, uint64_t nbytes) override;
  int sync(int fd) override;
  int remove(const std::string& path) override;
  int rename(const std::string& from, const std::string& to) override;
  int make_folder(const std::string& path) override { return real_files().make_folder(path); }
  int list(const std::string& path, std::vector<std::string>* names) override {
    return real_files().list(path, names);
  }
  int64_t nbytes(const std::string& path, bool occupied) override {
    return real_files().nbytes(path, occupied);
  }
  bool allows_bypass() const override { return false; }

 private:
  struct Fault {
    int error = 0;
    uint64_t n_left = 0;
    bool is_hanging = false;
  };
  enum class Fate : uint8_t { kGoOn, kDieAfter, kDieHalfway };

  // Waits where it must; the errno to fail with (0: none), and whether this is the call to die in.
  int enter(FileCall call, Fate* fate);
  template <typename Call>
  auto pass(FileCall call, Call real) -> decltype(real());

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable healed_;
  std::array<Fault, kFileCalls> faults_;
  uint64_t n_calls_ = 0;
  uint64_t n_hanging_ = 0;
  uint64_t deadly_call_ = kForEver;
  bool dies_halfway_ = false;
};

}  // namespace p2pkv::disk
