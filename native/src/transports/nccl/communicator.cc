#include "transports/nccl/communicator.h"

#include <utility>

namespace p2pkv::nccl {

std::unique_ptr<Communicator> Communicator::begin(std::shared_ptr<cuda::Device> device, const UniqueId& id,
                                                  int rank, const CommOptions& options, std::string* error) {
  auto stream = device->open_stream(error);
  if (!stream) return nullptr;
  auto made = std::unique_ptr<Communicator>(new Communicator(device, std::move(stream), 1 - rank));
  CommConfig config;
  config.blocking = 0;
  config.max_ctas = options.channels;
  Result result = kSuccess;
  const bool is_inside = device->run_inside(
      [&] { result = Api::get().comm_init_rank_config(&made->comm_, 2, id, rank, &config); }, error);
  if (!is_inside) return nullptr;
  if (made->note("ncclCommInitRankConfig", result)) return made;
  *error = made->failure_;
  return nullptr;
}

Progress Communicator::poll() {
  if (!failure_.empty() || comm_ == nullptr) return Progress::kFailed;
  Result state = kSuccess;
  if (!note("ncclCommGetAsyncError", Api::get().comm_get_async_error(comm_, &state)))
    return Progress::kFailed;
  if (state == kInProgress) return Progress::kBusy;
  return note("NCCL", state) ? Progress::kDone : Progress::kFailed;
}

bool Communicator::queue(std::span<const Part> parts, bool is_send) {
  const Api& api = Api::get();
  const auto stream = reinterpret_cast<StreamHandle>(stream_->handle());
  std::string error;
  bool is_queued = false;
  const auto queue_all = [&] {
    if (!note("ncclGroupStart", api.group_start())) return;
    bool is_good = true;
    for (const Part& part : parts) {
      auto* at = reinterpret_cast<void*>(part.address);
      const Result result = is_send ? api.send(at, part.nbytes, kBytes, peer_, comm_, stream)
                                    : api.recv(at, part.nbytes, kBytes, peer_, comm_, stream);
      is_good = is_good && note(is_send ? "ncclSend" : "ncclRecv", result);
    }
    // Ended in any case: what was begun on this thread must not swallow the next communicator's calls.
    is_queued = note("ncclGroupEnd", api.group_end()) && is_good;
  };
  is_quiet_ = false;
  if (!device_->run_inside(queue_all, &error) && failure_.empty()) failure_ = error;
  return is_queued;
}

std::unique_ptr<cuda::StreamMark> Communicator::mark() {
  std::string error;
  auto mark = device_->mark(stream_->handle(), &error);
  if (!mark && failure_.empty()) failure_ = error;
  return mark;
}

Progress Communicator::look(cuda::StreamMark& mark) {
  std::string error;
  switch (mark.wait(Deadline::after(0), &error)) {
    case cuda::StreamOutcome::kDone:
      break;
    case cuda::StreamOutcome::kTimedOut:
      return Progress::kBusy;
    case cuda::StreamOutcome::kFailed:
      if (failure_.empty()) failure_ = error;
      return Progress::kFailed;
  }
  // An operation that NCCL has ended early has left its stream as well.
  return poll() == Progress::kFailed ? Progress::kFailed : Progress::kDone;
}

bool Communicator::abort(double patience) {
  // In a forked child neither NCCL nor the driver is there.
  if (comm_ == nullptr || getpid() != pid_) return is_quiet_;
  const Handle comm = std::exchange(comm_, nullptr);
  std::string error;
  device_->run_inside([&] { Api::get().comm_abort(comm); }, &error);
  if (is_quiet_) return true;
  // Only the stream's own word says that nothing of it touches memory any more.
  const auto rest = device_->mark(stream_->handle(), &error);
  is_quiet_ = rest && rest->wait(Deadline::after(patience), &error) == cuda::StreamOutcome::kDone;
  return is_quiet_;
}

// Whether a call went well, or goes on; keeps the first failure.
bool Communicator::note(const char* call, Result result) {
  if (result == kSuccess || result == kInProgress) return true;
  if (failure_.empty()) failure_ = Api::get().describe(call, result, comm_);
  return false;
}

}  // namespace p2pkv::nccl
