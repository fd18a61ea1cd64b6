#include "transports/verbs/queue_pair.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace p2pkv::verbs {
namespace {

// 4.096 us * 2^17 = 0.54 s until a packet that was lost is asked for again: within the default deadline of a
// call, and long enough for a busy machine with Soft-RoCE (at 2^14, 67 ms, its reads fell to a twentieth).
constexpr uint8_t kAckTimeout = 17;
// The most that counts: Soft-RoCE takes 7, the largest value, for "forever". A peer that is gone is noticed
// after 7 time-outs, 3.8 s (mlx5 waits up to four times as long); calls return by their own deadline before.
constexpr uint8_t kRetries = 6;
// Nobody waits for receives: a good-bye that finds none posted is not worth repeating.
constexpr uint8_t kReceiverNotReadyRetries = 0;
constexpr uint8_t kMinReceiverNotReadyTimer = 12;  // 0.64 ms; see above
constexpr uint8_t kHopLimit = 64;                  // through routers, as IP's default
constexpr uint32_t kReceives = 1;                  // for the peer's good-bye

std::string limit_text(const char* what, const Rail& rail, int limit) {
  const int error = errno;
  return std::string("cannot create a ") + what + " on " + rail.name() + ": " + std::strerror(error) +
         "; the device has at most " + std::to_string(limit) +
         " of them, and each takes locked memory (ulimit -l)";
}

}  // namespace

std::unique_ptr<CompletionQueue> CompletionQueue::create(std::shared_ptr<Rail> rail, uint32_t n_entries,
                                                         std::string* error) {
  std::unique_ptr<CompletionQueue> queue(new CompletionQueue);
  queue->rail_ = std::move(rail);
  const Rail& on = *queue->rail_;
  const int n = std::min(static_cast<int>(n_entries), on.limits().max_cqe);
  queue->channel_ = on.api().create_comp_channel(on.context());
  if (queue->channel_) queue->cq_ = on.api().create_cq(on.context(), n, nullptr, queue->channel_, 0);
  if (queue->cq_ == nullptr) {
    *error = limit_text("completion queue", on, on.limits().max_cq);
    return nullptr;
  }
  const int flags = fcntl(queue->channel_->fd, F_GETFL);
  fcntl(queue->channel_->fd, F_SETFL, flags | O_NONBLOCK);
  fcntl(queue->channel_->fd, F_SETFD, FD_CLOEXEC);
  return queue;
}

CompletionQueue::~CompletionQueue() {
  if (!rail_->is_ours()) return;
  if (cq_) {
    drain();
    rail_->api().destroy_cq(cq_);
  }
  if (channel_) rail_->api().destroy_comp_channel(channel_);
}

void CompletionQueue::drain() {
  ibv_cq* cq;
  void* context;
  while (rail_->api().get_cq_event(channel_, &cq, &context) == 0) rail_->api().ack_cq_events(cq, 1);
}

std::unique_ptr<QueuePair> QueuePair::create(std::shared_ptr<Rail> rail, CompletionQueue& completions,
                                             const Depths& depths, std::string* error) {
  std::unique_ptr<QueuePair> pair(new QueuePair);
  pair->rail_ = std::move(rail);
  const Rail& on = *pair->rail_;
  if (!pair->rail_->address(&pair->address_)) {
    *error = on.name() + " is down or has lost its address";
    return nullptr;
  }
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = completions.cq_;
  wanted.cap = {depths.reads, kReceives, depths.pieces, depths.landings, 0};
  wanted.qp_type = IBV_QPT_RC;
  pair->qp_ = on.api().create_qp(on.domain(), &wanted);
  if (pair->qp_ == nullptr) {
    *error = limit_text("queue pair", on, on.limits().max_qp);
    return nullptr;
  }
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = on.port();
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ;  // and nothing else
  const int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  return pair->modify(attributes, mask, "INIT", error) ? std::move(pair) : nullptr;
}

