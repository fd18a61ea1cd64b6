// This says what became of a publish, as an engine's caller is told of it, and whether owners of entries are
// left to be told. It is worked out in one go, since none of it needs the interpreter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "attach/attachment.h"
#include "directory/ring_table.h"
#include "page/location.h"

namespace p2pkv::attaching {

struct Published {
  // `ring` is that of the node that has answered: its own index is the node's.
  Published(Attachment::Answer given, const Key* keys, const RingTable& ring);

  Attachment::Answer answer;
  // A page has 1 here if it can be read now, and the node's own shard has its entry.
  std::vector<uint8_t> is_known;
  // Every page that can be read has an entry at each of its owners: there are none but the node.
  bool is_told = true;
  size_t n_found = 0;
  size_t n_known = 0;
  uint64_t stored_bytes = 0;
  size_t n_no_room = 0;
  size_t n_changed = 0;
  size_t n_late = 0;
  size_t n_not_tried = 0;
  // The first page that no node of this kind can store.
  std::optional<size_t> misfit;

 private:
  void count(size_t page);
  void look_for_owners(size_t page, const Key& key, const RingTable& ring);
};

}  // namespace p2pkv::attaching
