#include "net/sealed_door.h"

#include <poll.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/zmq_api.h"

namespace p2pkv {

SealedDoor::SealedDoor(const DoorKind& kind, Admit admit) : kind_(kind), admit_(std::move(admit)) {
  fill_random(master_key_.data(), master_key_.size());
}

bool SealedDoor::start(const ListenAt& at, std::string* error) {
  if (!SealedStream::is_available()) {
    *error = "the libzmq of pyzmq was built without libsodium";
    return false;
  }
  UniqueFd listener = listen_on(at, &address_, error);
  if (!listener) return false;
  const auto admit = [this](UniqueFd connection, const Doorman::Admitted& peer) {
    set_liveness(connection.get());
    admit_(SealedStream(std::move(connection), key_of(peer.grant), Side::kOwner));
  };
  doorman_.reset(new Doorman(std::move(listener), {kind_.hello_magic, false, kind_.thread_name}, admit));
  return doorman_->start(error);
}

std::string SealedDoor::accept(std::string_view remote, std::string* error) {
  DoorRequestBlob request;
  if (!from_blob(remote, kind_.request_magic, &request, error)) return {};
  const uint64_t grant = doorman_->tokens().new_grant();
  DoorBlob door{};
  door.magic = kind_.door_magic;
  door.version = kFrameVersion;
  door.port = address_.port;
  door.family = address_.family;
  door.scope = address_.scope;
  std::copy(std::begin(address_.bytes), std::end(address_.bytes), door.address);
  door.token = doorman_->tokens().mint(grant);
  door.key = key_of(grant);
  return to_blob(door);
}

void SealedDoor::close() {
  if (doorman_) doorman_->close();
}

// Keys need not be kept for tokens that may never be shown.
SessionKey SealedDoor::key_of(uint64_t grant) const {
  SessionKey key;
  ZmqApi::get().generichash(key.data(), key.size(), reinterpret_cast<const unsigned char*>(&grant),
                            sizeof grant, master_key_.data(), master_key_.size());
  return key;
}

std::string ask_for_door(const DoorKind& kind) {
  return to_blob(DoorRequestBlob{kind.request_magic, kFrameVersion, 0});
}

std::unique_ptr<SealedStream> knock(const DoorKind& kind, std::string_view door, std::string* error) {
  DoorBlob blob;
  if (!from_blob(door, kind.door_magic, &blob, error)) return nullptr;
  if (!SealedStream::is_available()) {
    *error = "the libzmq of pyzmq was built without libsodium";
    return nullptr;
  }
  Address address{blob.family, blob.port, blob.scope, {}};
  std::copy(std::begin(blob.address), std::end(blob.address), address.bytes);
  UniqueFd connection = start_connecting(address);
  if (!connection) {
    *error = "no socket to connect with";
    return nullptr;
  }
  set_liveness(connection.get());
  auto stream = std::make_unique<SealedStream>(std::move(connection), blob.key, Side::kReader);
  stream->put_plain(to_blob(Hello{kind.hello_magic, kFrameVersion, 0, blob.token}));
  return stream;
}

SealedStream::Progress receive_by(SealedStream& stream, const Deadline& deadline) {
  for (;;) {
    if (!stream.flush()) return SealedStream::Progress::kLost;
    const auto progress = stream.receive();
    if (progress != SealedStream::Progress::kBlocked || deadline.passed()) return progress;
    const short events = stream.has_outgoing() ? POLLIN | POLLOUT : POLLIN;
    pollfd waiting{stream.fd(), events, 0};
    poll(&waiting, 1, deadline.poll_ms());
  }
}

}  // namespace p2pkv