QueuePair::~QueuePair() {
  if (qp_ == nullptr || !rail_->is_ours()) return;
  // To error first: what is in flight stops although the peer's packets go on arriving.
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  rail_->api().modify_qp(qp_, &attributes, IBV_QP_STATE);
  rail_->api().destroy_qp(qp_);
}

LaneBlob QueuePair::describe(uint8_t rail_number) const {
  LaneBlob blob{};
  std::copy(address_.gid.begin(), address_.gid.end(), blob.gid);
  blob.queue_pair = qp_->qp_num;
  blob.lid = address_.lid;
  blob.mtu = static_cast<uint8_t>(address_.mtu);
  blob.rail = rail_number;
  blob.reads_in = static_cast<uint8_t>(std::clamp(rail_->limits().max_qp_rd_atom, 1, 255));
  blob.beacon = reinterpret_cast<uint64_t>(rail_->beacon().addr);
  blob.beacon_key = rail_->beacon().rkey;
  blob.link_layer = rail_->is_infiniband() ? 1 : 2;
  return blob;
}

bool QueuePair::connect(const LaneBlob& peer, uint32_t first_packet, std::string* error) {
  peer_beacon_ = peer.beacon;
  peer_beacon_key_ = peer.beacon_key;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min<int>(peer.mtu, address_.mtu));
  attributes.dest_qp_num = peer.queue_pair;
  attributes.rq_psn = first_packet;
  attributes.max_dest_rd_atomic = static_cast<uint8_t>(std::clamp(rail_->limits().max_qp_rd_atom, 1, 255));
  attributes.min_rnr_timer = kMinReceiverNotReadyTimer;
  attributes.ah_attr.port_num = rail_->port();
  attributes.ah_attr.dlid = peer.lid;
  attributes.ah_attr.is_global = address_.needs_global;
  attributes.ah_attr.grh.sgid_index = address_.gid_index;
  attributes.ah_attr.grh.hop_limit = kHopLimit;
  std::memcpy(attributes.ah_attr.grh.dgid.raw, peer.gid, sizeof peer.gid);
  constexpr int kReceiving = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  if (!modify(attributes, kReceiving, "RTR", error)) return false;

  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = first_packet;
  attributes.timeout = kAckTimeout;
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kReceiverNotReadyRetries;
  const int reads_out = std::min<int>(rail_->limits().max_qp_init_rd_atom, peer.reads_in);
  attributes.max_rd_atomic = static_cast<uint8_t>(std::clamp(reads_out, 1, 255));
  constexpr int kSending = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                           IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  is_connected_ = modify(attributes, kSending, "RTS", error);
  return is_connected_;
}

bool QueuePair::modify(ibv_qp_attr& attributes, int mask, const char* to, std::string* error) {
  const int failure = rail_->api().modify_qp(qp_, &attributes, mask);
  if (failure == 0) return true;
  *error = "cannot bring a queue pair of " + rail_->name() + " to " + to + ": " + std::strerror(failure);
  return false;
}

bool QueuePair::post(ibv_send_wr* first) {
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp_, first, &bad) == 0;
}

bool QueuePair::post_probe(uint64_t id) {
  const ibv_mr& own = rail_->beacon();
  ibv_sge landing{reinterpret_cast<uint64_t>(own.addr) + 8, 8, own.lkey};
  ibv_send_wr request{};
  request.sg_list = &landing;
  request.num_sge = 1;
  request.wr.rdma.remote_addr = peer_beacon_;
  request.wr.rdma.rkey = peer_beacon_key_;
  request.wr_id = id;
  request.opcode = IBV_WR_RDMA_READ;
  request.send_flags = IBV_SEND_SIGNALED;
  return post(&request);
}

bool QueuePair::post_good_bye(uint64_t id) {
  ibv_send_wr request{};
  request.wr_id = id;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  return post(&request);
}

bool QueuePair::post_receive(uint64_t id, ibv_sge* landing) {
  ibv_recv_wr request{};
  request.wr_id = id;
  request.sg_list = landing;
  request.num_sge = landing ? 1 : 0;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(qp_, &request, &bad) == 0;
}

}  // namespace p2pkv::verbs
