#include "transports/ucx/settings.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace p2pkv::ucx {
namespace {

namespace fs = std::filesystem;

// The first 1.x whose tcp survives peers that leave while they connect.
constexpr unsigned kTcpMinor = 14;

std::string environment(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// Whether a value of UCX_TLS may lead to tcp.
bool may_use_tcp(const std::string& tls) {
  const auto names = split(tls[0] == '^' ? tls.substr(1) : tls, ',');
  const auto has = [&names](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  return tls[0] == '^' ? !has("tcp") : has("tcp") || has("all");
}

// The RDMA devices whose traffic goes through a network interface, as "mlx5_0:1".
std::vector<std::string> rdma_devices_of(const std::string& interface) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& device : fs::directory_iterator("/sys/class/infiniband", error)) {
    for (const auto& port : fs::directory_iterator(device.path() / "ports", error)) {
      for (const auto& entry : fs::directory_iterator(port.path() / "gid_attrs" / "ndevs", error)) {
        std::string name;
        std::ifstream(entry.path()) >> name;
        if (name != interface) continue;
        found.push_back(device.path().filename().string() + ":" + port.path().filename().string());
        break;
      }
    }
  }
  return found;
}

void set_unless_in_environment(Settings* settings, const char* name, const std::string& value) {
  if (environment((std::string("UCX_") + name).c_str()).empty()) settings->emplace_back(name, value);
}

}  // namespace

bool choose_settings(const Address& address, bool trusts_network, Settings* settings, std::string* error) {
  const bool allows_tcp = address.is_loopback() || trusts_network;
  // 1.13 answers a reader's connection request over a connection of its own, and asserts that no such answer
  // is ever waiting when an endpoint goes away (ucp_request.c:684; upstream dropped it with pull request
  // 8175).
  if (allows_tcp && !Api::is_at_least(kTcpMinor)) {
    *error =
        Api::path() + " is UCX " + Api::version() +
        ", which ends its process when a tcp peer leaves while it connects: UCX 1.14 or later is needed for "
        "tcp and loopback; install it, or pip install 'p2pkv[ucx]' and set ucx's option library to wheel";
    return false;
  }
  const std::string asked = environment("UCX_TLS");
  if (!allows_tcp && !asked.empty() && may_use_tcp(asked)) {
    *error = "UCX_TLS=" + asked +
             " allows tcp, over which UCX lets any peer name any address: leave tcp out, or set ucx's option "
             "trust_network if nobody but this cluster is on that network";
    return false;
  }
  const std::string interface = address.interface();
  // Shared memory is what p2pkv's own shm is for, with an owner that can't be written to.
  const char* tls = address.is_loopback() ? "tcp" : "^posix,sysv,cma,xpmem,knem";
  set_unless_in_environment(settings, "TLS", allows_tcp ? tls : "^tcp,posix,sysv,cma,xpmem,knem");
  std::string devices = allows_tcp ? interface : "";
  const std::vector<std::string> rdma_devices = rdma_devices_of(interface);
  for (const std::string& device : rdma_devices) devices += (devices.empty() ? "" : ",") + device;
  const bool has_rdma = !rdma_devices.empty();
  // Otherwise UCX connects over every interface there is.
  if (!devices.empty()) set_unless_in_environment(settings, "NET_DEVICES", devices);
  // Measured over loopback: 1.2 GB/s with UCX's own 8 KiB, 6.7 to 8 with 64 (ucx_perftest -t ucp_am_bw).
  set_unless_in_environment(settings, "TCP_TX_SEG_SIZE", "64k");
  set_unless_in_environment(settings, "TCP_RX_SEG_SIZE", "64k");
  // Copied by UCX before they are sent: force-closing an endpoint with a zero-copy send under way crashes UCX
  // 1.22 over tcp (tests/contract/test_ucx.py, two times of three with a threshold of 4 KiB).
  set_unless_in_environment(settings, "ZCOPY_THRESH", "inf");
  if (address.is_loopback()) {
    // Over tcp no memory is registered: UCX needs no hooks in this process's mmap and free for it.
    set_unless_in_environment(settings, "RCACHE_ENABLE", "n");
    set_unless_in_environment(settings, "MEMTYPE_CACHE", "n");
  }
  // Waits have deadlines of their own, stalled readers are dropped, and TCP looks after idle connections.
  // Over RDMA nobody does: a peer that died is noticed when something sent to it has been repeated in vain.
  set_unless_in_environment(settings, "KEEPALIVE_INTERVAL", has_rdma ? "2s" : "inf");
  if (has_rdma) {
    // Seven times half a second, as verbs does (verbs_queue_pair.cc says why no less).
    for (const std::string rc : {"RC_VERBS_", "RC_MLX5_"}) {
      set_unless_in_environment(settings, (rc + "TIMEOUT").c_str(), "0.5s");
      set_unless_in_environment(settings, (rc + "RETRY_COUNT").c_str(), "6");
    }
    for (const std::string ud : {"UD_VERBS_", "UD_MLX5_"})
      set_unless_in_environment(settings, (ud + "TIMEOUT").c_str(), "4s");
  }
  return true;
}

std::vector<std::string> find_resources(const Context& context) {
  std::vector<std::string> found;
  for (const std::string& line : split(context.report(), '\n')) {
    // "#      resource 0  :  md 0  dev 0  flags -- tcp/lo"
    if (line.find("resource") == std::string::npos || line.find('/') == std::string::npos) continue;
    const std::string resource = line.substr(line.find_last_of(' ') + 1);
    const std::string transport = resource.substr(0, resource.find('/'));
    const bool stays_here = transport == "self" || transport.rfind("cuda", 0) == 0 ||
                            transport.rfind("rocm", 0) == 0 || transport.rfind("ze_", 0) == 0 ||
                            transport.rfind("gdr", 0) == 0;
    if (!stays_here) found.push_back(resource);
  }
  return found;
}

}  // namespace p2pkv::ucx
