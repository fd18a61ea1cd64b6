// A queue pair and the completion queue it reports to, on one rail.
#pragma once

#include <memory>
#include <string>

#include "transports/verbs/rail.h"

namespace p2pkv::verbs {

// Completions of the queue pairs made with it, which must be gone before it is. Thread-safe.
class CompletionQueue {
 public:
  // Null, with the reason in `error`.
  static std::unique_ptr<CompletionQueue> create(std::shared_ptr<Rail> rail, uint32_t n_entries,
                                                 std::string* error);
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  int poll(ibv_wc* completions, int n) { return ibv_poll_cq(cq_, n, completions); }
  // Makes fd() readable when the next completion comes. One that came before is not told of: poll() again.
  bool arm() { return ibv_req_notify_cq(cq_, 0) == 0; }
  int fd() const { return channel_->fd; }
  // Forgets what fd() told.
  void drain();

 private:
  friend class QueuePair;
  CompletionQueue() = default;

  std::shared_ptr<Rail> rail_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
};

// A reliable connection to one queue pair of a peer. The peer may RDMA READ over it what was registered
// readable; RDMA WRITE and atomics are refused by the device.
class QueuePair {
 public:
  struct Depths {
    uint32_t reads;         // posted at a time
    uint32_t pieces;        // of local memory in one read
    uint32_t landings = 0;  // places in local memory that one message may land in
  };

  // Null, with the reason in `error`. `completions` outlives it.
  static std::unique_ptr<QueuePair> create(std::shared_ptr<Rail> rail, CompletionQueue& completions,
                                           const Depths& depths, std::string* error);
  // The device touches no memory for it any more once this has returned.
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  LaneBlob describe(uint8_t rail_number) const;
  // Connects to the peer's; both number their packets from `first_packet`. The kernel may have to find out
  // the peer's hardware address, for which it takes a second at most.
  bool connect(const LaneBlob& peer, uint32_t first_packet, std::string* error);
  bool is_connected() const { return is_connected_; }

  // False if the pair takes nothing any more.
  bool post(ibv_send_wr* first);
  // An RDMA READ of the peer's beacon: it completes if its queue pair is there, whatever its process does. (A
  // READ of nothing would do without a beacon, but Soft-RoCE refuses one that it is asked for twice.)
  bool post_probe(uint64_t id);
  // A message of nothing, for which the peer has posted one receive.
  bool post_good_bye(uint64_t id);
  // `landing`: null for a message of nothing.
  bool post_receive(uint64_t id, ibv_sge* landing = nullptr);

  const Rail& rail() const { return *rail_; }

 private:
  QueuePair() = default;
  bool modify(ibv_qp_attr& attributes, int mask, const char* to, std::string* error);

  std::shared_ptr<Rail> rail_;
  Rail::Address address_;
  ibv_qp* qp_ = nullptr;
  bool is_connected_ = false;
  uint64_t peer_beacon_ = 0;
  uint32_t peer_beacon_key_ = 0;
};

}  // namespace p2pkv::verbs
