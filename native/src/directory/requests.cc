#include "directory/requests.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "directory/location_columns.h"

namespace p2pkv {
namespace {

// Pages that are touched at once: 15 us of the pool's lock, then others have it.
constexpr size_t kTouchesATurn = 128;

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

std::string found_reply(const Header& header, uint64_t boot, const std::vector<uint8_t>& found,
                        const std::vector<Location>& locations) {
  std::string message;
  message.reserve(sizeof header + found.size() * (1 + sizeof(Location)));
  wire::append(message, wire::make_reply(header, ReplyStatus::kOk, boot, header.count));
  message.append(reinterpret_cast<const char*>(found.data()), found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] != 0) wire::append(message, locations[i]);
  }
  return message;
}

// Who asks says in the header's status how many holders of a key may be named; who does not know of it says
// 0.
std::string located_reply(Shard& shard, const Header& header, uint64_t boot, const std::vector<Key>& keys) {
  std::vector<uint8_t> n_named(keys.size());
  std::vector<Location> locations;
  locations.reserve(keys.size());
  const size_t most = std::clamp<size_t>(header.status, 1, kMostHolders);
  shard.get_holders(keys.data(), keys.size(), most, n_named.data(), &locations);
  std::string message;
  wire::append(message, wire::make_reply(header, ReplyStatus::kOk, boot, header.count));
  message.append(reinterpret_cast<const char*>(n_named.data()), n_named.size());
  append_columns(locations, &message);
  return message;
}

// As to LOCATE where one holder may be named: this node, of what it has.
std::string held_reply(Shard& shard, const Header& header, uint64_t boot, const std::vector<Key>& keys) {
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  shard.get_held(keys.data(), keys.size(), found.data(), locations.data());
  size_t n_held = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (found[i] != 0) locations[n_held++] = locations[i];
  }
  locations.resize(n_held);
  std::string message;
  wire::append(message, wire::make_reply(header, ReplyStatus::kOk, boot, header.count));
  message.append(reinterpret_cast<const char*>(found.data()), found.size());
  append_columns(locations, &message);
  return message;
}

std::string get(Shard& shard, const Header& header, const wire::Reader& body, uint64_t boot) {
  std::vector<Key> keys;
  if (!wire::take_records(body, header.count, &keys)) {
    return reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a get");
  }
  const auto kind = static_cast<Kind>(header.kind);
  if (kind == Kind::kLocate) return located_reply(shard, header, boot, keys);
  if (kind == Kind::kHeld) return held_reply(shard, header, boot, keys);
  const size_t n = keys.size();
  std::vector<uint8_t> found(n);
  std::vector<Location> locations(n);
  shard.get(keys.data(), n, found.data(), locations.data());
  return found_reply(header, boot, found, locations);
}

std::string put(Shard& shard, const Header& header, const wire::Reader& body, uint64_t boot) {
  std::vector<wire::PutEntry> entries;
  if (!wire::take_records(body, header.count, &entries)) {
    return reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a put");
  }
  const bool has_room = shard.put(entries.data(), entries.size(), shard.now()) == 0;
  return reply_to(header, has_room ? ReplyStatus::kOk : ReplyStatus::kFull, boot);
}

std::string check(Shard& shard, const Header& header, const wire::Reader& body, uint64_t boot) {
  std::vector<wire::CheckEntry> entries;
  if (!wire::take_records(body, header.count, &entries)) {
    return reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a check");
  }
  std::string kept(entries.size(), '\0');
  shard.check(entries.data(), entries.size(), reinterpret_cast<uint8_t*>(kept.data()));
  return reply_to(header, ReplyStatus::kOk, boot, kept);
}

std::string drop(Shard& shard, const Header& header, const wire::Reader& body, uint64_t boot) {
  std::vector<wire::DropEntry> entries;
  if (!wire::take_records(body, header.count, &entries)) {
    return reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a drop");
  }
  shard.drop(entries.data(), entries.size(), shard.now());
  return reply_to(header, ReplyStatus::kOk, boot);
}

}  // namespace

