#include "transports/verbs/rail.h"

#include <arpa/inet.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

namespace p2pkv::verbs {
namespace {

// The lower, the better; kUnusable is worse than all. Only RoCE v2 goes over IP and thus through routers; of
// its addresses IPv4 ones are set up by somebody, and link-local ones lead nowhere else.
constexpr int kUnusable = 3;
int rank(const Gid& gid, uint32_t type, bool is_infiniband) {
  static constexpr Gid kNone{};
  if (gid == kNone) return kUnusable;
  if (is_infiniband) return type == IBV_GID_TYPE_IB ? 0 : kUnusable;
  if (type != IBV_GID_TYPE_ROCE_V2) return kUnusable;
  const bool is_ipv4 = std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t byte) { return byte == 0; }) &&
                       gid[10] == 0xff && gid[11] == 0xff;
  if (is_ipv4) return gid[12] == 169 && gid[13] == 254 ? 2 : 0;
  const bool is_link_local = gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
  return is_link_local ? 2 : 1;
}

std::vector<ibv_gid_entry> gids_of(const Api& api, ibv_context* context) {
  // Larger than the tables of all devices known (mlx5 has 255 entries a port).
  std::vector<ibv_gid_entry> entries(1024);
  const ssize_t n = api.query_gid_table(context, entries.data(), entries.size(), 0, sizeof(ibv_gid_entry));
  entries.resize(n < 0 ? 0 : static_cast<size_t>(n));
  return entries;
}

std::string state_text(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_ACTIVE:
      return "active";
    case IBV_PORT_DOWN:
      return "down";
    case IBV_PORT_INIT:
      return "waiting for a subnet manager";
    case IBV_PORT_ARMED:
      return "armed";
    default:
      return "in an unknown state";
  }
}

int numa_node_of(const std::string& device) {
  int node = -1;
  std::ifstream("/sys/class/infiniband/" + device + "/device/numa_node") >> node;
  return node;
}

struct DeviceList {
  explicit DeviceList(const Api& api) : api(api), devices(api.get_device_list(&n)) {}
  ~DeviceList() {
    if (devices) api.free_device_list(devices);
  }
  const Api& api;
  int n = 0;
  ibv_device** devices;
};

std::string choice_text(const DeviceChoice& choice) {
  std::string text = choice.name;
  if (choice.port != 0) text += ":" + std::to_string(choice.port);
  if (!choice.address.empty()) text += "=" + choice.address;
  return text;
}

}  // namespace

bool parse_choice(const std::string& text, DeviceChoice* choice, std::string* error) {
  const size_t equals = text.find('=');
  const std::string front = text.substr(0, equals);
  const size_t colon = front.find(':');
  choice->name = front.substr(0, colon);
  choice->address = equals == std::string::npos ? "" : text.substr(equals + 1);
  choice->port = 0;
  bool is_good = !choice->name.empty();
  if (colon != std::string::npos) {
    const char* end = front.data() + front.size();
    const auto parsed = std::from_chars(front.data() + colon + 1, end, choice->port);
    is_good =
        is_good && parsed.ec == std::errc() && parsed.ptr == end && choice->port >= 1 && choice->port <= 255;
  }
  if (equals != std::string::npos) {
    uint8_t bytes[16];
    is_good = is_good && (inet_pton(AF_INET, choice->address.c_str(), bytes) == 1 ||
                          inet_pton(AF_INET6, choice->address.c_str(), bytes) == 1);
  }
  if (!is_good) *error = "'" + text + "' is not a device: it must be NAME, NAME:PORT or NAME=ADDRESS";
  return is_good;
}

std::string gid_text(const Gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  const bool is_ipv4 = std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t byte) { return byte == 0; }) &&
                       gid[10] == 0xff && gid[11] == 0xff;
  inet_ntop(is_ipv4 ? AF_INET : AF_INET6, gid.data() + (is_ipv4 ? 12 : 0), text, sizeof text);
  return text;
}

Pages::Pages(size_t nbytes) : nbytes_(nbytes) {
  void* at = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  base_ = at == MAP_FAILED ? nullptr : static_cast<uint8_t*>(at);
}

Pages::~Pages() {
  if (base_) munmap(base_, nbytes_);
}

Rail::~Rail() {
  if (!is_ours()) return;
  if (beacon_) api_->dereg_mr(beacon_);
  if (pd_) api_->dealloc_pd(pd_);
  if (context_) api_->close_device(context_);
}

bool Rail::find_gid(Address* address) const {
  int best = kUnusable;
  for (const ibv_gid_entry& entry : gids_of(*api_, context_)) {
    if (entry.port_num != port_) continue;
    Gid gid;
    std::memcpy(gid.data(), entry.gid.raw, gid.size());
    const bool is_wanted = wanted_address_.empty() || gid_text(gid) == wanted_address_;
    const int found = is_wanted ? rank(gid, entry.gid_type, is_infiniband_) : kUnusable;
    if (found >= best) continue;
    best = found;
    address->gid = gid;
    address->gid_index = static_cast<uint8_t>(entry.gid_index);
  }
  return best < kUnusable;
}

bool Rail::address(Address* now) {
  ibv_port_attr port;
  if (query_port(context_, port_, &port) != 0 || port.state != IBV_PORT_ACTIVE) return false;
  now->lid = port.lid;
  now->mtu = port.active_mtu;
  now->needs_global = !is_infiniband_ || port.lid == 0 || (port.flags & IBV_QPF_GRH_REQUIRED) != 0;
  return find_gid(now);
}

