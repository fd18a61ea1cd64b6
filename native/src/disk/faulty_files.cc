#include "disk/faulty_files.h"

#include <signal.h>

namespace p2pkv::disk {

void FaultyFiles::fail(FileCall call, int error, uint64_t n) {
  const std::lock_guard lock(mutex_);
  Fault& fault = faults_[static_cast<size_t>(call)];
  fault.error = error;
  fault.n_left = n;
}

void FaultyFiles::hang(FileCall call) {
  const std::lock_guard lock(mutex_);
  faults_[static_cast<size_t>(call)].is_hanging = true;
}

void FaultyFiles::kill_at(uint64_t nth, bool half) {
  const std::lock_guard lock(mutex_);
  deadly_call_ = n_calls_ + nth;
  dies_halfway_ = half;
}

void FaultyFiles::heal() {
  {
    const std::lock_guard lock(mutex_);
    faults_.fill({});
    deadly_call_ = kForEver;
  }
  healed_.notify_all();
}

uint64_t FaultyFiles::n_calls() const {
  const std::lock_guard lock(mutex_);
  return n_calls_;
}

uint64_t FaultyFiles::n_hanging() const {
  const std::lock_guard lock(mutex_);
  return n_hanging_;
}

int FaultyFiles::enter(FileCall call, Fate* fate) {
  std::unique_lock lock(mutex_);
  Fault& fault = faults_[static_cast<size_t>(call)];
  ++n_hanging_;
  healed_.wait(lock, [&] { return !fault.is_hanging; });
  --n_hanging_;
  *fate = Fate::kGoOn;
  if (n_calls_++ == deadly_call_) *fate = dies_halfway_ ? Fate::kDieHalfway : Fate::kDieAfter;
  if (fault.n_left == 0) return 0;
  if (fault.n_left != kForEver) --fault.n_left;
  return fault.error;
}

template <typename Call>
auto FaultyFiles::pass(FileCall call, Call real) -> decltype(real()) {
  Fate fate;
  if (const int error = enter(call, &fate); error != 0) return -error;
  const auto done = real();
  if (fate != Fate::kGoOn) raise(SIGKILL);
  return done;
}

int FaultyFiles::open(const std::string& path, int flags) {
  return pass(FileCall::kOpen, [&] { return real_files().open(path, flags); });
}

int64_t FaultyFiles::read(int fd, void* to, size_t nbytes, uint64_t offset) {
  return pass(FileCall::kRead, [&] { return real_files().read(fd, to, nbytes, offset); });
}

int64_t FaultyFiles::write(int fd, const void* from, size_t nbytes, uint64_t offset) {
  Fate fate;
  if (const int error = enter(FileCall::kWrite, &fate); error != 0) return -error;
  // whole blocks: O_DIRECT writes nothing else
  const size_t n = fate == Fate::kDieHalfway ? nbytes / 2 / kBlock * kBlock : nbytes;
  const int64_t done = real_files().write(fd, from, n, offset);
  if (fate != Fate::kGoOn) raise(SIGKILL);
  return done;
}

int FaultyFiles::allocate(int fd, uint64_t nbytes) {
  return pass(FileCall::kAllocate, [&] { return real_files().allocate(fd, nbytes); });
}

int FaultyFiles::truncate(int fd, uint64_t nbytes) {
  return pass(FileCall::kTruncate, [&] { return real_files().truncate(fd, nbytes); });
}

int FaultyFiles::sync(int fd) {
  return pass(FileCall::kSync, [&] { return real_files().sync(fd); });
}

int FaultyFiles::remove(const std::string& path) {
  return pass(FileCall::kRemove, [&] { return real_files().remove(path); });
}

int FaultyFiles::rename(const std::string& from, const std::string& to) {
  return pass(FileCall::kRename, [&] { return real_files().rename(from, to); });
}

}  // namespace p2pkv::disk
