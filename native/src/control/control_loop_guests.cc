// The control loop answers here who follows which pages, and which are taken back.
#include <utility>
#include <vector>

#include "control/control_loop.h"
#include "directory/requests.h"

namespace p2pkv {

using wire::Header;
using wire::ReplyStatus;

void ControlLoop::serve_guests(std::shared_ptr<Guests> guests) {
  const std::lock_guard lock(mutex_);
  guests_ = std::move(guests);
  awaits_guests_ = false;
}

void ControlLoop::await_guests() {
  const std::lock_guard lock(mutex_);
  awaits_guests_ = true;
}

bool ControlLoop::has_cache() {
  const std::lock_guard lock(mutex_);
  return guests_ != nullptr || awaits_guests_;
}

std::shared_ptr<Guests> ControlLoop::guests() {
  const std::lock_guard lock(mutex_);
  return guests_;
}

void ControlLoop::follow(const std::string& peer, const Header& header, wire::Reader body) {
  const auto follower = body.value<uint64_t>();
  std::vector<FollowedPage> pages;
  if (!follower || !wire::take_records(body, header.count, &pages)) {
    return refuse(peer, header, ReplyStatus::kMalformed, "wrong length of a follow");
  }
  const std::shared_ptr<Guests> guests = this->guests();
  std::vector<uint8_t> is_own(pages.size());
  TakenBack known{};
  if (guests == nullptr || !guests->follow(*follower, pages.data(), pages.size(), is_own.data(), &known)) {
    return refuse(peer, header, ReplyStatus::kRefused, "this node has no pages, or too many followers");
  }
  std::string reply;
  wire::append(reply, known);
  reply.append(reinterpret_cast<const char*>(is_own.data()), is_own.size());
  send(peer, wire::make_reply(header, ReplyStatus::kOk, boot_, header.count), reply);
}

void ControlLoop::take_back(const std::string& peer, const Header& header, wire::Reader body) {
  const auto told = body.value<TakeBack>();
  std::vector<Key> keys;
  if (!told || !wire::take_records(body, header.count, &keys)) {
    return refuse(peer, header, ReplyStatus::kMalformed, "wrong length of a take back");
  }
  const auto guests = this->guests();
  if (guests == nullptr) return send(peer, wire::make_reply(header, ReplyStatus::kOk, boot_, 0), {});
  const uint64_t ticket = guests->take_back(*told, keys.data(), keys.size());
  taking_back_.push_back({peer, header, guests, ticket});
  go_on_taking_back();
}

// Takes a turn, and answers what is done by it. Between two turns everybody else is answered.
void ControlLoop::go_on_taking_back() {
  if (taking_back_.empty()) return;
  taking_back_.front().guests->take_turn();
  std::erase_if(taking_back_, [this](const TakingBack& one) {
    if (!one.guests->has_gone(one.ticket)) return false;
    send(one.peer, wire::make_reply(one.header, ReplyStatus::kOk, boot_, 0), {});
    return true;
  });
  if (!taking_back_.empty()) thread_->wake();
}

}  // namespace p2pkv
