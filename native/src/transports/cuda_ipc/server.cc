#include "transports/cuda_ipc/server.h"

#include <utility>

#include "net/packets.h"
#include "transports/cuda_ipc/frames.h"
#include "transports/cuda_ipc/memory.h"

namespace p2pkv::cuda_ipc {
namespace {

bool hand_over(int connection, uint32_t id, const RegisteredRegion* region) {
  ShareReply reply{kReplyMagic, static_cast<uint32_t>(ShareStatus::kNoSuchRegion), id, 0, 0, {}};
  if (region == nullptr) return send_packet(connection, reply);
  const DeviceMemory& memory = *device_memory_of(*region);
  reply.status = static_cast<uint32_t>(ShareStatus::kGranted);
  reply.has_words = memory.words ? 1 : 0;
  reply.nbytes = region->nbytes();
  reply.range = memory.range;
  if (!send_packet(connection, reply, memory.fd.get())) return false;
  return !memory.words ||
         send_packet(connection, WordsPacket{kWordsMagic, id, memory.words_nbytes}, memory.words.get());
}

}  // namespace

std::unique_ptr<RegionServer> start_server(std::shared_ptr<RegionTable> regions, std::string* error) {
  return RegionServer::start({kHelloMagic, kRequestMagic, "p2pkv-ipc-door", "p2pkv-ipc-serve", hand_over},
                             std::move(regions), error);
}

}  // namespace p2pkv::cuda_ipc
