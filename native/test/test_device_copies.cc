// Copies of many pieces: gathered into few launches where the driver can, under way while others go on, and
// never left to themselves.
#include <atomic>
#include <thread>

#include "check.h"
#include "cuda/device.h"
#include "cuda/staging.h"
#include "fake_cuda/library.h"

using namespace p2pkv;
using namespace p2pkv::cuda;
using p2pkv::test::FakeCuda;
using p2pkv::test::OnDevice;

namespace {

constexpr uint64_t kPiece = 4096;
constexpr int kOutOfMemory = 2, kNotSupported = 801;

// Pieces whose neighbours here are not neighbours there, so that none is one with another.
struct Scattered {
  explicit Scattered(size_t n)
      : fake(FakeCuda::get()), n(n), memory(2 * n * kPiece), device(open()), staging(stage(device, n)) {
    for (size_t i = 0; i < n; ++i)
      copies.push_back({memory.address() + 2 * i * kPiece, staging->base() + i * kPiece, kPiece});
    for (size_t i = 0; i < n * kPiece; ++i) staging->base()[i] = byte(i);
  }
  ~Scattered() { fake.reset(); }

  static std::shared_ptr<Device> open() {
    FakeCuda::get().reset();
    std::string error;
    return Device::open(0, &error);
  }
  static std::shared_ptr<Staging> stage(const std::shared_ptr<Device>& device, size_t n) {
    std::string error;
    return Staging::create(device, n * kPiece, &error);
  }
  static uint8_t byte(size_t i) { return static_cast<uint8_t>((i / kPiece) * 7 + i % 251); }

  bool is_right_there() const {
    const auto there = memory.bytes();
    for (size_t i = 0; i < n * kPiece; ++i) {
      if (there[i / kPiece * 2 * kPiece + i % kPiece] != byte(i)) return false;
    }
    return true;
  }
  bool is_right_here() const {
    for (size_t i = 0; i < n * kPiece; ++i) {
      if (staging->base()[i] != byte(i)) return false;
    }
    return true;
  }
  CopyOutcome copy(Direction direction) { return device->copy(copies, direction, &error); }
  int64_t launches() const { return fake.counts().launches; }

  const FakeCuda& fake;
  const size_t n;
  OnDevice memory;
  const std::shared_ptr<Device> device;
  const std::shared_ptr<Staging> staging;
  std::vector<DeviceCopy> copies;
  std::string error;
};

}  // namespace

TEST(device_copies_of_many_pieces_are_few_launches) {
  for (const auto& [n, launches] : {std::pair<size_t, int64_t>{300, 1}, {1024, 1}, {1025, 2}, {2500, 3}}) {
    Scattered s(n);
    CHECK(s.device->gathers_copies());
    const int64_t before = s.launches();
    CHECK(s.copy(Direction::kToDevice) == CopyOutcome::kDone);
    CHECK_EQ(s.launches() - before, launches);
    CHECK(s.is_right_there());
    std::memset(s.staging->base(), 0, n * kPiece);
    CHECK(s.copy(Direction::kToHost) == CopyOutcome::kDone);
    CHECK_EQ(s.launches() - before, 2 * launches);
    CHECK(s.is_right_here());
  }
}

TEST(device_copies_between_devices_are_gathered_too) {
  Scattered s(300);
  CHECK(s.copy(Direction::kToDevice) == CopyOutcome::kDone);
  OnDevice other(2 * s.n * kPiece);
  std::vector<InnerCopy> inner;
  for (size_t i = 0; i < s.n; ++i)
    inner.push_back({other.address() + 2 * i * kPiece, s.memory.address() + 2 * i * kPiece, kPiece});
  const int64_t before = s.launches();
  CHECK(s.device->copy_within(inner, InnerMemory::kAny, &s.error) == CopyOutcome::kDone);
  CHECK_EQ(s.launches() - before, 1);
  const auto here = s.memory.bytes(), there = other.bytes();
  for (size_t i = 0; i < s.n; ++i)
    CHECK(std::equal(&here[2 * i * kPiece], &here[(2 * i + 1) * kPiece], &there[2 * i * kPiece]));
}

