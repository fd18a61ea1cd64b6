// Device memory over verbs, call by call, on an emulated driver and emulated cards: how it is registered,
// what is done where that can't be had or can't be believed, and that what has arrived is there.
#ifndef P2PKV_WITHOUT_VERBS

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "fake_ibverbs/library.h"
#include "transport_pair.h"
#include "transports/transports.h"

using namespace p2pkv;
using p2pkv::test::FakeCuda;
using p2pkv::test::FakeIbverbs;
using p2pkv::test::OnDevice;

namespace {

constexpr int kNotSupported = 801;
// Neither at the allocation's start nor at a page's, and not whole pages.
constexpr uint64_t kBefore = 3 * 4096 + 512, kBytes = 300'000 + 7, kAllocated = kBefore + kBytes + 5000;

std::shared_ptr<Transport> make_transport(bool reaches_devices = true) {
  FakeIbverbs::get().reset();
  FakeCuda::get().reset();
  std::string error;
  const auto transport = make_verbs_transport({{}, P2PKV_FAKE_IBVERBS, reaches_devices}, &error);
  CHECK(transport);
  return transport;
}

size_t n_descriptors() {
  const auto files = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

// Part of an allocation, of bytes that are nowhere else twice in a row.
struct Rows {
  explicit Rows(uint32_t seed) {
    std::vector<uint8_t> bytes(kAllocated);
    for (size_t i = 0; i < bytes.size(); ++i) {
      seed = seed * 1664525 + 1013904223;
      bytes[i] = static_cast<uint8_t>(seed >> 24);
    }
    FakeCuda::get().write(memory.address(), bytes.data(), bytes.size());
  }
  uint64_t address() const { return memory.address() + kBefore; }
  std::shared_ptr<MemoryRegion> register_with(Transport& transport, bool readable, std::string* error) const {
    return transport.register_memory(reinterpret_cast<uint8_t*>(address()), kBytes, -1, readable, error);
  }

  const OnDevice memory{kAllocated};
};

bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(gpudirect_rows_are_there_as_soon_as_they_are_ok) {
  const auto owner = make_transport(), reader = make_transport();
  const Rows source(1), target(2);
  std::string error;
  const auto region = source.register_with(*owner, true, &error);
  const auto local = target.register_with(*reader, false, &error);
  CHECK(region && local);
  if (!region || !local) return;
  const auto endpoint = reader->open();
  CHECK(endpoint->bind(owner->accept(endpoint->describe(), &error), &error));
  const auto remote = endpoint->attach(region->describe(), &error);
  const auto held_before = FakeIbverbs::get().counts().held_back;
  auto expected = target.memory.bytes();
  const auto given = source.memory.bytes();
  // In one batch, in several, and a byte alone.
  const std::vector<std::vector<Span>> batches{
      {{0, 1000, 70'000}, {70'000, 150'001, 130'000}}, {{250'000, 4, 40'000}}, {{300'001, 300'006, 1}}};
  for (const auto& spans : batches) {
    const auto transfer = endpoint->read(local, remote, spans, {});
    transfer->wait(20);
    for (const Status status : transfer->statuses()) CHECK(status == Status::kOk);
    for (const Span& span : spans)
      std::copy_n(given.begin() + static_cast<int64_t>(kBefore) + span.remote, span.length,
                  expected.begin() + static_cast<int64_t>(kBefore) + span.local);
    CHECK(target.memory.bytes() == expected);
  }
  CHECK(FakeIbverbs::get().counts().held_back > held_before);
  endpoint->close();
}

TEST(gpudirect_registers_the_allocation_once_for_all_cards_and_gives_all_back) {
  const auto before = FakeIbverbs::get().counts();
  {
    const auto transport = make_transport();
    const Rows rows(3);
    const auto bytes = rows.memory.bytes();
    const auto n_files = n_descriptors();
    const FakeCudaCounts driver = FakeCuda::get().counts();
    const auto cards = FakeIbverbs::get().counts();
    std::string error;
    const auto region = rows.register_with(*transport, false, &error);
    CHECK(region);
    CHECK_EQ(FakeCuda::get().counts().exports, driver.exports + 1);
    CHECK_EQ(FakeIbverbs::get().counts().dmabufs, cards.dmabufs + 2);
    CHECK_EQ(FakeIbverbs::get().counts().read_from_device, cards.read_from_device + 4);  // both ends, by both
    CHECK_EQ(n_descriptors(), n_files);
    CHECK(rows.memory.bytes() == bytes);  // the pattern is gone
    CHECK_EQ(FakeCuda::get().counts().locked_bytes, driver.locked_bytes);
    CHECK_EQ(FakeIbverbs::get().counts().regions, cards.regions + 2);
    region->close();
    CHECK_EQ(FakeIbverbs::get().counts().queue_pairs, cards.queue_pairs);
    transport->close();
  }
  CHECK_EQ(FakeIbverbs::get().counts().regions, before.regions);
  CHECK_EQ(FakeIbverbs::get().counts().queue_pairs, before.queue_pairs);
}

TEST(gpudirect_takes_the_next_way_where_one_is_refused) {
  const auto transport = make_transport();
  const Rows rows(4);
  const FakeIbverbs& cards = FakeIbverbs::get();
  std::string error;
  auto driver = FakeCuda::get().counts();
  cards.refuse(FAKE_IBVERBS_DMABUF, 1, EOPNOTSUPP);
  CHECK(rows.register_with(*transport, false, &error));
  CHECK_EQ(FakeCuda::get().counts().exports_over_pcie, driver.exports_over_pcie + 1);

  const auto before = cards.counts();
  FakeCuda::get().fail("cuMemGetHandleForAddressRange", 1, kNotSupported, 1);
  cards.refuse(FAKE_IBVERBS_ADDRESS, 0, 0);
  CHECK(rows.register_with(*transport, false, &error));
  CHECK_EQ(cards.counts().addresses, before.addresses + 2);
  CHECK_EQ(cards.counts().dmabufs, before.dmabufs);
}

TEST(gpudirect_that_no_way_gives_says_why_of_each_and_changes_nothing) {
  const auto transport = make_transport();
  const Rows rows(5);
  const auto bytes = rows.memory.bytes();
  const auto n_files = n_descriptors();
  const auto before = FakeIbverbs::get().counts();
  std::string error;
  FakeIbverbs::get().refuse(FAKE_IBVERBS_DMABUF, -1, EOPNOTSUPP);
  CHECK(!rows.register_with(*transport, true, &error));
  CHECK(has(error, "as a dmabuf: ibv_reg_dmabuf_mr on emulated0:1: Operation not supported"));
  CHECK(has(error, "over PCIe: ") && has(error, "by its address: ibv_reg_mr on emulated0:1: Bad address"));
  CHECK(has(error, "nvidia-peermem"));
  CHECK(rows.memory.bytes() == bytes);
  CHECK_EQ(n_descriptors(), n_files);
  CHECK_EQ(FakeIbverbs::get().counts().regions, before.regions);
}

TEST(gpudirect_that_reads_other_bytes_is_not_believed) {
  const auto transport = make_transport();
  const Rows rows(6);
  const auto bytes = rows.memory.bytes();
  const auto before = FakeIbverbs::get().counts();
  std::string error;
  // The second card's region alone is of other memory.
  FakeIbverbs::get().refuse(FAKE_IBVERBS_ADDRESS, 0, 0);
  FakeIbverbs::get().deceive(FAKE_IBVERBS_DMABUF, -1);
  FakeIbverbs::get().deceive(FAKE_IBVERBS_ADDRESS, -1);
  CHECK(!rows.register_with(*transport, true, &error));
  CHECK(has(error, "as a dmabuf: emulated0:1 reads other bytes than are in the memory"));
  CHECK(has(error, "by its address: emulated0:1 reads other bytes"));
  CHECK(rows.memory.bytes() == bytes);
  CHECK_EQ(FakeIbverbs::get().counts().regions, before.regions);
  FakeIbverbs::get().deceive(FAKE_IBVERBS_ADDRESS, 0);
  CHECK(rows.register_with(*transport, true, &error));
}

TEST(gpudirect_that_was_not_asked_for_knows_no_devices) {
  CHECK(!make_transport(false)->reads_devices());
  CHECK(make_transport()->reads_devices());
}

TEST(gpudirect_of_some_bytes_alone) {
  const auto transport = make_transport();
  for (const uint64_t nbytes : {1, 63, 64, 100, 127, 128}) {
    const OnDevice memory(200);
    const auto bytes = memory.bytes();
    std::string error;
    CHECK(transport->register_memory(reinterpret_cast<uint8_t*>(memory.address()), nbytes, -1, true, &error));
    CHECK(memory.bytes() == bytes);
  }
}

TEST(verbs_reads_pages_of_host_memory_over_emulated_cards) {
  test::TransportPair<64 * 1024, 48> pair(make_transport(), make_transport());
  const auto endpoint = pair.connect();
  const auto transfer = pair.read(*endpoint, std::vector<uint64_t>(48, 2));
  transfer->wait(20);
  for (uint64_t page = 0; page < 48; ++page)
    CHECK(transfer->statuses()[page] == Status::kOk && pair.holds(page, 2));
  pair.rewrite(7, 4);
  const auto stale = pair.read(*endpoint, std::vector<uint64_t>(48, 2));
  stale->wait(20);
  for (uint64_t page = 0; page < 48; ++page)
    CHECK(stale->statuses()[page] == (page == 7 ? Status::kRejected : Status::kOk));
  endpoint->close();
}

#endif
