// Copies to and from devices, against the emulated driver: complete when they return, nobody's memory touched
// afterwards, nothing left behind.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "check.h"
#include "cuda/device.h"
#include "cuda/pieces.h"
#include "cuda/staging.h"
#include "fake_cuda/library.h"
#include "page/region.h"

using namespace p2pkv;
using namespace p2pkv::cuda;
using p2pkv::test::FakeCuda;
using p2pkv::test::OnDevice;

namespace {

constexpr uint64_t kPage = 65536;

struct Fixture {
  explicit Fixture(uint64_t staging_nbytes = 8 * kPage) : fake(FakeCuda::get()), before(fake.counts()) {
    fake.reset();
    device = Device::open(0, &error);
    CHECK(device != nullptr);
    staging = Staging::create(device, staging_nbytes, &error);
    CHECK(staging != nullptr);
  }
  // Everything is given back: streams, events, page-locked memory, the context.
  ~Fixture() {
    fake.reset();
    staging.reset();
    device.reset();
    const FakeCudaCounts after = fake.counts();
    CHECK_EQ(after.streams, before.streams);
    CHECK_EQ(after.events, before.events);
    CHECK_EQ(after.locked_bytes, before.locked_bytes);
    CHECK_EQ(after.contexts, before.contexts);
  }

  const FakeCuda& fake;
  const FakeCudaCounts before;
  std::shared_ptr<Device> device;
  std::shared_ptr<Staging> staging;
  std::string error;
};

bool all_are(const uint8_t* bytes, size_t n, uint8_t value) {
  for (size_t i = 0; i < n; ++i) {
    if (bytes[i] != value) return false;
  }
  return true;
}

}  // namespace

TEST(cuda_copies_there_and_back_are_complete_when_they_return) {
  Fixture f;
  f.fake.delay_copies(2000);
  OnDevice memory(4 * kPage);
  auto loan = f.staging->borrow(4 * kPage, 4 * kPage, Deadline::after(1));
  CHECK(bool(loan));
  for (uint64_t i = 0; i < 4 * kPage; ++i) loan.data()[i] = static_cast<uint8_t>(i % 251);
  // backwards, so that nothing can be merged
  std::vector<DeviceCopy> copies;
  for (uint64_t i = 4; i-- > 0;)
    copies.push_back({memory.address() + i * kPage, loan.data() + i * kPage, kPage});
  CHECK(f.device->copy(copies, Direction::kToDevice, &f.error) == CopyOutcome::kDone);
  CHECK(memory.bytes() == std::vector<uint8_t>(loan.data(), loan.data() + 4 * kPage));
  const auto there = memory.bytes();
  std::memset(loan.data(), 0, 4 * kPage);
  CHECK(f.device->copy(copies, Direction::kToHost, &f.error) == CopyOutcome::kDone);
  CHECK(there == std::vector<uint8_t>(loan.data(), loan.data() + 4 * kPage));
}

TEST(cuda_copies_that_nobody_waits_for_are_seen_to_be_incomplete) {
  Fixture f;
  OnDevice memory(4 * kPage);
  memory.fill(1);
  auto loan = f.staging->borrow(4 * kPage, 4 * kPage, Deadline::after(1));
  std::memset(loan.data(), 2, 4 * kPage);
  f.fake.lie_about_events(1);  // breaks the wait
  f.fake.hold(1, 0);
  const DeviceCopy copy{memory.address(), loan.data(), 4 * kPage};
  CHECK(f.device->copy({&copy, 1}, Direction::kToDevice, &f.error) == CopyOutcome::kDone);
  CHECK(all_are(memory.bytes().data(), 4 * kPage, 1));
  std::memset(loan.data(), 3, 4 * kPage);  // as the next round would
  f.fake.hold(0, 0);
  while (f.fake.counts().queued > 0) std::this_thread::yield();
  CHECK(all_are(memory.bytes().data(), 4 * kPage, 3));  // the next round's bytes
}

TEST(cuda_neighbours_go_as_one_copy) {
  Fixture f;
  OnDevice memory(8 * kPage);
  auto loan = f.staging->borrow(4 * kPage, 4 * kPage, Deadline::after(1));
  const FakeCudaCounts before = f.fake.counts();
  std::vector<DeviceCopy> copies;
  for (uint64_t i = 0; i < 4; ++i)
    copies.push_back({memory.address() + i * kPage, loan.data() + i * kPage, kPage});
  CHECK(f.device->copy(copies, Direction::kToDevice, &f.error) == CopyOutcome::kDone);
  CHECK_EQ(f.fake.counts().copies_to_device - before.copies_to_device, 1);
  CHECK_EQ(f.fake.counts().copied_bytes - before.copied_bytes, static_cast<int64_t>(4 * kPage));
}

