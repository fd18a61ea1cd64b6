// Small pieces that a kernel copies, against the emulated driver: the same bytes as by the copy engines, and
// by those wherever there is no kernel to be had.
#include <map>
#include <random>

#include "check.h"
#include "cuda/device.h"
#include "fake_cuda/library.h"

using namespace p2pkv;
using namespace p2pkv::cuda;
using p2pkv::test::FakeCuda;
using p2pkv::test::OnDevice;

namespace {

constexpr uint64_t kNbytes = 4 << 20;
constexpr int kNoBinary = 209;  // CUDA_ERROR_NO_BINARY_FOR_GPU

struct Fixture {
  Fixture() : fake(FakeCuda::get()), before(fake.counts()), host(kNbytes) {
    fake.reset();
    device = Device::open(0, &error);
    CHECK(device != nullptr);
    CHECK(device->lock_memory(host.data(), host.size(), &error));
    std::mt19937 random(7);
    for (uint8_t& byte : host) byte = static_cast<uint8_t>(random());
  }
  ~Fixture() {
    fake.reset();
    device->unlock_memory(host.data());
    device.reset();
    const FakeCudaCounts after = fake.counts();
    CHECK_EQ(after.modules, before.modules);
    CHECK_EQ(after.events, before.events);
    CHECK_EQ(after.streams, before.streams);
  }
  int64_t n_slices() const { return fake.counts().kernel_slices - before.kernel_slices; }

  const FakeCuda& fake;
  const FakeCudaCounts before;
  std::vector<uint8_t> host;
  std::shared_ptr<Device> device;
  std::string error;
};

// Pieces of one length each `stride` bytes on the device, and one after the other on the host.
std::vector<DeviceCopy> pieces_of(Fixture& f, const OnDevice& memory, uint64_t nbytes, uint64_t stride) {
  std::vector<DeviceCopy> copies;
  for (uint64_t at = 0, i = 0; at + nbytes <= kNbytes && (i + 1) * stride <= kNbytes; at += nbytes, ++i)
    copies.push_back({memory.address() + i * stride, f.host.data() + at, nbytes});
  return copies;
}

bool is_there(const std::vector<DeviceCopy>& copies, const OnDevice& memory) {
  const std::vector<uint8_t> there = memory.bytes();
  for (const DeviceCopy& copy : copies) {
    if (std::memcmp(&there[copy.device - memory.address()], copy.host, copy.nbytes) != 0) return false;
  }
  return true;
}

}  // namespace

TEST(piece_kernel_copies_small_pieces_both_ways) {
  Fixture f;
  CHECK(f.device->lend_blocks(4, &f.error));
  OnDevice memory(kNbytes);
  const auto copies = pieces_of(f, memory, 1024, 2048);  // 2,048 slices: a launch of few, and two
  CHECK(f.device->copy(copies, Direction::kToDevice, &f.error, HostMemory::kLocked) == CopyOutcome::kDone);
  CHECK_EQ(f.n_slices(), 2048);
  CHECK_EQ(f.fake.counts().launches - f.before.launches, 3);
  CHECK(is_there(copies, memory));
  const std::vector<uint8_t> sent = f.host;
  std::fill(f.host.begin(), f.host.end(), uint8_t{0});
  CHECK(f.device->copy(copies, Direction::kToHost, &f.error, HostMemory::kLocked) == CopyOutcome::kDone);
  CHECK(std::equal(f.host.begin(), f.host.begin() + 2048 * 1024, sent.begin()));
  CHECK_EQ(f.n_slices(), 4096);
}

// Large ones, ones that are not aligned and ones whose memory may not be locked are the engines' in any case.
TEST(piece_kernel_leaves_to_the_engines_what_it_is_no_good_for) {
  Fixture f;
  CHECK(f.device->lend_blocks(4, &f.error));
  OnDevice memory(kNbytes);
  const std::vector<DeviceCopy> copies = {
      {memory.address(), f.host.data(), 256 << 10},
      {memory.address() + (512 << 10) + 8, f.host.data() + (512 << 10), 4096},
      {memory.address() + (1 << 20), f.host.data() + (1 << 20) + 1, 4096},
      {memory.address() + (2 << 20), f.host.data() + (2 << 20), 4100}};
  CHECK(f.device->copy(copies, Direction::kToDevice, &f.error, HostMemory::kLocked) == CopyOutcome::kDone);
  CHECK(is_there(copies, memory));
  const auto small = pieces_of(f, memory, 1024, 2048);
  CHECK(f.device->copy(small, Direction::kToDevice, &f.error) == CopyOutcome::kDone);
  CHECK(is_there(small, memory));
  CHECK_EQ(f.n_slices(), 0);
}

