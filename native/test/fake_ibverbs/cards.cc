#include "cards.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace fake {
namespace {

// The emulated driver's calls for tests, which reach its memory.
struct Driver {
  int (*read)(void* to, uint64_t from, size_t nbytes);
  int (*write)(uint64_t to, const void* from, size_t nbytes);
  static const Driver& get() {
    static const Driver driver = [] {
      void* const library = dlopen(P2PKV_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) abort();
      return Driver{reinterpret_cast<decltype(Driver::read)>(dlsym(library, "fake_cuda_read")),
                    reinterpret_cast<decltype(Driver::write)>(dlsym(library, "fake_cuda_write"))};
    }();
    return driver;
  }
};

// Where a request's bytes go to or come from; empty if it must not use all of them. With the lock.
struct Place {
  Region* region;
  uint64_t address;
  size_t nbytes;
};
std::vector<Place> places_of(const ibv_sge* pieces, int n, const ibv_pd* domain, int access) {
  std::vector<Place> places;
  for (int i = 0; i < n; ++i) {
    Region* region = find(pieces[i].lkey, domain, pieces[i].addr, pieces[i].length, access);
    if (region == nullptr) return {};
    places.push_back({region, pieces[i].addr, pieces[i].length});
  }
  return places;
}

size_t size_of(const ibv_sge* pieces, int n) {
  size_t nbytes = 0;
  for (int i = 0; i < n; ++i) nbytes += pieces[i].length;
  return nbytes;
}

std::vector<uint8_t> gather(int card, const std::vector<Place>& places) {
  std::vector<uint8_t> bytes;
  for (const Place& place : places) {
    bytes.resize(bytes.size() + place.nbytes);
    read_by(card, *place.region, place.address, bytes.data() + bytes.size() - place.nbytes, place.nbytes);
  }
  return bytes;
}

void scatter(int card, const std::vector<Place>& places, const std::vector<uint8_t>& bytes) {
  size_t at = 0;
  for (const Place& place : places) {
    const size_t n = std::min(place.nbytes, bytes.size() - at);
    write_by(card, *place.region, place.address, bytes.data() + at, n);
    at += n;
  }
}

Completions* of(ibv_cq* queue) {
  return reinterpret_cast<Completions*>(queue);
}

ibv_wc_status read_from(Pair& pair, Pair& peer, const ibv_send_wr& request) {
  const size_t nbytes = size_of(request.sg_list, request.num_sge);
  Region* source =
      find(request.wr.rdma.rkey, peer.it.pd, request.wr.rdma.remote_addr, nbytes, IBV_ACCESS_REMOTE_READ);
  if (source == nullptr || !(peer.access & IBV_ACCESS_REMOTE_READ)) return IBV_WC_REM_ACCESS_ERR;
  const auto places = places_of(request.sg_list, request.num_sge, pair.it.pd, IBV_ACCESS_LOCAL_WRITE);
  if (places.empty()) return IBV_WC_LOC_PROT_ERR;
  std::vector<uint8_t> bytes(nbytes);
  read_by(card_of(peer.it.context), *source, request.wr.rdma.remote_addr, bytes.data(), nbytes);
  scatter(card_of(pair.it.context), places, bytes);
  return IBV_WC_SUCCESS;
}

ibv_wc_status send_to(Pair& pair, Pair& peer, const ibv_send_wr& request) {
  if (peer.receives.empty()) return IBV_WC_RNR_RETRY_EXC_ERR;
  const auto sources = places_of(request.sg_list, request.num_sge, pair.it.pd, 0);
  if (sources.empty() && request.num_sge > 0) return IBV_WC_LOC_PROT_ERR;
  const Receive receive = peer.receives.front();
  peer.receives.pop_front();
  const auto places = places_of(receive.places.data(), static_cast<int>(receive.places.size()), peer.it.pd,
                                IBV_ACCESS_LOCAL_WRITE);
  const auto bytes = gather(card_of(pair.it.context), sources);
  if (bytes.size() > size_of(receive.places.data(), static_cast<int>(receive.places.size())) ||
      (places.empty() && !receive.places.empty()))
    return IBV_WC_REM_OP_ERR;
  scatter(card_of(peer.it.context), places, bytes);
  of(peer.it.recv_cq)->add(peer.it.qp_num, receive.id, IBV_WC_SUCCESS, IBV_WC_RECV);
  return IBV_WC_SUCCESS;
}

ibv_wc_status carry_out(Pair& pair, const ibv_send_wr& request) {
  if (pair.it.state != IBV_QPS_RTS) return IBV_WC_WR_FLUSH_ERR;
  const auto found = cards.pairs.find(pair.peer);
  const bool is_there = found != cards.pairs.end() && found->second->peer == pair.it.qp_num &&
                        (found->second->it.state == IBV_QPS_RTS || found->second->it.state == IBV_QPS_RTR);
  if (!is_there) return IBV_WC_RETRY_EXC_ERR;
  return request.opcode == IBV_WR_RDMA_READ ? read_from(pair, *found->second, request)
                                            : send_to(pair, *found->second, request);
}

}  // namespace

Cards& cards = *new Cards;

