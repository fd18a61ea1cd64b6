// What tests tell the emulated library of verbs, beside the calls of libibverbs. Symbols of
// libfake_ibverbs.so, found by dlsym or ctypes. Thread-safe.
#pragma once

#include <cstdint>

extern "C" {

// How memory of devices is registered, and what comes of it.
enum FakeIbverbsWay {
  FAKE_IBVERBS_DMABUF = 0,   // ibv_reg_dmabuf_mr
  FAKE_IBVERBS_ADDRESS = 1,  // ibv_reg_mr with a device's address, as with nvidia-peermem
};
// The next `n` registrations by this way fail with that errno; -1: all.
void fake_ibverbs_refuse(int way, int n, int error);
// The next `n` registrations by this way succeed, and what the cards read and write there is other memory;
// -1: all.
void fake_ibverbs_deceive(int way, int n);
// From now on what cards write to devices is other than what they have read, but for 64 bytes and less.
void fake_ibverbs_spoil_reads();
// Takes back all of these. Then the first way works and the second does not.
void fake_ibverbs_reset();

struct FakeIbverbsCounts {
  int64_t regions;           // registered now
  int64_t queue_pairs;       // there now
  int64_t dmabufs;           // registered since the library was loaded; the three below as well
  int64_t addresses;         // of devices
  int64_t read_from_device;  // by the cards, so that what they had written before was pushed
  int64_t held_back;         // writes to devices that were held back until then
};
void fake_ibverbs_counts(FakeIbverbsCounts* counts);
}