std::shared_ptr<Rail> Rail::open_port(const Api& api, ibv_device* device, uint8_t port,
                                      const DeviceChoice& choice, VerbsPort* seen) {
  std::shared_ptr<Rail> rail(new Rail);
  rail->api_ = &api;
  seen->device = api.get_device_name(device);
  seen->port = port;
  rail->numa_node_ = seen->numa_node = numa_node_of(seen->device);
  rail->name_ = seen->device + ":" + std::to_string(port);
  rail->port_ = port;
  if (choice.address.find('.') == std::string::npos) {
    Gid gid{};
    inet_pton(AF_INET6, choice.address.c_str(), gid.data());
    rail->wanted_address_ = choice.address.empty() ? "" : gid_text(gid);
  } else {
    rail->wanted_address_ = choice.address;
  }
  rail->context_ = api.open_device(device);
  if (rail->context_ == nullptr) {
    seen->missing = std::string("cannot be opened: ") + std::strerror(errno);
    return nullptr;
  }
  ibv_port_attr attributes;
  if (api.query_device(rail->context_, &rail->limits_) != 0 ||
      query_port(rail->context_, port, &attributes) != 0) {
    seen->missing = "cannot be asked for its properties";
    return nullptr;
  }
  rail->is_infiniband_ = attributes.link_layer != IBV_LINK_LAYER_ETHERNET;
  rail->max_message_ = attributes.max_msg_sz;
  seen->link = rail->is_infiniband_ ? "InfiniBand" : "RoCE v2";
  seen->state = state_text(attributes.state);
  seen->mtu = 128u << attributes.active_mtu;
  Address address;
  if (rail->find_gid(&address)) seen->gid = gid_text(address.gid);
  if (attributes.state != IBV_PORT_ACTIVE) {
    seen->missing = "the port is " + seen->state;
  } else if (seen->gid.empty()) {
    seen->missing = choice.address.empty() ? "it has no address that RoCE v2 or InfiniBand can use"
                                           : "it has no address " + choice.address;
  }
  rail->fabric_ = "roce";
  if (rail->is_infiniband_) {
    char prefix[17];
    for (int i = 0; i < 8; ++i) std::snprintf(prefix + 2 * i, 3, "%02x", address.gid[i]);
    rail->fabric_ = std::string("ib:") + prefix;
  }
  return rail;
}

bool Rail::allocate(std::string* error) {
  pd_ = api_->alloc_pd(context_);
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
  const bool has_room = pd_ != nullptr && beacon_page_.base() != nullptr;
  if (has_room) beacon_ = api_->reg_mr(pd_, beacon_page_.base(), beacon_page_.nbytes(), kAccess);
  if (beacon_ == nullptr) *error = name_ + " has no room for another process: " + std::strerror(errno);
  return beacon_ != nullptr;
}

std::vector<VerbsPort> Rail::survey(const std::string& library, std::string* error) {
  std::vector<VerbsPort> ports;
  const Api* api = Api::get(library, error);
  if (api == nullptr) return ports;
  const DeviceList list(*api);
  for (int i = 0; i < list.n; ++i) {
    ibv_device_attr limits{};
    if (ibv_context* context = api->open_device(list.devices[i])) {
      api->query_device(context, &limits);
      api->close_device(context);
    }
    for (int port = 1; port <= std::max<int>(limits.phys_port_cnt, 1); ++port) {
      VerbsPort seen;
      open_port(*api, list.devices[i], static_cast<uint8_t>(port), {}, &seen);
      ports.push_back(std::move(seen));
    }
  }
  if (ports.empty()) {
    *error =
        "this machine has no RDMA device (ibv_devices lists them); a container needs /dev/infiniband, and "
        "ibverbs-providers must know the device";
  }
  return ports;
}

std::vector<std::shared_ptr<Rail>> Rail::open(const std::string& library,
                                              const std::vector<DeviceChoice>& choices, std::string* error) {
  std::vector<std::shared_ptr<Rail>> rails;
  std::vector<VerbsPort> ports = survey(library, error);
  if (ports.empty()) return rails;
  std::sort(ports.begin(), ports.end(), [](const auto& a, const auto& b) {
    return std::tie(a.device, a.port) < std::tie(b.device, b.port);
  });
  const Api* api = Api::get(library, error);
  const DeviceList list(*api);
  const auto open_seen = [&](const VerbsPort& port, const DeviceChoice& choice) -> std::shared_ptr<Rail> {
    for (int i = 0; i < list.n; ++i) {
      if (port.device != api->get_device_name(list.devices[i])) continue;
      VerbsPort seen;
      auto rail = open_port(*api, list.devices[i], static_cast<uint8_t>(port.port), choice, &seen);
      *error = port.device + ":" + std::to_string(port.port) + ": " + seen.missing;
      return rail && seen.missing.empty() && rail->allocate(error) ? rail : nullptr;
    }
    return nullptr;
  };
  const std::vector<DeviceChoice> any{DeviceChoice{}};
  for (const DeviceChoice& choice : choices.empty() ? any : choices) {
    const size_t n_before = rails.size();
    *error = "there is no device " + choice_text(choice);
    for (const VerbsPort& port : ports) {
      const bool is_chosen = choice.name.empty() ||
                             (choice.name == port.device && (choice.port == 0 || choice.port == port.port));
      if (!is_chosen || rails.size() == kMaxRails) continue;
      auto rail = open_seen(port, choice);
      if (rail && (rails.empty() || rails[0]->fabric() == rail->fabric())) rails.push_back(std::move(rail));
    }
    if (rails.size() == n_before && rails.size() < kMaxRails) return {};
  }
  return rails;
}

}  // namespace p2pkv::verbs
