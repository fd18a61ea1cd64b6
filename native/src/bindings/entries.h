// The records that shards are asked with, as they come from Python.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "bindings/arrays.h"

namespace p2pkv {

// The records of a put, drop or check, one a row.
template <typename Entry>
using EntryArray = ArrayOf<uint8_t, kAnySize, sizeof(Entry)>;

template <typename Entry>
std::vector<Entry> take_entries(const EntryArray<Entry>& entries) {
  const auto* bytes = require<uint8_t>(entries, "entries", {kAnySize, static_cast<int64_t>(sizeof(Entry))});
  std::vector<Entry> copies(entries.shape(0));
  if (!copies.empty()) std::memcpy(static_cast<void*>(copies.data()), bytes, copies.size() * sizeof(Entry));
  return copies;
}

}  // namespace p2pkv