TEST(device_copies_that_the_driver_refuses_together_are_made_one_by_one_from_then_on) {
  Scattered s(300);
  s.fake.fail("cuMemcpyBatchAsync", 1, kNotSupported, 0);
  const int64_t before = s.launches();
  CHECK(s.copy(Direction::kToDevice) == CopyOutcome::kDone);
  CHECK_EQ(s.launches() - before, 300);
  CHECK(s.is_right_there());
  CHECK(!s.device->gathers_copies());
  CHECK(s.copy(Direction::kToHost) == CopyOutcome::kDone);
  CHECK_EQ(s.launches() - before, 600);
  CHECK(s.is_right_here());
}

TEST(device_copies_that_the_driver_had_no_memory_for_are_gathered_the_next_time) {
  Scattered s(300);
  s.fake.fail("cuMemcpyBatchAsync", 1, kOutOfMemory, 0);
  CHECK(s.copy(Direction::kToDevice) == CopyOutcome::kDone);
  CHECK(s.is_right_there());
  CHECK(s.device->gathers_copies());
}

TEST(device_copies_of_memory_that_is_gone_fail_and_say_nothing_of_the_driver) {
  Scattered s(300);
  const DeviceCopy good = s.copies[200];
  s.copies[200].device = s.memory.address() + 2 * s.n * kPiece;  // outside
  CHECK(s.copy(Direction::kToDevice) == CopyOutcome::kFailed);
  CHECK(s.error.find("cuMemcpyHtoDAsync of 4096 bytes: CUDA_ERROR_INVALID_VALUE") != std::string::npos);
  CHECK_EQ(s.fake.counts().queued, 0);  // those before it have ended
  CHECK(s.device->gathers_copies() && !s.device->is_lost());
  s.copies[200] = good;
  CHECK(s.copy(Direction::kToDevice) == CopyOutcome::kDone);
  CHECK(s.is_right_there());
}

TEST(device_copies_under_way_leave_the_caller_to_others_until_it_waits) {
  Scattered s(64);
  s.fake.hold(1, 0);
  const auto under_way = s.device->begin_copy(s.copies, Direction::kToDevice);
  CHECK_EQ(s.fake.counts().queued, 64);
  CHECK(!s.is_right_there());
  std::atomic<bool> has_ended = false;
  std::thread waits([&] {
    CHECK(under_way->wait(&s.error) == CopyOutcome::kDone);
    has_ended = true;
  });
  CHECK(!has_ended);
  s.fake.hold(0, 0);
  waits.join();
  CHECK(s.is_right_there());
  CHECK(under_way->wait(&s.error) == CopyOutcome::kDone);  // it says the same again
}

TEST(device_copies_to_the_host_are_not_there_before_they_have_ended) {
  Scattered s(8);
  CHECK(s.copy(Direction::kToDevice) == CopyOutcome::kDone);
  s.fake.hold(1, 0);
  const auto under_way = s.device->begin_copy(s.copies, Direction::kToHost);
  CHECK(!s.is_right_here());  // neither the old bytes nor the new ones
  s.fake.hold(0, 0);
  CHECK(under_way->wait(&s.error) == CopyOutcome::kDone);
  CHECK(s.is_right_here());
}

TEST(device_copies_that_nobody_waits_for_have_ended_when_they_are_let_go) {
  Scattered s(64);
  s.fake.delay_copies(200);
  s.device->begin_copy(s.copies, Direction::kToDevice).reset();
  CHECK_EQ(s.fake.counts().queued, 0);
  CHECK(s.is_right_there());
}

TEST(device_copies_of_a_device_that_is_lost_meanwhile_are_lost) {
  Scattered s(64);
  s.fake.hold(1, 0);
  const auto under_way = s.device->begin_copy(s.copies, Direction::kToHost);
  s.fake.lose(0);
  CHECK(under_way->wait(&s.error) == CopyOutcome::kLost);
  CHECK(s.device->is_lost());
  CHECK(s.error.find("waiting for copies: CUDA_ERROR_LAUNCH_FAILED") != std::string::npos);
  CHECK(s.device->begin_copy(s.copies, Direction::kToHost)->wait(&s.error) == CopyOutcome::kFailed);
  CHECK(s.error.find("was lost by an earlier error") != std::string::npos);
}

TEST(device_copies_of_an_event_that_is_refused_never_begin) {
  Scattered s(4);
  s.fake.fail("cuEventCreate", 1, 2, 0);
  const int64_t before = s.launches();
  CHECK(s.copy(Direction::kToDevice) == CopyOutcome::kFailed);
  CHECK_EQ(s.launches(), before);
  CHECK(s.error.find("cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
}
