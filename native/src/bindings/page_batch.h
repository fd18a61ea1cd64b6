// Keys and pieces of a call as the pool takes them.
#pragma once

#include "bindings/arrays.h"
#include "pool/pool.h"

namespace p2pkv {

// Borrows the arrays. Without keys, of pages that have none.
inline PageBatch require_batch(const AnyArray* keys, const AnyArray& pieces) {
  const auto* values = require<int64_t>(pieces, "pieces", {kAnySize, kAnySize, 2});
  const PageBatch batch{pieces.shape(0), pieces.shape(1), keys ? require_keys(*keys) : nullptr,
                        reinterpret_cast<const Piece*>(values)};
  if (keys && keys->shape(0) != batch.n_pages)
    throw nanobind::value_error("keys and pieces must have equal lengths");
  for (size_t i = 0; i < batch.n_pages * batch.n_pieces; ++i) {
    if (batch.pieces[i].nbytes < 0) throw nanobind::value_error("pieces must not have negative lengths");
  }
  return batch;
}

}  // namespace p2pkv
