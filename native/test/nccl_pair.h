// An owner and a reader over the emulated NCCL, and pages that are rewritten while they are read.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda/library.h"
#include "fake_nccl/fake_nccl.h"
#include "transport_pair.h"
#include "transports/transports.h"
#include "zmq_library.h"

namespace p2pkv::test {

struct FakeNccl {
  decltype(&fake_nccl_never_meet) never_meet;
  decltype(&fake_nccl_fail_meeting) fail_meeting;
  decltype(&fake_nccl_fail_operation) fail_operation;
  decltype(&fake_nccl_hold) hold;
  decltype(&fake_nccl_delay_aborts) delay_aborts;
  decltype(&fake_nccl_reset) reset;
  decltype(&fake_nccl_counts) read_counts;

  static const FakeNccl& get() {
    static const FakeNccl loaded;
    return loaded;
  }

  FakeNcclCounts counts() const {
    FakeNcclCounts counts;
    read_counts(&counts);
    return counts;
  }

 private:
  FakeNccl() {
    FakeCuda::get();
    const std::string missing = nccl_missing(P2PKV_FAKE_NCCL);
    void* library = dlopen(P2PKV_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr || !missing.empty()) {
      std::cerr << missing << "\n";
      abort();
    }
    find(library, "fake_nccl_never_meet", &never_meet);
    find(library, "fake_nccl_fail_meeting", &fail_meeting);
    find(library, "fake_nccl_fail_operation", &fail_operation);
    find(library, "fake_nccl_hold", &hold);
    find(library, "fake_nccl_delay_aborts", &delay_aborts);
    find(library, "fake_nccl_reset", &reset);
    find(library, "fake_nccl_counts", &read_counts);
  }

  template <typename Function>
  static void find(void* library, const char* name, Function* out) {
    *out = reinterpret_cast<Function>(dlsym(library, name));
    if (*out == nullptr) abort();
  }
};

// What another thread does by itself, however slow the machine is.
inline bool eventually(const std::function<bool()>& is_so, int most_seconds = 60) {
  for (int i = 0; i < most_seconds * 1000; ++i) {
    if (is_so()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

struct NcclPair : TransportPair<256 * 1024, 12> {  // of several requests
  explicit NcclPair(const NcclOptions& options = {}) : TransportPair(make(options), make(options)) {}
  ~NcclPair() { nccl.reset(); }

  // Whether a new endpoint reads every page, as they were at first.
  bool reads_all() {
    const auto endpoint = connect();
    const auto transfer = read(*endpoint, std::vector<uint64_t>(kPages, 2));
    transfer->wait(60);
    bool is_all = true;
    for (uint64_t page = 0; page < kPages; ++page)
      is_all = is_all && transfer->statuses()[page] == Status::kOk && holds(page, 2);
    endpoint->close();
    return is_all;
  }

  const FakeNccl& nccl = FakeNccl::get();

 private:
  static std::shared_ptr<Transport> make(const NcclOptions& options) {
    ZmqLibrary::get();        // whose cipher seals what is asked
    FakeNccl::get().reset();  // what earlier tests told it counts no more
    std::string error;
    return make_nccl_transport(options, &error);
  }
};

}  // namespace p2pkv::test