bool is_directory_request(Kind kind) {
  return kind == Kind::kGet || kind == Kind::kLocate || kind == Kind::kHeld || kind == Kind::kPut ||
         kind == Kind::kDrop || kind == Kind::kCheck;
}

std::string answer_directory_request(Shard& shard, const Header& header, wire::Reader body, uint64_t boot) {
  if (header.version != wire::kVersion) return reply_to(header, ReplyStatus::kVersion, boot);
  if (header.boot != 0 && header.boot != boot) return reply_to(header, ReplyStatus::kWrongBoot, boot);
  switch (static_cast<Kind>(header.kind)) {
    case Kind::kGet:
    case Kind::kLocate:
    case Kind::kHeld:
      return get(shard, header, body, boot);
    case Kind::kPut:
      return put(shard, header, body, boot);
    case Kind::kDrop:
      return drop(shard, header, body, boot);
    case Kind::kCheck:
      return check(shard, header, body, boot);
    default:
      return reply_to(header, ReplyStatus::kMalformed, boot, "unknown kind of request");
  }
}

void answer_promotion(Promoter* promoter, const Header& header, wire::Reader body, uint64_t boot, Asker asker,
                      std::function<void(std::string)> reply) {
  if (header.version != wire::kVersion) return reply(reply_to(header, ReplyStatus::kVersion, boot));
  if (header.boot != 0 && header.boot != boot) return reply(reply_to(header, ReplyStatus::kWrongBoot, boot));
  std::vector<wire::PromoteEntry> entries;
  if (!wire::take_records(body, header.count, &entries)) {
    return reply(reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a promote"));
  }
  const size_t n = entries.size();
  if (promoter == nullptr || n == 0) {
    return reply(found_reply(header, boot, std::vector<uint8_t>(n), std::vector<Location>(n)));
  }
  std::vector<Key> keys;
  keys.reserve(n);
  for (const wire::PromoteEntry& entry : entries) keys.push_back(entry.key);
  promoter->promote(
      std::move(keys), {std::min(entries[0].lease_ms / 1e3, asker.longest_lease), entries[0].lease, asker.id},
      Deadline::after(entries[0].answer_ms / 1e3),
      [header, boot, reply = std::move(reply)](std::vector<uint8_t> found, std::vector<Location> locations) {
        reply(found_reply(header, boot, found, locations));
      });
}

std::string answer_touches(const Touch& touch, TouchBudget* budget, const Header& header, wire::Reader body,
                           uint64_t boot, uint64_t* n_touched) {
  if (header.version != wire::kVersion) return reply_to(header, ReplyStatus::kVersion, boot);
  if (header.boot != 0 && header.boot != boot) return reply_to(header, ReplyStatus::kWrongBoot, boot);
  std::vector<Key> keys;
  if (!wire::take_records(body, header.count, &keys)) {
    return reply_to(header, ReplyStatus::kMalformed, boot, "wrong length of a touch");
  }
  if (!touch) return reply_to(header, ReplyStatus::kRefused, boot, "this node has no pages");
  // The first page is to be the very last to go, so it is touched last.
  for (size_t left = budget->take(keys.size()); left > 0;) {
    const size_t n = std::min(left, kTouchesATurn);
    left -= n;
    *n_touched += touch(keys.data() + left, n);
  }
  return reply_to(header, ReplyStatus::kOk, boot);
}

bool take_release(Promoter* promoter, const Header& header, wire::Reader body, uint64_t boot) {
  if (header.version != wire::kVersion || header.count != 1 || body.rest().size() != sizeof(uint64_t)) {
    return false;
  }
  // of an earlier boot: its pages are gone
  const bool is_ours = header.boot == 0 || header.boot == boot;
  if (promoter != nullptr && is_ours) promoter->release(*body.value<uint64_t>());
  return true;
}

}  // namespace p2pkv
