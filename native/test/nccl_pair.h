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
#include "page/region.h"
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

struct NcclPair {
  static constexpr uint64_t kPage = 256 * 1024;
  static constexpr uint64_t kPages = 12;  // of several requests
  static constexpr uint64_t kTable = 4096;
  static constexpr uint64_t kBytes = kTable + kPages * kPage;

  explicit NcclPair(const NcclOptions& options = {}) {
    ZmqLibrary::get();  // whose cipher seals what is asked
    std::string error;
    nccl.reset();
    owner = make_nccl_transport(options, &error);
    reader = make_nccl_transport(options, &error);
    CHECK(owner && reader);
    memory = SharedRegion::create(kBytes, &error);
    for (uint64_t page = 0; page < kPages; ++page) rewrite(page, 2);
    region = owner->register_memory(memory->base(), kBytes, memory->fd(), true, &error);
    CHECK(region);
    bytes.resize(kBytes);
    local = reader->register_memory(bytes.data(), kBytes, -1, false, &error);
    CHECK(local);
  }
  ~NcclPair() { nccl.reset(); }

  // Every 8 bytes equal the word. Relaxed atomics: readers overlap this on purpose.
  void rewrite(uint64_t page, uint64_t word) {
    auto* words = reinterpret_cast<uint64_t*>(memory->base());
    auto* to = reinterpret_cast<uint64_t*>(memory->base() + kTable + page * kPage);
    store_word(words + page, word - 1);
    for (uint64_t i = 0; i < kPage / 8; ++i)
      std::atomic_ref<uint64_t>(to[i]).store(word, std::memory_order_relaxed);
    store_word(words + page, word);
  }

  std::shared_ptr<Endpoint> connect() {
    std::string error;
    auto endpoint = reader->open();
    CHECK(endpoint->bind(owner->accept(endpoint->describe(), &error), &error));
    remote = endpoint->attach(region->describe(), &error);
    CHECK(remote);
    return endpoint;
  }

  std::shared_ptr<Transfer> read(Endpoint& endpoint, const std::vector<uint64_t>& words) {
    std::vector<Span> spans;
    std::vector<Word> wanted;
    for (uint64_t page = 0; page < kPages; ++page) {
      const auto at = static_cast<int64_t>(kTable + page * kPage);
      spans.push_back({at, at, static_cast<int64_t>(kPage)});
      wanted.push_back({page * 8, words[page]});
    }
    return endpoint.read(local, remote, spans, wanted);
  }

  bool holds(uint64_t page, uint64_t word) const {
    for (uint64_t i = 0; i < kPage; i += 8) {
      uint64_t found;
      std::memcpy(&found, bytes.data() + kTable + page * kPage + i, 8);
      if (found != word) return false;
    }
    return true;
  }

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
  std::shared_ptr<Transport> owner, reader;
  std::unique_ptr<SharedRegion> memory;
  std::shared_ptr<MemoryRegion> region, local;
  std::shared_ptr<RemoteRegion> remote;
  std::vector<uint8_t> bytes;
};

}  // namespace p2pkv::test
