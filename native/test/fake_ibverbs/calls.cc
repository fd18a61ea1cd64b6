// The calls of libibverbs that p2pkv binds, of the emulated cards. Those that are inline in the header of the
// real library go through the table of a context.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cards.h"

#undef ibv_reg_mr
#undef ibv_query_port
#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace fake;

namespace {

const auto kPage = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));

ibv_device* device_of(int card) {
  static ibv_device devices[kCards];
  std::snprintf(devices[card].name, sizeof devices[card].name, "emulated%d", card);
  return &devices[card];
}

int query_port(ibv_context*, uint8_t, ibv_port_attr* attributes, size_t) {
  attributes->state = IBV_PORT_ACTIVE;
  attributes->active_mtu = IBV_MTU_4096;
  attributes->max_msg_sz = 1u << 30;
  attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

// With the lock, as all below.
ibv_mr* add(std::unique_ptr<Region> region, ibv_pd* domain, uint64_t address, size_t nbytes, int access) {
  const uint32_t key = ++cards.last_key;
  region->it = {domain->context, domain, reinterpret_cast<void*>(address), nbytes, key, key, key};
  region->access = access;
  ++cards.counts.regions;
  cards.regions[key] = region.get();
  return &region.release()->it;
}

// Whether a registration of device memory is to fail, with errno set, or to be of other memory.
bool is_refused(int way, Region* region, size_t nbytes) {
  region->is_on_device = true;
  if (cards.refusals[way].take()) {
    errno = cards.refusals[way].error;
    return true;
  }
  region->is_deceiving = cards.deceptions[way].take();
  if (region->is_deceiving) region->instead.resize(nbytes);
  return false;
}

void forget_pair(Completions* queue, uint32_t pair) {
  std::erase_if(queue->waiting, [pair](const ibv_wc& completion) { return completion.qp_num == pair; });
}

}  // namespace

EXPORT int ibv_fork_init() {
  return 0;
}

EXPORT ibv_device** ibv_get_device_list(int* n) {
  auto** const list = new ibv_device*[kCards + 1];
  for (int i = 0; i < kCards; ++i) list[i] = device_of(i);
  list[kCards] = nullptr;
  *n = kCards;
  return list;
}

EXPORT void ibv_free_device_list(ibv_device** list) {
  delete[] list;
}

EXPORT const char* ibv_get_device_name(ibv_device* device) {
  return device->name;
}

EXPORT ibv_context* ibv_open_device(ibv_device* device) {
  auto* const made = new verbs_context{};
  made->sz = sizeof *made;
  made->query_port = query_port;
  made->context.device = device;
  made->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  made->context.cmd_fd = static_cast<int>(device - device_of(0));
  made->context.ops.post_send = post_send;
  made->context.ops.post_recv = post_receive;
  made->context.ops.poll_cq = poll;
  made->context.ops.req_notify_cq = arm;
  return &made->context;
}

EXPORT int ibv_close_device(ibv_context* context) {
  delete verbs_get_ctx(context);
  return 0;
}

EXPORT int ibv_query_device(ibv_context*, ibv_device_attr* limits) {
  *limits = {};
  limits->max_mr_size = uint64_t{1} << 40;
  limits->max_qp = limits->max_cq = limits->max_mr = 1 << 16;
  limits->max_qp_wr = 1024;
  limits->max_sge = limits->max_sge_rd = 8;
  limits->max_cqe = 1 << 16;
  limits->max_qp_rd_atom = limits->max_qp_init_rd_atom = 16;
  limits->phys_port_cnt = 1;
  return 0;
}

EXPORT ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t, uint32_t, size_t) {
  entries[0] = {};
  const uint8_t gid[16] = {0, 0, 0,    0,    0,  0, 0, 0,
                           0, 0, 0xff, 0xff, 10, 0, 0, static_cast<uint8_t>(1 + card_of(context))};
  std::copy(std::begin(gid), std::end(gid), entries[0].gid.raw);
  entries[0].port_num = 1;
  entries[0].gid_type = IBV_GID_TYPE_ROCE_V2;
  return 1;
}

EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
  return new ibv_pd{context, 0};
}

EXPORT int ibv_dealloc_pd(ibv_pd* domain) {
  delete domain;
  return 0;
}

EXPORT ibv_mr* ibv_reg_mr(ibv_pd* domain, void* base, size_t nbytes, int access) {
  const Lock lock(cards.mutex);
  const auto address = reinterpret_cast<uint64_t>(base);
  auto region = std::make_unique<Region>();
  if (is_of_device(address, nbytes)) {
    if (is_refused(FAKE_IBVERBS_ADDRESS, region.get(), nbytes)) return nullptr;
    ++cards.counts.addresses;
  } else {
    region->bytes = static_cast<uint8_t*>(base);
  }
  return add(std::move(region), domain, address, nbytes, access);
}

