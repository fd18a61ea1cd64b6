// The transports built into the native core.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "net/listener.h"
#include "net/record_cipher.h"
#include "transports/transport.h"

namespace p2pkv {

// Peers of the same host, user and network namespace map each other's sealed memfds. Null, with the reason in
// `error`.
std::shared_ptr<Transport> make_shm_transport(std::string* error);

// Empty, or what the CUDA driver lacks, which is loaded.
std::string cuda_ipc_missing();
// Why this process could not map a peer's device memory the last time; empty: that has not happened.
std::string cuda_ipc_refusal();
// The same peers map each other's device memory too. Null, with the reason in `error`.
std::shared_ptr<Transport> make_cuda_ipc_transport(std::string* error);

struct TcpOptions {
  ListenAt listen;
  // Connections an endpoint reads over on each rail, 1 to 8; 0: as many as pay.
  uint32_t streams = 0;
  // Addresses or interfaces of this host, each a rail's end; none: what `listen` says, and the kernel
  // chooses from where.
  std::vector<std::string> addresses = {};
  // Whether what goes over connections is encrypted; peers that don't do so are refused.
  bool encrypts = false;
  // Bytes after which each direction of a connection takes another key. Both ends must say the same.
  uint64_t rekey_after = RecordCipher::kRekeyAfter;
};

// Empty, or what is missing for tcp to encrypt, and what to install.
std::string encryption_missing();
// As in "OpenSSL 3.0.19 27 Jan 2026", where nothing is missing.
std::string encryption_library();

class TcpTransportBase : public Transport {
 public:
  virtual uint16_t port() const = 0;
};

// Peers anywhere. Null, with the reason in `error`.
std::shared_ptr<TcpTransportBase> make_tcp_transport(const TcpOptions& options, std::string* error);

// One port of an RDMA device, as `p2pkv doctor` shows it.
struct VerbsPort {
  std::string device;
  int port = 1;
  std::string link;     // "RoCE v2" or "InfiniBand"
  std::string state;    // "active", or what it is instead
  std::string gid;      // the address that would be used; empty if there is none
  uint32_t mtu = 0;     // bytes
  int numa_node = -1;   // -1: unknown
  std::string missing;  // why it can't be used; empty if it can
};

// Whether the headers were there when p2pkv was built.
bool has_verbs();

inline constexpr const char* kVerbsLibrary = "libibverbs.so.1";

// The ports of this machine, usable or not. Empty, with what is missing in `error`, where there are none.
std::vector<VerbsPort> verbs_ports(const std::string& library, std::string* error);

struct VerbsOptions {
  std::vector<std::string> devices = {};  // to use, each NAME[:PORT][=ADDRESS]; empty: every usable one
  std::string library = kVerbsLibrary;    // a path, or a name that the loader knows
  bool reaches_devices = false;           // registers memory of CUDA devices, where that can be had
};

// Peers with RDMA devices. Null, with the reason in `error`.
std::shared_ptr<Transport> make_verbs_transport(const VerbsOptions& options, std::string* error);

struct UcxOptions {
  std::string host = "127.0.0.1";  // an address of this node, on which UCX listens and from which it connects
  std::string advertise;           // used instead when `host` is a wildcard
  bool trusts_network = false;     // that nobody but the cluster is on it: then tcp is used beyond loopback
};

struct UcxLibrary {
  std::string path;
  std::string version;
};

// Loads libucp, of which a process has one, from a path or by a name the loader knows. Empty, or what is
// missing.
std::string ucx_missing(const std::string& library);
// What was loaded; empty before.
UcxLibrary ucx_library();
// UCX's transports and devices, as "tcp/lo", that these options would use. Empty, with the reason in `error`.
// The library must have been loaded; the same holds below.
std::vector<std::string> ucx_resources(const UcxOptions& options, std::string* error);
// Peers that UCX reaches. Null, with the reason in `error`.
std::shared_ptr<Transport> make_ucx_transport(const UcxOptions& options, std::string* error);

struct NcclOptions {
  ListenAt listen;         // where readers ask; NCCL's own connections are where it puts them
  int device = 0;          // the ordinal of the CUDA device that sends and receives
  int channels = 4;        // at most so many of its multiprocessors copy at a time for one peer
  int communicators = 32;  // at most, of both directions together
};

struct NcclLibrary {
  std::string path;
  std::string version;
};

// Loads libnccl, of which p2pkv has one in a process, from a path or by a name the loader knows. Empty, or
// what is missing.
std::string nccl_missing(const std::string& library);
// What was loaded; empty before.
NcclLibrary nccl_library();
// Peers that NCCL reaches from a CUDA device. Null, with the reason in `error`. The library must have been
// loaded.
std::shared_ptr<Transport> make_nccl_transport(const NcclOptions& options, std::string* error);

}  // namespace p2pkv
