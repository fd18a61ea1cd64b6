#include "transports/ucx/line.h"

#include <cstring>

#include "net/tokens.h"

namespace p2pkv::ucx {
namespace {

class HelloMessage final : public Message {
 public:
  HelloMessage(const Token& token, uint64_t reader, std::string address)
      : frame_{{kHelloMagic, kFrameVersion, 0, token}, reader}, address_(std::move(address)) {
    frame = &frame_;
    frame_nbytes = sizeof frame_;
    payload = address_.data();
    payload_nbytes = address_.size();
  }

 private:
  const HelloFrame frame_;
  const std::string address_;
};

class AskMessage final : public Message {
 public:
  explicit AskMessage(Ask ask) : ask_(std::move(ask)) {
    frame = &ask_.frame;
    frame_nbytes = sizeof ask_.frame;
    payload = ask_.spans.data();
    payload_nbytes = ask_.spans.size() * sizeof(SpanRequest);
  }

 private:
  const Ask ask_;
};

class LeaveMessage final : public Message {
 public:
  explicit LeaveMessage(uint64_t reader) : frame_{reader} {
    frame = &frame_;
    frame_nbytes = sizeof frame_;
  }

 private:
  const LeaveFrame frame_;
};

// What closing waits for an owner, which finds out by itself later if it is slower.
constexpr double kGoodbyeSeconds = 0.02;

uint64_t random_number() {
  uint64_t number;
  fill_random(&number, sizeof number);
  return number;
}

}  // namespace

Line::Line() : reader_(random_number()) {}

Line::~Line() {
  if (endpoint_ == nullptr || is_lost_) return;
  port_->send(endpoint_, kLeave, std::make_unique<LeaveMessage>(reader_));
  port_->flush(kGoodbyeSeconds);
}

std::unique_ptr<Line> Line::open(std::shared_ptr<Context> context, std::string_view owner, const Token& token,
                                 std::string* error) {
  auto line = std::unique_ptr<Line>(new Line);
  Line* self = line.get();
  line->port_ = Port::make(std::move(context), [self](ucp_ep_h) { self->is_lost_ = true; }, error);
  if (!line->port_) return nullptr;
  line->port_->on_message(kBytes, [self](std::string_view frame, std::string_view payload, ucp_ep_h) {
    self->arrived<BytesFrame>(frame, [self, payload](const BytesFrame& bytes) {
      return self->arrivals_->take_bytes(bytes, payload);
    });
  });
  line->port_->on_message(kEnd, [self](std::string_view frame, std::string_view payload, ucp_ep_h) {
    self->arrived<EndFrame>(
        frame, [self, payload](const EndFrame& end) { return self->arrivals_->take_end(end, payload); });
  });
  line->port_->on_message(kRefused,
                          [self](std::string_view, std::string_view, ucp_ep_h) { self->is_lost_ = true; });
  line->endpoint_ = line->port_->connect(owner);
  if (line->endpoint_ == nullptr) {
    *error = "UCX can't use the address in the handshake";
    return nullptr;
  }
  auto hello = std::make_unique<HelloMessage>(token, line->reader_, line->port_->address());
  line->port_->send(line->endpoint_, kHello, std::move(hello), true);
  return line;
}

void Line::send(Ask ask) {
  ask.frame.reader = reader_;
  if (!is_lost_) port_->send(endpoint_, kAsk, std::make_unique<AskMessage>(std::move(ask)));
}

void Line::sleep(const Deadline& deadline) {
  port_->sleep(wakeup_.fd(), deadline.poll_ms());
  wakeup_.clear();
}

// Whatever is not for this line, or comes when nobody waits for anything, is let go.
template <typename Frame, typename Take>
void Line::arrived(std::string_view bytes, Take take) {
  Frame frame;
  if (bytes.size() != sizeof frame || arrivals_ == nullptr) return;
  std::memcpy(&frame, bytes.data(), sizeof frame);
  if (frame.reader == reader_ && !take(frame)) is_lost_ = true;
}

}  // namespace p2pkv::ucx
