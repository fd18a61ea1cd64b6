#include "control/zap.h"

#include <algorithm>

namespace p2pkv {
namespace {

constexpr int kZapTickMs = 1000;

// In constant time: how much of a key is right must not show.
bool equal(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

ZapHandler::ZapHandler(void* socket, std::string domain, std::vector<std::string> admitted,
                       std::shared_ptr<Refusals> refusals)
    : domain_(std::move(domain)),
      admitted_(std::move(admitted)),
      refusals_(std::move(refusals)),
      thread_(std::make_unique<ZmqServerThread>(
          socket, "p2pkv-zap", kZapTickMs,
          ZmqServerThread::Callbacks{[this](Frames request) { answer(std::move(request)); }, {}, {}})) {
  thread_->start();
}

void ZapHandler::answer(Frames request) {
  // ROUTER envelope (identity, empty), then version, request id, domain, address, identity, mechanism,
  // credentials.
  if (request.size() != 9 || request[2] != "1.0") return;
  const std::string& key = request[8];
  const bool known = std::any_of(admitted_.begin(), admitted_.end(),
                                 [&](const std::string& own) { return equal(own, key); });
  const bool admit = request[4] == domain_ && request[7] == "CURVE" && known;
  if (!admit) refusals_->note(request[5]);
  thread_->send(
      {request[0], "", "1.0", request[3], admit ? "200" : "400", admit ? "" : "unknown key", "", ""});
}

}  // namespace p2pkv
