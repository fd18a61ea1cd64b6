// libnccl, found at run time: a machine without it runs every other transport. The declarations are our own,
// so that nobody needs NCCL's headers to build; names, layouts and numbers are those of its API since 2.17,
// which later versions keep.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

namespace p2pkv::nccl {

using Result = int;  // ncclResult_t
using Handle = struct ncclComm*;
using StreamHandle = void*;  // cudaStream_t

constexpr Result kSuccess = 0;
constexpr Result kInProgress = 7;
constexpr int kBytes = 0;  // ncclInt8

// By it the ranks of one communicator find each other; it says where the process that made it listens.
struct UniqueId {
  char internal[128];
};
static_assert(sizeof(UniqueId) == 128);

// The beginning of ncclConfig_t, as far as 2.17 has it. The library takes as many bytes as `nbytes` says, and
// its defaults for what came later than `version`.
struct CommConfig {
  size_t nbytes = sizeof(CommConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = INT_MIN;  // INT_MIN and null: the library's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
};
static_assert(sizeof(CommConfig) == 40 && offsetof(CommConfig, blocking) == 16 &&
              offsetof(CommConfig, net_name) == 32);

struct Api {
  static constexpr int kOldest = 21700;  // 2.17.0

  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  Result (*comm_init_rank_config)(Handle* comm, int n_ranks, UniqueId id, int rank, CommConfig* config);
  Result (*comm_get_async_error)(Handle comm, Result* error);
  Result (*comm_abort)(Handle comm);
  Result (*send)(const void* from, size_t n, int type, int peer, Handle comm, StreamHandle stream);
  Result (*recv)(void* to, size_t n, int type, int peer, Handle comm, StreamHandle stream);
  Result (*group_start)();
  Result (*group_end)();
  const char* (*get_error_string)(Result error);
  const char* (*get_last_error)(Handle comm);

  // Opens the library at `path`, or by a bare name wherever the loader finds it; for good, once that has
  // succeeded. Once one is loaded, true for that one and false for any other, with the reason in `error`.
  static bool load(const std::string& path, std::string* error);
  // `load` must have succeeded.
  static const Api& get();
  // The file that was loaded; empty before.
  static std::string path();
  // 22304 is 2.23.4; 0 before.
  static int version();

  // "ncclSend: unhandled cuda error".
  std::string describe(const char* call, Result error, Handle comm) const;
};

// "2.23.4".
std::string version_text(int version);

}  // namespace p2pkv::nccl