TEST(cuda_addresses_are_told_apart) {
  Fixture f;
  OnDevice memory(3 * kPage, 1);
  DeviceRange range;
  CHECK(find_device_range(memory.address() + kPage, &range));
  CHECK_EQ(range.start, memory.address());
  CHECK_EQ(range.nbytes, 3 * kPage);
  CHECK_EQ(range.device, 1);
  CHECK(!find_device_range(reinterpret_cast<uint64_t>(&range), &range));
  CHECK(
      !find_device_range(reinterpret_cast<uint64_t>(f.staging->base()), &range));  // page-locked, and host's
  CHECK(!find_device_range(0, &range));
}

TEST(cuda_a_copy_that_is_refused_waits_for_those_before_it) {
  Fixture f;
  OnDevice memory(2 * kPage);
  auto loan = f.staging->borrow(2 * kPage, 2 * kPage, Deadline::after(1));
  std::memset(loan.data(), 7, 2 * kPage);
  f.fake.delay_copies(5000);
  const DeviceCopy copies[] = {{memory.address() + kPage, loan.data() + kPage, kPage},
                               {memory.address() + 2 * kPage, loan.data(), kPage}};  // outside
  CHECK(f.device->copy(copies, Direction::kToDevice, &f.error) == CopyOutcome::kFailed);
  CHECK(f.error.find("cuMemcpyHtoDAsync of 65536 bytes: CUDA_ERROR_INVALID_VALUE") != std::string::npos);
  CHECK_EQ(f.fake.counts().queued, 0);
  CHECK(all_are(memory.bytes().data() + kPage, kPage, 7));
  CHECK(!f.device->is_lost());
  CHECK(f.device->copy({copies, 1}, Direction::kToDevice, &f.error) == CopyOutcome::kDone);
}

TEST(cuda_a_lost_device_says_so_and_its_staging_is_never_lent_again) {
  const FakeCuda& fake = FakeCuda::get();
  std::string error;
  auto device = Device::open(1, &error);
  auto staging = Staging::create(device, 4 * kPage, &error);
  OnDevice memory(kPage, 1);
  auto loan = staging->borrow(kPage, kPage, Deadline::after(1));
  fake.hold(1, 0);
  std::thread loses([&] {
    while (fake.counts().queued == 0) std::this_thread::yield();
    fake.lose(1);
  });
  const DeviceCopy copy{memory.address(), loan.data(), kPage};
  CHECK(device->copy({&copy, 1}, Direction::kToHost, &error) == CopyOutcome::kLost);
  loses.join();
  CHECK(device->is_lost());
  CHECK(error.find("CUDA device 1: waiting for copies: CUDA_ERROR_LAUNCH_FAILED") != std::string::npos);
  loan.abandon();
  CHECK_EQ(staging->stats().lost_bytes, kPage);
  CHECK(!staging->borrow(4 * kPage, 4 * kPage, Deadline::after(0)));
  CHECK(bool(staging->borrow(2 * kPage, 2 * kPage, Deadline::after(0))));
  CHECK(device->copy({&copy, 1}, Direction::kToHost, &error) == CopyOutcome::kFailed);  // at once
  CHECK(error.find("was lost by an earlier error") != std::string::npos);
  fake.reset();
}

TEST(cuda_shared_staging_is_seen_by_who_maps_it) {
  Fixture f;
  std::string error;
  const auto staging = Staging::create_shared(f.device, Staging::kGranule + 1, &error);
  CHECK(staging != nullptr);
  CHECK_EQ(staging->nbytes(), 2 * Staging::kGranule);
  CHECK_EQ(f.staging->fd(), -1);
  const auto mapped = p2pkv::ReadOnlyMapping::map(staging->fd(), staging->nbytes(), &error);
  CHECK(mapped != nullptr);
  auto loan = staging->borrow(Staging::kGranule, Staging::kGranule, Deadline::after(0));
  std::memset(loan.data(), 7, Staging::kGranule);
  CHECK_EQ(mapped->base()[loan.data() - staging->base()], 7);
}

