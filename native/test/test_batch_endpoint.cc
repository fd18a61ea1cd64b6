// What holds for every endpoint's batches, whatever their transport: an exception leaves nothing locked and
// nothing under way.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <iostream>
#include <new>
#include <thread>

#include "check.h"
#include "transports/batch_endpoint.h"

using namespace p2pkv;

namespace {

constexpr uint64_t kBytes = 4096;

enum class Throws { kNever, kInStart, kInDrive };

struct Log {
  std::atomic<int> n_severed = 0;
  std::atomic<int> n_quiet = 0;
  std::atomic<bool> is_ending = false;  // a batch has come to where its helpers are waited for
  std::atomic<bool> may_end = true;     // and they have left
  std::atomic<bool> was_released_early = false;
};

class ThrowingEndpoint;

class ThrowingBatch final : public Batch {
 public:
  ThrowingBatch(std::shared_ptr<ThrowingEndpoint> endpoint, Throws throws, Log* log, Reads reads)
      : Batch(std::move(reads)), endpoint_(std::move(endpoint)), throws_(throws), log_(log) {}
  ~ThrowingBatch() override { settle(Status::kCanceled); }

  void start() override {
    if (throws_ == Throws::kInStart) throw std::bad_alloc();
  }

 protected:
  bool drive(const Deadline*) override {
    if (throws_ == Throws::kInDrive) throw std::bad_alloc();
    statuses_.assign(statuses_.size(), Status::kOk);
    return true;
  }
  void interrupt() override;
  void quiesce() override {
    log_->is_ending = true;
    log_->is_ending.notify_all();
    log_->may_end.wait(false);
    ++log_->n_quiet;
  }

 private:
  const std::shared_ptr<ThrowingEndpoint> endpoint_;
  const Throws throws_;
  Log* const log_;
};

class ThrowingEndpoint final : public BatchEndpoint {
 public:
  ThrowingEndpoint(Throws throws, Log* log) : throws_(throws), log_(log) {}
  ~ThrowingEndpoint() override { close(); }

  std::shared_ptr<RemoteRegion> attach(std::string_view, std::string*) override {
    return std::make_shared<AttachedRegion>(this, 0, kBytes);
  }

 protected:
  std::string make_half() override { return "half"; }
  bool take_half(std::string_view, std::string*) override { return true; }
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion>, Reads reads) override {
    return std::make_shared<ThrowingBatch>(std::static_pointer_cast<ThrowingEndpoint>(shared_from_this()),
                                           throws_, log_, std::move(reads));
  }
  void shutdown_sockets() override { ++log_->n_severed; }
  void release() override { log_->was_released_early = !log_->may_end; }

 private:
  const Throws throws_;
  Log* const log_;
};

void ThrowingBatch::interrupt() {
  endpoint_->sever();
}

// Fails, instead of hanging for ever, if `work` does not end: then a lock is held that nobody gives back.
void check_ends(std::function<void()> work) {
  std::packaged_task<void()> task(std::move(work));
  auto ended = task.get_future();
  std::thread thread(std::move(task));
  if (ended.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
    std::cerr << "FAILED: it hangs" << std::endl;
    std::_Exit(1);
  }
  thread.join();
  ended.get();
}

struct Reading {
  explicit Reading(Throws throws) : endpoint(std::make_shared<ThrowingEndpoint>(throws, &log)) {
    std::string error;
    local = table->add({bytes, kBytes, {}, false, 0, [](uint32_t) {}});
    CHECK(endpoint->bind({}, &error));
    remote = endpoint->attach({}, &error);
  }
  std::shared_ptr<Transfer> read() { return endpoint->read(local, remote, {{0, 0, 8}}, {}); }

  Log log;
  uint8_t bytes[kBytes] = {};
  std::shared_ptr<RegionTable> table = std::make_shared<RegionTable>();
  std::shared_ptr<RegisteredRegion> local;
  std::shared_ptr<ThrowingEndpoint> endpoint;
  std::shared_ptr<RemoteRegion> remote;
};

}  // namespace

TEST(a_batch_that_throws_when_it_starts_is_ended_and_its_endpoint_severed) {
  Reading reading(Throws::kInStart);
  bool has_thrown = false;
  check_ends([&] {
    try {
      reading.read();
    } catch (const std::bad_alloc&) {
      has_thrown = true;
    }
  });
  CHECK(has_thrown);
  CHECK_EQ(reading.log.n_quiet.load(), 1);
  CHECK_EQ(reading.log.n_severed.load(), 1);
  CHECK(reading.read()->statuses() == std::vector<Status>{Status::kPeerLost});
}

TEST(a_batch_that_throws_when_it_is_driven_can_still_be_ended) {
  Reading reading(Throws::kInDrive);
  check_ends([&] {
    auto transfer = reading.read();
    for (const bool waits : {true, false}) {
      bool has_thrown = false;
      try {
        if (waits) transfer->wait(1.0);
        if (!waits) transfer->done();
      } catch (const std::bad_alloc&) {
        has_thrown = true;
      }
      CHECK(has_thrown);
    }
    reading.endpoint->close();
    CHECK(transfer->statuses() == std::vector<Status>{Status::kCanceled});
  });
  CHECK_EQ(reading.log.n_quiet.load(), 1);
}

// Nothing leads to a batch any more whose last owner lets go of it, and its helpers are still at work.
TEST(a_batch_that_is_let_go_of_is_waited_for_by_who_closes_its_endpoint_or_memory) {
  for (const bool closes_memory : {true, false}) {
    Reading reading(Throws::kNever);
    reading.log.may_end = false;
    std::thread owner([&] { reading.read().reset(); });
    reading.log.is_ending.wait(false);
    CHECK(reading.read()->statuses() == std::vector<Status>{Status::kCanceled});  // not two at a time
    std::atomic<bool> has_begun = false, has_returned = false;
    std::thread closing([&] {
      has_begun = true;
      has_begun.notify_all();
      if (closes_memory) reading.endpoint->cancel_reads_into(*reading.local);
      if (!closes_memory) reading.endpoint->close();
      has_returned = true;
    });
    has_begun.wait(false);
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    CHECK(!has_returned);
    reading.log.may_end = true;
    reading.log.may_end.notify_all();
    closing.join();
    owner.join();
    CHECK_EQ(reading.log.n_quiet.load(), 1);
    reading.endpoint->close();
    CHECK(!reading.log.was_released_early);
  }
}

TEST(an_endpoint_whose_batches_throw_nothing_serves_one_after_another) {
  Reading reading(Throws::kNever);
  for (int i = 0; i < 3; ++i) {
    auto transfer = reading.read();
    transfer->wait(1.0);
    CHECK(transfer->statuses() == std::vector<Status>{Status::kOk});
  }
  CHECK_EQ(reading.log.n_severed.load(), 0);
}
