// An owner and a reader of one kind of transport, and pages that may be rewritten while they are read.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/copy.h"
#include "check.h"
#include "page/region.h"
#include "page/words.h"
#include "transports/transport.h"

namespace p2pkv::test {

// Every 8 bytes of a page equal its word. Words stand in front of the pages.
template <uint64_t page_bytes, uint64_t n_pages>
struct TransportPair {
  static constexpr uint64_t kPage = page_bytes;
  static constexpr uint64_t kPages = n_pages;
  static constexpr uint64_t kTable = 4096;
  static constexpr uint64_t kBytes = kTable + kPages * kPage;

  TransportPair(std::shared_ptr<Transport> owning, std::shared_ptr<Transport> reading)
      : owner(std::move(owning)), reader(std::move(reading)) {
    std::string error;
    CHECK(owner && reader);
    memory = SharedRegion::create(kBytes, &error);
    CHECK(memory);
    for (uint64_t page = 0; page < kPages; ++page) rewrite(page, 2);
    region = owner->register_memory(memory->base(), kBytes, memory->fd(), true, &error);
    CHECK(region);
    bytes.resize(kBytes);
    local = reader->register_memory(bytes.data(), kBytes, -1, false, &error);
    CHECK(local);
  }

  // Relaxed atomics: readers overlap this on purpose.
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
    Lender* const lender = endpoint.lender();
    if (lender == nullptr) return endpoint.read(local, remote, spans, wanted);
    // Every second page is taken; a copy would be found in the wrong place.
    Takes takes;
    for (uint64_t page = 0; page < kPages; ++page) {
      takes.tags.push_back(page % 2 ? page : Takes::kCopied);
      if (page % 2) spans[page].local = 0;
    }
    takes.take = [this](size_t page, const uint8_t* from) {
      copy_bytes(bytes.data() + kTable + page * kPage, from, kPage);
    };
    return lender->lend(local, remote, spans, wanted, std::move(takes));
  }

  bool holds(uint64_t page, uint64_t word) const {
    for (uint64_t i = 0; i < kPage; i += 8) {
      uint64_t found;
      std::memcpy(&found, bytes.data() + kTable + page * kPage + i, 8);
      if (found != word) return false;
    }
    return true;
  }

  std::shared_ptr<Transport> owner, reader;
  std::unique_ptr<SharedRegion> memory;
  std::shared_ptr<MemoryRegion> region, local;
  std::shared_ptr<RemoteRegion> remote;
  std::vector<uint8_t> bytes;
};

}  // namespace p2pkv::test
