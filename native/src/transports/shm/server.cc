#include "transports/shm/server.h"

#include <utility>

#include "net/packets.h"
#include "transports/shm/frames.h"

namespace p2pkv::shm {
namespace {

bool hand_over(int connection, uint32_t id, const RegisteredRegion* region) {
  MapReply reply{kReplyMagic, static_cast<uint32_t>(MapStatus::kNoSuchRegion), id, 0, 0};
  if (region == nullptr) return send_packet(connection, reply);
  reply.status = static_cast<uint32_t>(MapStatus::kGranted);
  reply.nbytes = region->nbytes();
  return send_packet(connection, reply, region->fd());
}

}  // namespace

std::unique_ptr<RegionServer> start_server(std::shared_ptr<RegionTable> regions, std::string* error) {
  return RegionServer::start({kHelloMagic, kRequestMagic, "p2pkv-shm-door", "p2pkv-shm-serve", hand_over},
                             std::move(regions), error);
}

}  // namespace p2pkv::shm