bool Wish::take() {
  if (n == 0) return false;
  if (n > 0) --n;
  return true;
}

Region::~Region() {
  if (mapped != nullptr) munmap(mapped, mapped_nbytes);
}

void Region::read(uint64_t address, void* to, size_t nbytes) {
  if (is_deceiving) {
    std::memcpy(to, instead.data() + (address - reinterpret_cast<uint64_t>(it.addr)), nbytes);
  } else if (bytes == nullptr) {
    read_device(address, to, nbytes);
  } else {
    std::memcpy(to, bytes + (address - reinterpret_cast<uint64_t>(it.addr)), nbytes);
  }
}

void Region::write(uint64_t address, const void* from, size_t nbytes) {
  if (is_deceiving) {
    std::memcpy(instead.data() + (address - reinterpret_cast<uint64_t>(it.addr)), from, nbytes);
  } else if (bytes == nullptr) {
    write_device(address, from, nbytes);
  } else {
    std::memcpy(bytes + (address - reinterpret_cast<uint64_t>(it.addr)), from, nbytes);
  }
}

void Completions::add(uint32_t pair, uint64_t id, ibv_wc_status status, ibv_wc_opcode opcode) {
  ibv_wc completion{};
  completion.wr_id = id;
  completion.status = status;
  completion.opcode = opcode;
  completion.qp_num = pair;
  waiting.push_back(completion);
  if (!is_armed) return;
  is_armed = false;
  auto* const channel = reinterpret_cast<Channel*>(it.channel);
  ibv_cq* const self = &it;
  if (write(channel->to, &self, sizeof self) != sizeof self) abort();
}

int card_of(const ibv_context* context) {
  return context->cmd_fd;
}

void read_by(int card, Region& region, uint64_t address, void* to, size_t nbytes) {
  if (region.is_on_device) {  // which pushes what was written before
    ++cards.counts.read_from_device;
    for (const HeldBack& held : cards.held[card])
      held.region->write(held.address, held.bytes.data(), held.bytes.size());
    cards.held[card].clear();
  }
  region.read(address, to, nbytes);
}

void write_by(int card, Region& region, uint64_t address, const void* from, size_t nbytes) {
  if (!region.is_on_device) return region.write(address, from, nbytes);
  ++cards.counts.held_back;
  const auto* const bytes = static_cast<const uint8_t*>(from);
  HeldBack held{&region, address, {bytes, bytes + nbytes}};
  if (cards.spoils_reads && nbytes > 64) held.bytes.back() ^= 1;
  cards.held[card].push_back(std::move(held));
}

Region* find(uint32_t key, const ibv_pd* domain, uint64_t address, size_t nbytes, int access) {
  const auto found = cards.regions.find(key);
  if (found == cards.regions.end()) return nullptr;
  Region* const region = found->second;
  const auto start = reinterpret_cast<uint64_t>(region->it.addr);
  const bool is_within = address >= start && address - start <= region->it.length &&
                         nbytes <= region->it.length - (address - start);
  return is_within && region->it.pd == domain && (region->access & access) == access ? region : nullptr;
}

void read_device(uint64_t address, void* to, size_t nbytes) {
  if (Driver::get().read(to, address, nbytes) != 0) abort();
}

void write_device(uint64_t address, const void* from, size_t nbytes) {
  if (Driver::get().write(address, from, nbytes) != 0) abort();
}

bool is_of_device(uint64_t address, size_t nbytes) {
  uint8_t byte;
  return Driver::get().read(&byte, address, 1) == 0 &&
         Driver::get().read(&byte, address + nbytes - 1, 1) == 0;
}

int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) {
  const Lock lock(cards.mutex);
  auto& pair = *reinterpret_cast<Pair*>(qp);
  for (ibv_send_wr* request = requests; request != nullptr; request = request->next) {
    const auto status = carry_out(pair, *request);
    if (status != IBV_WC_SUCCESS) pair.it.state = IBV_QPS_ERR;
    if (status != IBV_WC_SUCCESS || (request->send_flags & IBV_SEND_SIGNALED) != 0)
      of(pair.it.send_cq)->add(pair.it.qp_num, request->wr_id, status, IBV_WC_RDMA_READ);
  }
  return 0;
}

int post_receive(ibv_qp* qp, ibv_recv_wr* requests, ibv_recv_wr** bad) {
  const Lock lock(cards.mutex);
  auto& pair = *reinterpret_cast<Pair*>(qp);
  for (ibv_recv_wr* request = requests; request != nullptr; request = request->next)
    pair.receives.push_back({request->wr_id, {request->sg_list, request->sg_list + request->num_sge}});
  return 0;
}

int poll(ibv_cq* cq, int n, ibv_wc* found) {
  const Lock lock(cards.mutex);
  auto& waiting = of(cq)->waiting;
  int i = 0;
  for (; i < n && !waiting.empty(); ++i) {
    found[i] = waiting.front();
    waiting.pop_front();
  }
  return i;
}

int arm(ibv_cq* cq, int) {
  const Lock lock(cards.mutex);
  of(cq)->is_armed = true;
  return 0;
}

}  // namespace fake
