#include "offers/link.h"

namespace p2pkv::offers {

void Link::set_direct(std::set<std::string> ways) {
  const std::lock_guard lock(direct_mutex_);
  direct_ = std::move(ways);
}

bool Link::reads_directly(const std::string& way) {
  const std::lock_guard lock(direct_mutex_);
  return direct_.contains(way);
}

bool Link::post(Kind kind, uint64_t request_id, uint32_t count, std::string_view body) {
  return post_header({wire::kMagic, wire::kVersion, static_cast<uint16_t>(kind), request_id, 0, count, 0},
                     body);
}

bool Link::reply(const wire::Header& to, wire::ReplyStatus status, std::string_view body) {
  return post_header(wire::make_reply(to, status, 0, to.count), body);
}

bool Link::post_header(const wire::Header& header, std::string_view body) {
  // A forked child's frames would have the numbers of its parent's next ones, and so their nonces.
  if (getpid() != pid_) return false;
  std::string head;
  wire::append(head, header);
  bool is_blocked;
  {
    const std::lock_guard lock(mutex_);
    if (is_lost_) return false;
    if (stream_->n_outgoing() > kMaxQueued) {
      // What can't be told would leave the two sides with different ideas: rather lose all of it.
      stream_->shut_down();
      return false;
    }
    const bool was_blocked = stream_->has_outgoing();
    stream_->put(head, body);
    if (was_blocked) return true;  // the server sends it after the rest
    if (!stream_->flush()) {
      // The server finds the end of the connection when it reads, and tells everybody.
      stream_->shut_down();
      return false;
    }
    is_blocked = stream_->has_outgoing();
  }
  if (is_blocked) on_blocked_(*this);
  return true;
}

bool Link::send_rest(bool* is_blocked) {
  const std::lock_guard lock(mutex_);
  const bool is_open = stream_->flush();
  *is_blocked = stream_->has_outgoing();
  return is_open;
}

bool Link::receive(std::string* message, bool* is_lost) {
  const std::lock_guard lock(mutex_);
  const auto progress = stream_->receive();
  *is_lost = progress == SealedStream::Progress::kLost;
  if (progress != SealedStream::Progress::kFrame) return false;
  message->assign(stream_->message());
  return true;
}

void Link::cut() {
  is_lost_ = true;
  stream_->shut_down();
}

}  // namespace p2pkv::offers
