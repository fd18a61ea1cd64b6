// A node says that it has its own pages in memory, and nobody else's.
#include <string>
#include <vector>

#include "cache/holdings.h"
#include "directory/location_columns.h"
#include "directory/requests.h"
#include "pool_calls.h"

namespace {

namespace wire = p2pkv::wire;
using p2pkv::Guests;
using p2pkv::Shard;

constexpr uint64_t kBoot = 8;

struct Held {
  std::vector<uint8_t> found;
  std::vector<Location> locations;
};

// Returns what the node with this shard answers to HELD.
Held held(Shard& shard, const std::vector<Key>& keys) {
  const wire::Header header{wire::kMagic,
                            wire::kVersion,
                            static_cast<uint16_t>(wire::Kind::kHeld),
                            1,
                            kBoot,
                            static_cast<uint32_t>(keys.size()),
                            0};
  const std::string_view body(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(Key));
  const std::string reply = p2pkv::answer_directory_request(shard, header, wire::Reader(body), kBoot);
  Held said;
  const std::string_view rest = std::string_view(reply).substr(sizeof header);
  size_t n_found = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    said.found.push_back(static_cast<uint8_t>(rest[i]));
    n_found += said.found.back();
  }
  CHECK(p2pkv::take_columns(rest.substr(keys.size()), n_found, &said.locations));
  return said;
}

}  // namespace

TEST(holdings_are_the_pages_of_the_pool_and_no_guests) {
  const auto pool = make_pool(64);
  const auto guests = std::make_shared<Guests>(pool, std::make_shared<p2pkv::NamespaceEpochs>());
  Shard shard(1024);
  const std::vector<Key> keys{key_of(1), key_of(2), key_of(3)};
  CHECK_EQ(held(shard, keys).locations.size(), 0U);  // nobody has said yet what the node has
  const Stored own = publish(*pool, 1, kGranule);
  constexpr uint64_t kSource = 77, kLog = 9;
  guests->followed(kSource, {kLog, 1});
  const Bytes bytes = bytes_of(2, kGranule);
  const auto address = reinterpret_cast<int64_t>(bytes.data());
  const p2pkv::Origin origin{kSource, {kLog, 1}};
  Location guest{};
  guest.length = kGranule;
  guest.checksum = p2pkv::checksum(bytes.data(), bytes.size());
  p2pkv::StoreStatus status;
  guests->store(&keys[1], &address, &origin, 1, 0, &guest, &status);
  CHECK(status == p2pkv::StoreStatus::kStored);
  shard.serve_held(p2pkv::holdings_of(pool, guests, {}));
  const Held said = held(shard, keys);
  CHECK(said.found == std::vector<uint8_t>({1, 0, 0}));
  CHECK_EQ(said.locations.size(), 1U);
  CHECK_EQ(said.locations[0].generation, own.location.generation);
  CHECK_EQ(said.locations[0].owner, own.location.owner);
  const auto behind = [](const Key*, size_t n, uint8_t* found, Location* locations) {
    CHECK(n == 3 && found[0] == 1 && found[1] == 0 && found[2] == 0);
    found[2] = 1;
    locations[2] = Location{};
    locations[2].owner = 5;
  };
  shard.serve_held(p2pkv::holdings_of(pool, guests, behind));
  const Held with_more = held(shard, keys);
  CHECK(with_more.found == std::vector<uint8_t>({1, 0, 1}));
  CHECK_EQ(with_more.locations[1].owner, 5U);
  shard.serve_held({});
  CHECK_EQ(held(shard, keys).locations.size(), 0U);
}