// As the kernel does: the descriptor may be closed afterwards, and pages must fit onto pages.
EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, uint64_t offset, size_t nbytes, uint64_t address, int fd,
                                 int access) {
  const Lock lock(cards.mutex);
  struct stat info{};
  const bool is_right = fstat(fd, &info) == 0 && offset % kPage == address % kPage &&
                        offset + nbytes <= static_cast<uint64_t>(info.st_size);
  auto region = std::make_unique<Region>();
  if (!is_right) errno = EINVAL;
  if (!is_right || is_refused(FAKE_IBVERBS_DMABUF, region.get(), nbytes)) return nullptr;
  const uint64_t begin = offset / kPage * kPage;
  region->mapped_nbytes = offset - begin + nbytes;
  void* const at =
      mmap(nullptr, region->mapped_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (at == MAP_FAILED) return nullptr;
  region->mapped = static_cast<uint8_t*>(at);
  region->bytes = region->mapped + (offset - begin);
  ++cards.counts.dmabufs;
  return add(std::move(region), domain, address, nbytes, access);
}

EXPORT int ibv_dereg_mr(ibv_mr* region) {
  const Lock lock(cards.mutex);
  auto* const known = reinterpret_cast<Region*>(region);
  for (auto& held : cards.held)
    std::erase_if(held, [known](const HeldBack& one) { return one.region == known; });
  cards.regions.erase(region->lkey);
  --cards.counts.regions;
  delete known;
  return 0;
}

EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return nullptr;
  auto* const made = new Channel;
  made->it = {context, ends[0], 0};
  made->to = ends[1];
  return &made->it;
}

EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  auto* const known = reinterpret_cast<Channel*>(channel);
  close(channel->fd);
  close(known->to);
  delete known;
  return 0;
}

EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int n, void*, ibv_comp_channel* channel, int) {
  auto* const made = new Completions;
  made->it.context = context;
  made->it.channel = channel;
  made->it.cqe = n;
  return &made->it;
}

EXPORT int ibv_destroy_cq(ibv_cq* queue) {
  delete reinterpret_cast<Completions*>(queue);
  return 0;
}

EXPORT int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** queue, void**) {
  return read(channel->fd, queue, sizeof *queue) == sizeof *queue ? 0 : -1;
}

EXPORT void ibv_ack_cq_events(ibv_cq*, unsigned) {}

EXPORT ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  const Lock lock(cards.mutex);
  auto* const made = new Pair;
  made->it.context = domain->context;
  made->it.pd = domain;
  made->it.send_cq = wanted->send_cq;
  made->it.recv_cq = wanted->recv_cq;
  made->it.qp_num = ++cards.last_pair;
  cards.pairs[made->it.qp_num] = made;
  ++cards.counts.queue_pairs;
  return &made->it;
}

EXPORT int ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) {
  const Lock lock(cards.mutex);
  auto& known = *reinterpret_cast<Pair*>(pair);
  if ((mask & IBV_QP_STATE) != 0) known.it.state = attributes->qp_state;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) known.access = static_cast<int>(attributes->qp_access_flags);
  if ((mask & IBV_QP_DEST_QPN) != 0) known.peer = attributes->dest_qp_num;
  return 0;
}

EXPORT int ibv_destroy_qp(ibv_qp* pair) {
  const Lock lock(cards.mutex);
  forget_pair(reinterpret_cast<Completions*>(pair->send_cq), pair->qp_num);
  forget_pair(reinterpret_cast<Completions*>(pair->recv_cq), pair->qp_num);
  cards.pairs.erase(pair->qp_num);
  --cards.counts.queue_pairs;
  delete reinterpret_cast<Pair*>(pair);
  return 0;
}

EXPORT const char* ibv_wc_status_str(ibv_wc_status) {
  return "a status";
}

EXPORT void fake_ibverbs_refuse(int way, int n, int error) {
  const Lock lock(cards.mutex);
  cards.refusals[way] = {n, error};
}

EXPORT void fake_ibverbs_deceive(int way, int n) {
  const Lock lock(cards.mutex);
  cards.deceptions[way] = {n, 0};
}

EXPORT void fake_ibverbs_spoil_reads() {
  const Lock lock(cards.mutex);
  cards.spoils_reads = true;
}

EXPORT void fake_ibverbs_reset() {
  const Lock lock(cards.mutex);
  cards.spoils_reads = false;
  cards.refusals[FAKE_IBVERBS_DMABUF] = {};
  cards.refusals[FAKE_IBVERBS_ADDRESS] = {-1, EFAULT};
  cards.deceptions[FAKE_IBVERBS_DMABUF] = cards.deceptions[FAKE_IBVERBS_ADDRESS] = {};
}

EXPORT void fake_ibverbs_counts(FakeIbverbsCounts* counts) {
  const Lock lock(cards.mutex);
  *counts = cards.counts;
}