TEST(cuda_staging_waits_for_room_in_the_order_of_asking_and_until_the_deadline) {
  Fixture f;
  auto all = f.staging->borrow(8 * kPage, 8 * kPage, Deadline::after(1));
  CHECK(bool(all));
  CHECK(!f.staging->borrow(kPage, kPage, Deadline::after(0.01)));
  CHECK(!f.staging->borrow(9 * kPage, 9 * kPage, Deadline::after(100)));  // never: at once
  std::atomic<bool> has_room = false;
  std::thread waits([&] {
    auto loan = f.staging->borrow(8 * kPage, 8 * kPage, Deadline::after(60));
    has_room = bool(loan);
  });
  all.release();
  waits.join();
  CHECK(has_room);
  CHECK_EQ(f.staging->stats().used_bytes, 0u);
}

TEST(cuda_staging_gives_half_at_most_unless_more_is_needed) {
  Fixture f;
  auto half = f.staging->borrow(kPage, 100 * kPage, Deadline::after(1));
  CHECK_EQ(half.nbytes(), 4 * kPage);
  auto more = f.staging->borrow(kPage, 100 * kPage, Deadline::after(1));
  CHECK_EQ(more.nbytes(), 4 * kPage);
  half.release();
  more.release();
  auto whole = f.staging->borrow(5 * kPage, 5 * kPage, Deadline::after(1));
  CHECK_EQ(whole.nbytes(), 5 * kPage);
  auto rest = f.staging->borrow(kPage, 100 * kPage, Deadline::after(1));
  CHECK_EQ(rest.nbytes(), 3 * kPage);
}

TEST(cuda_waits_for_a_stream_until_the_deadline_and_no_longer) {
  Fixture f;
  OnDevice memory(kPage);
  memory.fill(1);
  const uint64_t stream = f.fake.stream(0);
  f.fake.hold(0, 1);
  f.fake.launch_fill(stream, memory.address(), 2, kPage, 1000);
  CHECK(f.device->wait_for(stream, Deadline::after(0.01), &f.error) == StreamOutcome::kTimedOut);
  f.fake.hold(0, 0);
  CHECK(f.device->wait_for(stream, Deadline::after(60), &f.error) == StreamOutcome::kDone);
  CHECK(all_are(memory.bytes().data(), kPage, 2));
  f.fake.launch_fill(1, memory.address(), 3, kPage, 20000);
  CHECK(f.device->wait_for(0, Deadline::after(60), &f.error) == StreamOutcome::kDone);
  CHECK(all_are(memory.bytes().data(), kPage, 3));
  CHECK(f.device->wait_for(0xdead, Deadline::after(60), &f.error) == StreamOutcome::kFailed);
  CHECK(f.error.find("cuStreamGetCtx: CUDA_ERROR_INVALID_HANDLE") != std::string::npos);
  f.fake.destroy_stream(stream);
}

