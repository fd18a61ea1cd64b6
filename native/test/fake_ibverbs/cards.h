// Two emulated network cards of one process, whose queue pairs reach each other: reliable connections, RDMA
// READs and messages, done as soon as they are posted. Stricter than real ones where that finds mistakes:
// what a card writes to a CUDA device stays with the card until it reads from a device itself.
//
// Its own code throughout: nothing but names, types and numbers is that of libibverbs.
#pragma once

#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "fake_ibverbs.h"

namespace fake {

constexpr int kCards = 2;

// Memory as a card reaches it.
struct Region {
  ibv_mr it{};  // first: whoever has it has this
  int access = 0;
  uint8_t* bytes = nullptr;  // where they are for the card; null: of a device, which the driver reaches
  uint8_t* mapped = nullptr;
  size_t mapped_nbytes = 0;
  bool is_on_device = false;
  bool is_deceiving = false;
  std::vector<uint8_t> instead = {};
  ~Region();

  void read(uint64_t address, void* to, size_t nbytes);
  void write(uint64_t address, const void* from, size_t nbytes);
};

struct Channel {
  ibv_comp_channel it{};
  int to = -1;  // the writing end
};

struct Completions {
  ibv_cq it{};
  bool is_armed = false;
  std::deque<ibv_wc> waiting;

  void add(uint32_t pair, uint64_t id, ibv_wc_status status, ibv_wc_opcode opcode);
};

struct Receive {
  uint64_t id;
  std::vector<ibv_sge> places;
};

struct Pair {
  ibv_qp it{};
  int access = 0;
  uint32_t peer = 0;
  std::deque<Receive> receives;
};

// What a card has not written to a device yet.
struct HeldBack {
  Region* region;
  uint64_t address;
  std::vector<uint8_t> bytes;
};

struct Wish {
  int n = 0;  // -1: always
  int error = 0;
  bool take();
};

// Never destroyed.
struct Cards {
  std::recursive_mutex mutex;  // guards all below
  std::map<uint32_t, Region*> regions;
  std::map<uint32_t, Pair*> pairs;
  std::vector<HeldBack> held[kCards];
  uint32_t last_key = 0x1000;
  uint32_t last_pair = 0x10;
  Wish refusals[2] = {{}, {-1, EFAULT}}, deceptions[2];  // by way; there is no nvidia-peermem at first
  bool spoils_reads = false;
  FakeIbverbsCounts counts{};
};
extern Cards& cards;
using Lock = std::lock_guard<std::recursive_mutex>;

int card_of(const ibv_context* context);
// Reads and writes of a card. The region holds these bytes.
void read_by(int card, Region& region, uint64_t address, void* to, size_t nbytes);
void write_by(int card, Region& region, uint64_t address, const void* from, size_t nbytes);
// The region of a protection domain with that key, if it holds these bytes and may be used so; else null.
Region* find(uint32_t key, const ibv_pd* domain, uint64_t address, size_t nbytes, int access);

// The driver's memory, where a card comes to it by its address.
void read_device(uint64_t address, void* to, size_t nbytes);
void write_device(uint64_t address, const void* from, size_t nbytes);
bool is_of_device(uint64_t address, size_t nbytes);

int post_send(ibv_qp* pair, ibv_send_wr* requests, ibv_send_wr** bad);
int post_receive(ibv_qp* pair, ibv_recv_wr* requests, ibv_recv_wr** bad);
int poll(ibv_cq* completions, int n, ibv_wc* found);
int arm(ibv_cq* completions, int only_solicited);

}  // namespace fake
