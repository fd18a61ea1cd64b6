#include "directory_requests.h"

#include <cstring>
#include <string_view>
#include <vector>

#include "p2pkv/clock.h"

namespace p2pkv {
namespace {

using wire::Header;
using wire::Kind;
using wire::ReplyStatus;

std::string reply_to(const Header& header, ReplyStatus status, uint64_t boot, std::string_view body = {}) {
  std::string message;
  message.reserve(sizeof header + body.size());
  wire::append(message,
               wire::make_reply(header, status, boot, status == ReplyStatus::kOk ? header.count : 0));
  return message.append(body);
}

// The records of a body, in memory of their own: received bytes need not be aligned for the structs in them.
template <typename T>
bool take_records(const wire::Reader& body, uint32_t count, std::vector<T>* records) {
  if (count > wire::kMaxEntries || body.rest().size() != count * sizeof(T)) return false;
  records->resize(count);
  if (count > 0) std::memcpy(static_cast<void*>(records->data()), body.rest().data(), count * sizeof(T));
  return true;
}

std::string get(Shard& shard, const Header& header, const wire::Reader& body, uint64_t boot) {
  std::vector<Key> keys;
  if (!take_records(body, header.count, &keys)) {
    return reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a get");
  }
  const size_t n = keys.size();
  std::vector<uint8_t> found(n);
  std::vector<Location> locations(n);
  shard.get(keys.data(), n, found.data(), locations.data());
  std::string message;
  message.reserve(sizeof header + n * (1 + sizeof(Location)));
  wire::append(message, wire::make_reply(header, ReplyStatus::kOk, boot, header.count));
  message.append(reinterpret_cast<const char*>(found.data()), n);
  for (size_t i = 0; i < n; ++i) {
    if (found[i] != 0) wire::append(message, locations[i]);
  }
  return message;
}

std::string put(Shard& shard, const Header& header, const wire::Reader& body, uint64_t boot) {
  std::vector<wire::PutEntry> entries;
  if (!take_records(body, header.count, &entries)) {
    return reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a put");
  }
  const bool has_room = shard.put(entries.data(), entries.size(), steady_seconds()) == 0;
  return reply_to(header, has_room ? ReplyStatus::kOk : ReplyStatus::kFull, boot);
}

std::string drop(Shard& shard, const Header& header, const wire::Reader& body, uint64_t boot) {
  std::vector<wire::DropEntry> entries;
  if (!take_records(body, header.count, &entries)) {
    return reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a drop");
  }
  shard.drop(entries.data(), entries.size(), steady_seconds());
  return reply_to(header, ReplyStatus::kOk, boot);
}

}  // namespace

bool is_directory_request(Kind kind) {
  return kind == Kind::kGet || kind == Kind::kPut || kind == Kind::kDrop;
}

std::string answer_directory_request(Shard& shard, const Header& header, wire::Reader body, uint64_t boot) {
  if (header.version != wire::kVersion) return reply_to(header, ReplyStatus::kVersion, boot);
  if (header.boot != 0 && header.boot != boot) return reply_to(header, ReplyStatus::kWrongBoot, boot);
  switch (static_cast<Kind>(header.kind)) {
    case Kind::kGet:
      return get(shard, header, body, boot);
    case Kind::kPut:
      return put(shard, header, body, boot);
    case Kind::kDrop:
      return drop(shard, header, body, boot);
    default:
      return reply_to(header, ReplyStatus::kMalformed, boot, "unknown kind of request");
  }
}

}  // namespace p2pkv
