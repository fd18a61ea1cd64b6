// Memory that an engine shares with its host's node, and where the pages of a batch lie in it.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "attach/attachment.h"
#include "net/packets.h"
#include "page/page_checks.h"

namespace p2pkv::attaching {
namespace {

std::string why_not_taken(uint32_t status) {
  switch (static_cast<MemoryStatus>(status)) {
    case MemoryStatus::kNotSealed:
      return "it is not sealed against being made shorter, which would end the host's node (F_SEAL_SHRINK)";
    case MemoryStatus::kOtherSize:
      return "its memfd is shorter than it says";
    case MemoryStatus::kHugePages:
      return "it is of huge pages that were set aside, which a host's node does not map";
    case MemoryStatus::kTooMany:
      return "the host's node has as many of this engine's memories as it takes";
    default:
      return "the host's node can't map it";
  }
}

}  // namespace

std::string Attachment::tell(const MemoryRequest& request, int fd, const Deadline& deadline) {
  while (!send_packet(connection_.get(), request, fd)) {
    if (errno != EAGAIN && errno != EINTR) return "the host's node has gone";
    if (!wait_writable(connection_.get(), deadline)) return "the host's node does not answer";
  }
  while (wait_readable(connection_.get(), deadline)) {
    MemoryReply reply;
    const Received received = receive_packet(connection_.get(), &reply);
    if (received == Received::kNothing) continue;
    if (received != Received::kPacket || reply.magic != kReplyMagic) return "the host's node has gone";
    if (reply.memory != request.memory) continue;  // of one that was given up
    return reply.status == 0 ? std::string() : why_not_taken(reply.status);
  }
  return "the host's node does not answer";
}

uint32_t Attachment::share(uint64_t nbytes, int fd, const Deadline& deadline, std::string* why) {
  if (!telling_.enter(deadline)) {
    *why = "the host's node does not answer";
    return 0;
  }
  const uint32_t number = next_number_++;
  const MemoryRequest request{kMemoryMagic, static_cast<uint32_t>(MemoryChange::kAdd), number, 0, nbytes};
  *why = tell(request, fd, deadline);
  telling_.leave();
  if (why->empty()) return number;
  forget(number);  // a node that was too slow to answer would keep it mapped
  return 0;
}

void Attachment::use(uint32_t number, uint64_t address, uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  SharedList list = *shared_;
  const Shared added{static_cast<int64_t>(address), static_cast<int64_t>(nbytes), number};
  list.insert(std::upper_bound(list.begin(), list.end(), added,
                               [](const Shared& a, const Shared& b) { return a.address < b.address; }),
              added);
  shared_ = std::make_shared<const SharedList>(std::move(list));
}

void Attachment::forget(uint32_t number) {
  {
    const std::lock_guard lock(mutex_);
    SharedList list = *shared_;
    std::erase_if(list, [number](const Shared& one) { return one.number == number; });
    shared_ = std::make_shared<const SharedList>(std::move(list));
    to_forget_.push_back(number);
  }
  if (!send_forgets()) wake_.set();
}

bool Attachment::send_forgets() {
  const std::lock_guard lock(mutex_);
  while (!to_forget_.empty()) {
    const MemoryRequest request{kMemoryMagic, static_cast<uint32_t>(MemoryChange::kForget),
                                to_forget_.front(), 0, 0};
    if (!send_packet(connection_.get(), request)) return errno != EAGAIN && errno != EINTR;
    to_forget_.pop_front();
  }
  return true;
}

std::shared_ptr<const Attachment::SharedList> Attachment::shared() {
  const std::lock_guard lock(mutex_);
  return shared_;
}

// Where the batch's pieces lie in shared memory; false if some lie elsewhere.
bool Attachment::place(const PageBatch& batch, std::vector<MemoryPiece>* places) {
  const auto list = shared();
  const auto extent_of = [](const Shared& one) { return Registered{one.address, one.nbytes}; };
  const size_t n = batch.n_pages * batch.n_pieces;
  places->reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const Piece& piece = batch.pieces[i];
    const auto holder = find_holder(*list, piece.address, piece.nbytes, extent_of);
    if (holder == list->end()) return false;
    places->push_back({holder->number, 0, static_cast<uint64_t>(piece.address - holder->address),
                       static_cast<uint64_t>(piece.nbytes)});
  }
  return true;
}

}  // namespace p2pkv::attaching
