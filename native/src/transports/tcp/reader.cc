#include "transports/tcp/reader.h"

#include <algorithm>
#include <cstring>

#include "transports/tcp/batch.h"

namespace p2pkv::tcp {

std::string make_blob(Server& server, const Half& half) {
  const Address& first = server.addresses()[0];
  EndpointBlob blob{};
  blob.magic = server.sealing() != nullptr ? kSealedMagic : kEndpointMagic;
  blob.version = kFrameVersion;
  blob.port = first.port;
  blob.family = first.family;
  blob.scope = first.scope;
  blob.n_streams = static_cast<uint8_t>(half.n_streams);
  blob.n_tokens = static_cast<uint8_t>(half.n_tokens);
  blob.more = static_cast<uint8_t>(kTakesMore | (half.n_addresses - 1));
  std::memcpy(blob.address, first.bytes, sizeof blob.address);
  std::string result = to_blob(blob);
  // Kept with the tokens alone: who reads this node's memory later can't read what he had recorded before.
  CipherKey session{};
  if (server.sealing() != nullptr) fill_random(session.data(), session.size());
  for (uint32_t i = 0; i < half.n_tokens; ++i) result += to_blob(server.tokens().mint(half.grant, session));
  for (size_t i = 1; i < half.n_addresses; ++i) {
    const Address& address = server.addresses()[i];
    AddressBlob more{address.port, address.family, 0, address.scope, {}};
    std::memcpy(more.address, address.bytes, sizeof more.address);
    result += to_blob(more);
  }
  if (server.sealing() != nullptr) result += to_blob(session);
  return result;
}

bool take_blob(std::string_view remote, const Server& server, EndpointBlob* blob, std::string* error) {
  const bool encrypts = server.sealing() != nullptr;
  std::string other;
  if (from_blob(remote, encrypts ? kEndpointMagic : kSealedMagic, blob, &other)) {
    *error = encrypts ? "this node encrypts tcp and its peer does not; set encrypt: tcp on both"
                      : "its peer encrypts tcp and this node does not; set encrypt: tcp on both";
    return false;
  }
  return from_blob(remote, encrypts ? kSealedMagic : kEndpointMagic, blob, error);
}

TcpEndpoint::TcpEndpoint(TcpHome home) : home_(std::move(home)), grant_(home_.server->tokens().new_grant()) {}

std::string TcpEndpoint::make_half() {
  const auto n_locals = static_cast<uint32_t>(std::max<size_t>(1, home_.locals->size()));
  const uint32_t n_streams = std::min(kMaxStreams, home_.most_streams() * n_locals);
  return make_blob(*home_.server, {n_streams, n_streams, 1, grant_});
}

bool TcpEndpoint::parse(std::string_view remote, std::vector<Address>* addresses,
                        std::vector<Token>* tokens) const {
  EndpointBlob first;
  std::memcpy(&first, remote.data(), sizeof first);
  const size_t n_more = first.more & ~kTakesMore;
  const size_t n_key = home_.server->sealing() != nullptr ? sizeof(CipherKey) : 0;
  const size_t size = sizeof first + first.n_tokens * sizeof(Token) + n_more * sizeof(AddressBlob) + n_key;
  if (first.n_tokens == 0 || n_more >= kMaxAddresses || remote.size() != size) return false;
  const auto add = [&](const auto& blob) {
    Address address{blob.family, blob.port, blob.scope, {}};
    std::memcpy(address.bytes, blob.address, sizeof address.bytes);
    addresses->push_back(address);
    return blob.family == 4 || blob.family == 6;
  };
  const char* at = remote.data() + sizeof first;
  tokens->resize(first.n_tokens);
  for (Token& token : *tokens) {
    std::memcpy(token.data(), at, sizeof token);
    at += sizeof token;
  }
  bool is_sane = add(first);
  for (size_t i = 0; i < n_more; ++i) {
    AddressBlob more;
    std::memcpy(&more, at, sizeof more);
    at += sizeof more;
    is_sane &= add(more);
  }
  return is_sane;
}

bool TcpEndpoint::take_half(std::string_view remote, std::string* error) {
  EndpointBlob owner;
  if (!take_blob(remote, *home_.server, &owner, error)) return false;
  std::vector<Address> addresses;
  std::vector<Token> tokens;
  if (!parse(remote, &addresses, &tokens)) {
    *error = "handshake is malformed";
    return false;
  }
  auto ends = pair_ends(*home_.locals, addresses);
  if (ends.size() > tokens.size()) ends.resize(tokens.size());
  std::string ports(remote.substr(0, sizeof owner));
  ports += remote.substr(sizeof owner + tokens.size() * sizeof(Token),
                         (addresses.size() - 1) * sizeof(AddressBlob));
  // What is measured never asks for more than there are tokens for: it would be asked for again by each
  // batch.
  const size_t room = std::max<size_t>(1, tokens.size() / ends.size());
  ports_ = home_.book->find(ports, ends.size(), std::min<size_t>(home_.most_streams(), room));
  const size_t wanted = home_.n_streams > 0 ? home_.n_streams : ports_->streams.to_open();
  n_per_rail_ = std::min(room, wanted);

  Rails& rails = ports_->rails;
  bool has_sound = false;
  for (size_t rail = 0; rail < ends.size(); ++rail) has_sound |= !rails.is_doubted(rail);
  size_t next_token = 0;
  for (size_t i = 0; i < n_per_rail_; ++i) {
    for (size_t rail = 0; rail < ends.size(); ++rail) {
      auto strand = std::make_unique<Strand>();
      strand->rail = rail;
      strand->opened_ns = steady_now_ns();
      const Hello hello{kHelloMagic, kFrameVersion, 0, tokens[next_token++]};
      strand->stream.connect(ends[rail].remote, ends[rail].local, hello, make_wire(remote, hello));
      if (has_sound && rails.is_doubted(rail)) {
        strand->state = Strand::State::kProving;
        strand->is_pinged = strand->is_unproven = true;
        strand->stream.ping();
      }
      strands_.push_back(std::move(strand));
    }
  }
  home_.counters->have(ends.size());
  return true;
}

std::unique_ptr<Wire> TcpEndpoint::make_wire(std::string_view remote, const Hello& hello) const {
  Sealing* sealing = home_.server->sealing();
  if (sealing == nullptr) return plain_wire();
  CipherKey session;
  std::memcpy(session.data(), remote.data() + remote.size() - session.size(), session.size());
  return sealing->wire(session, hello, Sender::kReader);
}

std::shared_ptr<RemoteRegion> TcpEndpoint::attach(std::string_view region, std::string* error) {
  RegionBlob blob;
  if (!from_blob(region, kRegionMagic, &blob, error)) return nullptr;
  return std::make_shared<AttachedRegion>(this, blob.region, blob.nbytes);
}

bool TcpEndpoint::is_worn() {
  const std::lock_guard lock(mutex_);
  if (!ports_) return false;
  Rails& rails = ports_->rails;
  const auto now = Deadline::Clock::now();
  if (home_.n_streams == 0 && ports_->streams.to_open() != n_per_rail_) return true;
  for (size_t rail = 0; rails.n() > 1 && rail < rails.n(); ++rail) {
    // One that has just been lost is replaced at once, so that the rail is there when another one fails; one
    // that has not come back is tried again after its pause.
    bool has_sound = false, is_awaited = false, is_tried = false;
    for (const auto& strand : strands_) {
      if (strand->rail != rail) continue;
      has_sound |= strand->state == Strand::State::kGood;
      is_awaited |= strand->state == Strand::State::kSuspected;
      is_tried |= strand->is_unproven;
    }
    if (!has_sound && !is_awaited && (!is_tried || now >= rails.retry_at(rail))) return true;
  }
  return false;
}

std::shared_ptr<Batch> TcpEndpoint::make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) {
  return std::make_shared<TcpBatch>(std::static_pointer_cast<TcpEndpoint>(shared_from_this()),
                                    std::move(remote), std::move(reads));
}

void TcpEndpoint::shutdown_sockets() {
  for (const auto& strand : strands_) strand->stream.shut_down();
}

void TcpEndpoint::release() {
  home_.server->drop_grant(grant_);
  for (const auto& strand : strands_) strand->helper.reset();
  const std::lock_guard lock(mutex_);
  for (const auto& strand : strands_) strand->stream.reset();
}

}  // namespace p2pkv::tcp
