// A member who speaks over a link by itself, and says what it likes; and what it may like to say.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "net/listener.h"
#include "net/sealed_door.h"
#include "net/sealed_stream.h"
#include "numbers.h"
#include "offers/offer_frames.h"
#include "offers/transfers.h"

namespace p2pkv::test {

// An offer that is right in all but what `numbers` makes of it.
inline std::string make_offer(Numbers& numbers, std::string_view name, uint64_t row_nbytes) {
  const auto n_rows = static_cast<uint32_t>(1 + numbers.below(4));
  std::string out;
  const uint32_t told_rows = numbers.once_in(20) ? numbers.u32() : n_rows;
  const auto name_size = numbers.once_in(20) ? numbers.u32() : static_cast<uint32_t>(name.size());
  const uint64_t ask = numbers.once_in(3) ? numbers.below(8) : 0;
  const uint32_t first = numbers.once_in(6) ? numbers.u32() : static_cast<uint32_t>(numbers.below(4));
  wire::append(out, offers::OfferRecord{1 + numbers.below(40), ask, numbers.once_in(3) ? numbers.u32() : 200,
                                        first, told_rows, name_size});
  out += name;
  for (uint32_t i = 0; i < n_rows; ++i) {
    const uint64_t offset = numbers.once_in(3) ? numbers.u64() : 0;
    const uint64_t length = numbers.once_in(3) ? numbers.u64() : row_nbytes;
    wire::append(out, offers::RowRecord{5 + static_cast<uint32_t>(numbers.below(2)), 0, offset, length});
  }
  return out;
}

// Opened to the door of a node, as who has the secret can.
class RogueLink {
 public:
  RogueLink(Transfers& node, uint64_t node_key) {
    std::string error;
    stream_ = knock(kLinkDoor, node.accept(Transfers::request(), &error), &error);
    std::string own;
    wire::append(own, offers::IntroduceRecord{node_key, 1});
    send(static_cast<uint16_t>(offers::Kind::kIntroduce), own);
  }

  // False: the node has hung up.
  bool send(uint16_t kind, std::string_view body, uint32_t count = 1, uint64_t id = 1) {
    std::string head;
    wire::append(head, wire::Header{wire::kMagic, wire::kVersion, kind, id, 0, count, 0});
    stream_->put(head, body);
    while (stream_->flush()) {
      if (!stream_->has_outgoing()) return true;
      wait(POLLIN | POLLOUT, 100);
      if (!drop_incoming()) return false;
    }
    return false;
  }
  // The next message within `ms`: 1, none: 0; -1: the node has hung up.
  int receive(int ms, wire::Header* header, std::string* body) {
    auto progress = stream_->receive();
    if (progress == SealedStream::Progress::kBlocked && ms > 0) {
      wait(POLLIN, ms);
      progress = stream_->receive();
    }
    if (progress != SealedStream::Progress::kFrame) return progress == SealedStream::Progress::kLost ? -1 : 0;
    wire::Reader reader(stream_->message());
    *header = *reader.value<wire::Header>();
    *body = reader.rest();
    return 1;
  }

 private:
  bool drop_incoming() {
    auto progress = stream_->receive();
    while (progress == SealedStream::Progress::kFrame) progress = stream_->receive();
    return progress != SealedStream::Progress::kLost;
  }
  void wait(short events, int ms) {
    pollfd waiting{stream_->fd(), events, 0};
    poll(&waiting, 1, ms);
  }

  std::unique_ptr<SealedStream> stream_;
};

}  // namespace p2pkv::test
