// A rail: one port of one RDMA device, opened, with the address that peers reach it at.
#pragma once

#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transports/transports.h"
#include "transports/verbs/api.h"
#include "transports/verbs/frames.h"

namespace p2pkv::verbs {

using Gid = std::array<uint8_t, 16>;

// What the option `devices` asks of one device: NAME[:PORT][=ADDRESS].
struct DeviceChoice {
  std::string name;
  int port = 0;         // 0: every port
  std::string address;  // of the GID to use; empty: chosen by content
};
// False, with the reason in `error`, if `text` is not such a choice.
bool parse_choice(const std::string& text, DeviceChoice* choice, std::string* error);

// "10.0.0.1" for an IPv4-mapped GID, else as IPv6.
std::string gid_text(const Gid& gid);

// Whole pages of its own, zeroed. Where the kernel does not copy registered memory at a fork() the child has
// none of it: a page must not hold anything that the child's destructors touch.
class Pages {
 public:
  explicit Pages(size_t nbytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  uint8_t* base() const { return base_; }  // null if there is no memory
  size_t nbytes() const { return nbytes_; }

 private:
  const size_t nbytes_;
  uint8_t* base_;
};

// Immutable but for the address, which follows the port's GID table. Thread-safe.
class Rail {
 public:
  // What peers must know of a port, and QPs be set up with, at one moment.
  struct Address {
    Gid gid{};
    uint8_t gid_index = 0;
    uint16_t lid = 0;
    ibv_mtu mtu = IBV_MTU_1024;
    bool needs_global = true;  // packets carry GIDs: always on Ethernet
  };

  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  // The rails of this machine, as that libibverbs has them: all that can be used if `choices` is empty. At
  // most kMaxRails, sorted by name, all of one fabric. Empty, with the reason in `error`, if there are none
  // or a chosen one can't be used.
  static std::vector<std::shared_ptr<Rail>> open(const std::string& library,
                                                 const std::vector<DeviceChoice>& choices,
                                                 std::string* error);
  // Every port of every device, usable or not.
  static std::vector<VerbsPort> survey(const std::string& library, std::string* error);

  // False while the port is down or has lost its address.
  bool address(Address* now);

  // False in a forked child. It shares the device's file with its parent: what it destroyed would be its
  // parent's.
  bool is_ours() const { return getpid() == pid_; }

  const Api& api() const { return *api_; }
  ibv_context* context() const { return context_; }
  ibv_pd* domain() const { return pd_; }
  const ibv_device_attr& limits() const { return limits_; }
  const std::string& name() const { return name_; }  // as mlx5_0:1
  uint8_t port() const { return port_; }
  bool is_infiniband() const { return is_infiniband_; }
  // 8 bytes that peers may read, and behind them 8 into which theirs are read.
  const ibv_mr& beacon() const { return *beacon_; }
  uint64_t max_message() const { return max_message_; }
  int numa_node() const { return numa_node_; }  // -1: unknown
  // Ports of equal fabrics can, as far as can be told from here, reach each other.
  const std::string& fabric() const { return fabric_; }

 private:
  Rail() = default;
  static std::shared_ptr<Rail> open_port(const Api& api, ibv_device* device, uint8_t port,
                                         const DeviceChoice& choice, VerbsPort* seen);
  bool find_gid(Address* address) const;
  bool allocate(std::string* error);

  const pid_t pid_ = getpid();
  const Api* api_ = nullptr;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  const Pages beacon_page_{16};
  ibv_mr* beacon_ = nullptr;
  ibv_device_attr limits_{};
  std::string name_;
  std::string wanted_address_;
  uint8_t port_ = 1;
  bool is_infiniband_ = false;
  uint64_t max_message_ = 0;
  int numa_node_ = -1;
  std::string fabric_;
};

}  // namespace p2pkv::verbs
