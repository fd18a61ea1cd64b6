// One function per part of the core; module.cc calls them all.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <utility>

namespace p2pkv {

// First and last of those to listen on; 0: any that is free.
using Ports = std::pair<uint16_t, uint16_t>;
// Of readings, by their names.
using Counts = nanobind::typed<nanobind::dict, std::string, uint64_t>;

void bind_gate(nanobind::module_& m);
void bind_timings(nanobind::module_& m);
void bind_changes(nanobind::module_& m);
void bind_kept_pool(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_copies(nanobind::module_& m);
void bind_transports(nanobind::module_& m);
void bind_ucx(nanobind::module_& m);
void bind_nccl(nanobind::module_& m);
void bind_epochs(nanobind::module_& m);
void bind_guests(nanobind::module_& m);
void bind_shard(nanobind::module_& m);
void bind_directory(nanobind::module_& m);
void bind_transfers(nanobind::module_& m);
void bind_control(nanobind::module_& m);
void bind_peers(nanobind::module_& m);
void bind_fetch(nanobind::module_& m);
void bind_sources(nanobind::module_& m);
void bind_publishing(nanobind::module_& m);
void bind_disk(nanobind::module_& m);
void bind_tier(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_cuda_memory(nanobind::module_& m);
void bind_relay(nanobind::module_& m);
void bind_attach(nanobind::module_& m);

}  // namespace p2pkv