TEST(cuda_what_the_driver_refuses_at_the_start_is_said_and_leaves_nothing) {
  const FakeCuda& fake = FakeCuda::get();
  const FakeCudaCounts before = fake.counts();
  std::string error;
  fake.fail("cuStreamCreate", 2, 2, 0);
  CHECK(!Device::open(0, &error));
  CHECK(error.find("CUDA device 0: cuStreamCreate: CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
  CHECK(!Device::open(7, &error));
  auto device = Device::open(0, &error);
  fake.fail("cuMemHostRegister", 1, 2, 0);
  CHECK(!Staging::create(device, kPage, &error));
  CHECK(error.find("cuMemHostRegister of 65536 bytes: CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
  fake.fail("cuEventCreate", 1, 2, 0);
  const DeviceCopy copy{0, nullptr, 1};
  CHECK(device->copy({&copy, 1}, Direction::kToHost, &error) == CopyOutcome::kFailed);
  device.reset();
  CHECK_EQ(fake.counts().contexts, before.contexts);
  CHECK_EQ(fake.counts().streams, before.streams);
  CHECK_EQ(fake.counts().events, before.events);
}

TEST(cuda_many_threads_copy_at_once_and_every_byte_is_theirs) {
  Fixture f(16 * kPage);
  OnDevice memory(8 * kPage);
  std::vector<std::thread> threads;
  std::atomic<int> n_wrong = 0;
  for (uint8_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::string error;
      for (uint8_t round = 0; round < 20; ++round) {
        auto loan = f.staging->borrow(2 * kPage, 2 * kPage, Deadline::after(60));
        const auto value = static_cast<uint8_t>(t * 20 + round);
        std::memset(loan.data(), value, kPage);
        const DeviceCopy there{memory.address() + t * kPage, loan.data(), kPage};
        const DeviceCopy back{memory.address() + t * kPage, loan.data() + kPage, kPage};
        if (f.device->copy({&there, 1}, Direction::kToDevice, &error) != CopyOutcome::kDone ||
            f.device->copy({&back, 1}, Direction::kToHost, &error) != CopyOutcome::kDone ||
            !all_are(loan.data() + kPage, kPage, value)) {
          ++n_wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(n_wrong.load(), 0);
}

TEST(cuda_pieces_go_to_the_devices_they_are_of_and_only_if_chosen) {
  Fixture f;
  std::string error;
  auto other = Device::open(1, &error);
  OnDevice here(2 * kPage, 0), there(2 * kPage, 1);
  here.fill(9);
  there.fill(9);
  auto loan = f.staging->borrow(4 * kPage, 4 * kPage, Deadline::after(1));
  std::vector<Piece> on_device, on_host;
  for (uint64_t page = 0; page < 2; ++page) {
    on_device.push_back({static_cast<int64_t>(here.address() + page * kPage), kPage});
    on_device.push_back({static_cast<int64_t>(there.address() + page * kPage), kPage});
  }
  for (uint64_t i = 0; i < 4; ++i) {
    on_host.push_back({reinterpret_cast<int64_t>(loan.data() + i * kPage), kPage});
    std::memset(loan.data() + i * kPage, static_cast<int>(i), kPage);
  }
  const int32_t device_of[] = {0, 1, 0, 1};
  const uint8_t chosen[] = {0, 1};
  const PieceCopies copies{2, 2, on_device.data(), on_host.data(), device_of, chosen};
  CHECK(begin_copy_pieces({f.device, other}, copies, Direction::kToDevice).wait(&error) ==
        CopyOutcome::kDone);
  CHECK(all_are(here.bytes().data(), kPage, 9) && all_are(here.bytes().data() + kPage, kPage, 2));
  CHECK(all_are(there.bytes().data(), kPage, 9) && all_are(there.bytes().data() + kPage, kPage, 3));
}

TEST(cuda_a_forked_child_lets_go_without_calling_the_driver) {
  Fixture f;
  const pid_t child = fork();
  if (child == 0) {
    f.staging.reset();
    f.device.reset();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(cuda_what_a_forked_child_has_where_the_staging_was_is_the_childs) {
  Fixture f;
  f.staging.reset();
  f.staging = Staging::create_shared(f.device, 2 * kPage, &f.error);
  CHECK(f.staging != nullptr);
  const pid_t child = fork();
  if (child == 0) {
    uint8_t* const at = f.staging->base();
    if (mmap(at, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1,
             0) != at)
      _exit(1);
    f.staging.reset();
    std::memset(at, 1, 2 * kPage);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(cuda_drivers_are_described) {
  FakeCuda::get();
  DriverInfo info;
  std::string error;
  CHECK(describe_driver(&info, &error));
  CHECK_EQ(info.version, 12080);
  CHECK(info.devices == (std::vector<std::string>{"emulated device 0", "emulated device 1"}));
}

TEST(cuda_memory_that_two_have_locked_stays_so_until_both_have_let_go) {
  Fixture f;
  const int64_t before = f.fake.counts().locked_bytes;
  std::vector<uint8_t> memory(8192);
  CHECK(f.device->lock_memory(memory.data(), memory.size(), &f.error));
  CHECK(f.device->lock_memory(memory.data(), memory.size(), &f.error));
  // Another length is another matter, which the driver refuses.
  CHECK(!f.device->lock_memory(memory.data(), memory.size() / 2, &f.error));
  uint64_t address = 0;
  CHECK(f.device->find_address(memory.data(), &address, &f.error) && address != 0);
  f.device->unlock_memory(memory.data());
  CHECK_EQ(f.fake.counts().locked_bytes, before + 8192);
  f.device->unlock_memory(memory.data());
  CHECK_EQ(f.fake.counts().locked_bytes, before);
  CHECK(!f.device->find_address(memory.data(), &address, &f.error));
}
