// NCCL's calls, of emulated ranks, and what tests ask for: fake_nccl.h.
#include <sys/random.h>

#include <climits>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "rank.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace fake;

namespace {

struct UniqueId {
  char internal[128];
};

// ncclConfig_t as 2.17 has it.
struct Config {
  size_t nbytes;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char* net_name;
};

constexpr char kPrefix[] = "p2pkv-fake-nccl-";

std::mutex knowing;  // guards ranks
std::map<void*, std::shared_ptr<Rank>>& ranks = *new std::map<void*, std::shared_ptr<Rank>>;

// The group that this thread is in.
thread_local int depth = 0;
thread_local std::vector<std::pair<std::shared_ptr<Rank>, Operation>> grouped;

std::shared_ptr<Rank> rank_of(void* comm) {
  const std::lock_guard lock(knowing);
  const auto found = ranks.find(comm);
  return found == ranks.end() ? nullptr : found->second;
}

int add(bool is_send, uint64_t address, size_t n, int type, void* comm, void* stream) {
  const auto rank = rank_of(comm);
  if (!rank || type != 0 || n == 0) return kInvalidArgument;
  if (depth == 0) return kInvalidUsage;  // p2pkv always groups
  grouped.push_back({rank, {is_send, address, n, stream}});
  return kSuccess;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  *version = 23203;
  return kSuccess;
}

EXPORT int ncclGetUniqueId(UniqueId* id) {
  *id = {};
  uint64_t random[2];
  if (getrandom(random, sizeof random, 0) != sizeof random) return kSystemError;
  std::snprintf(id->internal, sizeof id->internal, "%s%016lx%016lx", kPrefix, random[0], random[1]);
  return kSuccess;
}

EXPORT int ncclCommInitRankConfig(void** comm, int n_ranks, UniqueId id, int rank, const Config* config) {
  const bool is_known = std::strncmp(id.internal, kPrefix, sizeof kPrefix - 1) == 0;
  const bool is_sane = n_ranks == 2 && (rank == 0 || rank == 1) && config->magic == 0xcafebeef &&
                       config->version == 21700 && config->nbytes == sizeof(Config);
  // A call that could block for ever is a mistake of p2pkv's.
  if (!is_known || !is_sane || config->blocking != 0) return kInvalidArgument;
  auto made =
      std::make_shared<Rank>(std::string(id.internal, strnlen(id.internal, sizeof id.internal)), rank);
  made->begin();
  *comm = made.get();
  const std::lock_guard lock(knowing);
  ranks[made.get()] = std::move(made);
  return kInProgress;
}

EXPORT int ncclCommGetAsyncError(void* comm, int* error) {
  const auto rank = rank_of(comm);
  if (!rank) return kInvalidArgument;
  *error = rank->state();
  return kSuccess;
}

EXPORT int ncclCommAbort(void* comm) {
  const auto rank = rank_of(comm);
  if (!rank) return kInvalidArgument;
  {
    const std::lock_guard lock(knowing);
    ranks.erase(comm);
  }
  rank->abort();
  return kSuccess;
}

EXPORT int ncclSend(const void* from, size_t n, int type, int, void* comm, void* stream) {
  return add(true, reinterpret_cast<uint64_t>(from), n, type, comm, stream);
}

EXPORT int ncclRecv(void* to, size_t n, int type, int, void* comm, void* stream) {
  return add(false, reinterpret_cast<uint64_t>(to), n, type, comm, stream);
}

EXPORT int ncclGroupStart() {
  ++depth;
  return kSuccess;
}

EXPORT int ncclGroupEnd() {
  if (depth == 0) return kInvalidUsage;
  if (--depth > 0 || grouped.empty()) return kSuccess;
  const auto operations = std::move(grouped);
  grouped.clear();
  std::deque<Operation> of_rank;
  for (const auto& [rank, operation] : operations) {
    if (rank != operations[0].first) return kInvalidUsage;
    of_rank.push_back(operation);
  }
  operations[0].first->queue(std::move(of_rank));
  return kInProgress;
}

EXPORT const char* ncclGetErrorString(int result) {
  static const std::map<int, const char*> texts = {
      {kCudaError, "unhandled cuda error"}, {kSystemError, "unhandled system error"},
      {kRemoteError, "remote error"},       {kInvalidArgument, "invalid argument"},
      {kInvalidUsage, "invalid usage"},     {kInProgress, "operation in progress"},
  };
  const auto found = texts.find(result);
  return found == texts.end() ? "unknown result" : found->second;
}

EXPORT const char* ncclGetLastError(void*) {
  return "emulated";
}

EXPORT void fake_nccl_never_meet(int on) {
  wishes.never_meet = on != 0;
}

EXPORT void fake_nccl_fail_meeting(int nth, int result) {
  const std::lock_guard lock(wishes.mutex);
  wishes.meeting_to_fail = nth;
  wishes.meeting_result = result;
}

EXPORT void fake_nccl_fail_operation(int nth, int result) {
  const std::lock_guard lock(wishes.mutex);
  wishes.operation_to_fail = nth;
  wishes.operation_result = result;
}

EXPORT void fake_nccl_hold(int on) {
  const std::lock_guard lock(wishes.mutex);
  wishes.is_held = on != 0;
  wishes.let_go.notify_all();
}

EXPORT void fake_nccl_delay(int us) {
  wishes.delay_us = us;
}

EXPORT void fake_nccl_delay_aborts(int us) {
  wishes.abort_delay_us = us;
}

EXPORT void fake_nccl_reset() {
  fake_nccl_never_meet(0);
  fake_nccl_fail_meeting(0, 0);
  fake_nccl_fail_operation(0, 0);
  fake_nccl_hold(0);
  fake_nccl_delay(0);
  fake_nccl_delay_aborts(0);
}

EXPORT void fake_nccl_counts(FakeNcclCounts* counts) {
  *counts = {wishes.communicators, wishes.met, wishes.aborts, wishes.sends, wishes.sent_bytes};
}
