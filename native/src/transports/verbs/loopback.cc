#include "transports/verbs/loopback.h"

#include "net/tokens.h"

namespace p2pkv::verbs {

std::unique_ptr<Loopback> Loopback::create(std::shared_ptr<Rail> rail, CompletionQueue& completions,
                                           uint64_t id, std::string* error) {
  std::unique_ptr<Loopback> loopback(new Loopback);
  loopback->id_ = id;
  loopback->landing_ = Registration::create({rail}, loopback->page_.base(), kMostBytes, false, error);
  if (!loopback->landing_) return nullptr;
  loopback->pair_ = QueuePair::create(std::move(rail), completions, {1, 1, 1}, error);
  if (!loopback->pair_) return nullptr;
  uint32_t first_packet = 0;
  fill_random(&first_packet, sizeof first_packet);
  const bool is_connected =
      loopback->pair_->connect(loopback->pair_->describe(0), first_packet & 0xffffff, error);
  return is_connected ? std::move(loopback) : nullptr;
}

bool Loopback::begin(uint64_t address, uint32_t key, uint32_t nbytes) {
  ibv_sge landing{landing_->address(), kMostBytes, landing_->local_key(0)};
  ibv_sge source{address, nbytes, key};
  ibv_send_wr request{};
  request.wr_id = id_;
  request.sg_list = &source;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  n_awaited_ = 2;  // the message is sent, and it is here
  return pair_->post_receive(id_, &landing) && pair_->post(&request);
}

}  // namespace p2pkv::verbs
