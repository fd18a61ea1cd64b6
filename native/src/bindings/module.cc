#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  m.doc() =
      "The native core of p2pkv: what is done per page, and the threads that answer without the GIL.\n\n"
      "p2pkv's own modules say what the calls mean. Keys are (n, 16) uint8, locations (n, 64) uint8, pieces "
      "(n, p, 2) "
      "int64 of address and bytes, and statuses and flags (n,) uint8, all C-contiguous: anything else is a "
      "ValueError "
      "that names the argument.";
  // Native threads may hold objects at interpreter exit; that is a clean exit, not a leak worth a warning.
  nanobind::set_leak_warnings(false);
  p2pkv::bind_gate(m);
  p2pkv::bind_timings(m);
  p2pkv::bind_changes(m);  // before those who take one
  p2pkv::bind_kept_pool(m);
  p2pkv::bind_pool(m);
  p2pkv::bind_copies(m);
  p2pkv::bind_transports(m);
  p2pkv::bind_ucx(m);
  p2pkv::bind_nccl(m);
  p2pkv::bind_epochs(m);
  p2pkv::bind_guests(m);  // before those who take them
  p2pkv::bind_shard(m);
  p2pkv::bind_directory(m);
  p2pkv::bind_transfers(m);
  p2pkv::bind_control(m);
  p2pkv::bind_peers(m);
  p2pkv::bind_fetch(m);
  p2pkv::bind_sources(m);
  p2pkv::bind_publishing(m);
  p2pkv::bind_disk(m);
  p2pkv::bind_tier(m);
  p2pkv::bind_cuda(m);
  p2pkv::bind_cuda_memory(m);  // after the device that it takes
  p2pkv::bind_relay(m);
  p2pkv::bind_attach(m);
}
