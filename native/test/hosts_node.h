// A node with a pool that engines attach to, in this process, and pages of an engine.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attach/attachment.h"
#include "attach/host.h"
#include "pool_calls.h"

namespace {

using p2pkv::Deadline;
using p2pkv::Guests;
using p2pkv::NamespaceEpochs;
using p2pkv::Sequences;
using p2pkv::Shard;
using p2pkv::UniqueFd;
using p2pkv::attaching::Attachment;
using p2pkv::attaching::Host;

constexpr size_t kPage = 2 * kGranule;

// A node with a pool, and the socket that engines attach to.
struct HostsNode {
  explicit HostsNode(uint64_t n_granules = 64, const Host::Limits& limits = {})
      : pool(make_pool(n_granules)) {
    char folder[] = "/tmp/p2pkv-attach-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    directory = folder;
    path = directory + "/s";
    UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, path.size());
    CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    CHECK(listen(listener.get(), 8) == 0);
    std::string error;
    host = Host::start(std::move(listener), {*pool, guests, shard, sequences, nullptr}, *epochs,
                       {7, "127.0.0.1:1", "blue"}, limits, &error);
    CHECK(host != nullptr);
  }
  ~HostsNode() {
    host.reset();
    unlink(path.c_str());
    rmdir(directory.c_str());
  }
  std::shared_ptr<Attachment> attach(uint64_t mark = 0) {
    std::string error;
    auto attached = Attachment::open(path, nullptr, Deadline::after(10), &error, mark);
    CHECK(attached != nullptr);
    return attached;
  }

  std::shared_ptr<Pool> pool;
  std::shared_ptr<NamespaceEpochs> epochs = std::make_shared<NamespaceEpochs>();
  Guests guests{pool, epochs};
  Shard shard{1024};
  Sequences sequences;
  std::string directory;
  std::string path;
  std::shared_ptr<Host> host;
};

// Pages of an engine, in memory that it shares or not.
struct EnginePages {
  EnginePages(uint8_t* base, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      std::memset(base + i * kPage, static_cast<int>(i + 1), kPage);
      keys.push_back(key_of(i));
      pieces.push_back({reinterpret_cast<int64_t>(base + i * kPage), kPage});
    }
  }
  PageBatch get() const { return {keys.size(), 1, keys.data(), pieces.data()}; }

  std::vector<Key> keys;
  std::vector<Piece> pieces;
};

// Has the node read this memory where it is. Empty, or why it can't.
[[maybe_unused]] std::string share(Attachment& engine, uint64_t address, uint64_t nbytes, int fd) {
  std::string why;
  const uint32_t number = engine.share(nbytes, fd, Deadline::after(10), &why);
  if (number != 0) engine.use(number, address, nbytes);
  return why;
}

[[maybe_unused]] bool holds_byte(Pool& pool, uint64_t name, uint8_t byte) {
  const Bytes bytes = fetch(pool, name, kPage);
  return !bytes.empty() && std::all_of(bytes.begin(), bytes.end(), [&](uint8_t one) { return one == byte; });
}

}  // namespace