// Larger ones as well, the more blocks there are: there is no PCIe to wait for.
TEST(piece_kernel_copies_within_its_device) {
  Fixture f;
  CHECK(f.device->lend_blocks(4, &f.error));
  OnDevice memory(kNbytes), other(kNbytes);
  const DeviceCopy all{memory.address(), f.host.data(), kNbytes};
  CHECK(f.device->copy({&all, 1}, Direction::kToDevice, &f.error) == CopyOutcome::kDone);
  std::vector<InnerCopy> copies;
  std::vector<uint8_t> wanted = other.bytes();
  uint64_t at = 0;
  for (const uint64_t nbytes : {uint64_t{1024}, uint64_t{256 << 10}, uint64_t{1 << 20}, uint64_t{4100}}) {
    copies.push_back({other.address() + at, memory.address() + at, nbytes});
    std::memcpy(&wanted[at], &f.host[at], nbytes);
    at += nbytes + 4096;
  }
  CHECK(f.device->copy_within(copies, InnerMemory::kOwn, &f.error) == CopyOutcome::kDone);
  CHECK(other.bytes() == wanted);
  CHECK_EQ(f.n_slices(), 1 + 32);  // not of what is too large, or crooked
  CHECK(f.device->lend_blocks(16, &f.error));
  CHECK(f.device->copy_within(copies, InnerMemory::kOwn, &f.error) == CopyOutcome::kDone);
  CHECK_EQ(f.n_slices(), 2 * (1 + 32) + 128);
  CHECK(f.device->copy_within(copies, InnerMemory::kAny, &f.error) == CopyOutcome::kDone);
  CHECK_EQ(f.n_slices(), 2 * (1 + 32) + 128);
}

TEST(piece_kernel_is_used_only_where_blocks_were_lent) {
  Fixture f;
  OnDevice memory(kNbytes);
  const auto copies = pieces_of(f, memory, 8192, 16384);
  CHECK(f.device->copy(copies, Direction::kToDevice, &f.error, HostMemory::kLocked) == CopyOutcome::kDone);
  CHECK(is_there(copies, memory));
  CHECK_EQ(f.n_slices(), 0);
}

// Pieces of every kind in one call, in pieces of random lengths at random places: every byte arrives, and
// none beside them is touched.
TEST(piece_kernel_and_engines_share_a_call) {
  Fixture f;
  CHECK(f.device->lend_blocks(2, &f.error));
  std::mt19937 random(11);
  for (int round = 0; round < 8; ++round) {
    OnDevice memory(kNbytes);
    std::vector<uint8_t> wanted = memory.bytes();
    std::vector<DeviceCopy> copies;
    for (uint64_t at = 0; at < kNbytes;) {
      const uint64_t crooked = random() % 4 == 0 ? random() % 16 : 0;
      uint64_t nbytes = random() % 8 == 0 ? random() % (300 << 10) : random() % (20 << 10);
      if (random() % 4 != 0) nbytes = nbytes / 16 * 16;
      nbytes = std::min(nbytes, kNbytes - at - std::min(crooked, kNbytes - at));
      const uint64_t from = random() % (kNbytes - nbytes + 1) / 16 * 16;
      if (nbytes > 0) {
        copies.push_back({memory.address() + at + crooked, f.host.data() + from, nbytes});
        std::memcpy(&wanted[at + crooked], &f.host[from], nbytes);
      }
      at += (nbytes + crooked + 15) / 16 * 16 + 16 * (random() % 3);
    }
    CHECK(f.device->copy(copies, Direction::kToDevice, &f.error, HostMemory::kLocked) == CopyOutcome::kDone);
    CHECK(memory.bytes() == wanted);
  }
  CHECK(f.n_slices() > 0);
}

TEST(piece_kernel_that_can_not_be_loaded_is_said_and_changes_nothing) {
  for (const auto& [call, result] : std::map<std::string, int>{
           {"cuModuleLoadData", kNoBinary}, {"cuModuleGetFunction", 500}, {"cuDeviceGetAttribute", 1}}) {
    Fixture f;
    f.fake.fail(call.c_str(), 1, result, 0);
    CHECK(!f.device->lend_blocks(4, &f.error));
    CHECK(f.error.find("CUDA device 0: ") == 0);
    OnDevice memory(kNbytes);
    const auto copies = pieces_of(f, memory, 8192, 16384);
    CHECK(f.device->copy(copies, Direction::kToDevice, &f.error, HostMemory::kLocked) == CopyOutcome::kDone);
    CHECK(is_there(copies, memory));
    CHECK_EQ(f.n_slices(), 0);
    CHECK(f.device->lend_blocks(4, &f.error));  // a refusal is not for ever
  }
}

TEST(piece_kernel_whose_launch_is_refused_leaves_its_pieces_to_the_engines) {
  Fixture f;
  CHECK(f.device->lend_blocks(4, &f.error));
  f.fake.fail("cuLaunchKernel", 1, 701, 0);
  OnDevice memory(kNbytes);
  const auto copies = pieces_of(f, memory, 8192, 16384);
  CHECK(f.device->copy(copies, Direction::kToDevice, &f.error, HostMemory::kLocked) == CopyOutcome::kDone);
  CHECK(is_there(copies, memory));
}
