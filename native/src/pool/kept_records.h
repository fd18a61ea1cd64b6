// Keeps what a pool's successor and its host's engines have to know of its pages, in shared memory of its
// own.
//
// A process that is killed at any moment leaves a whole record (pool/page_record.h) for each page whose word
// is even, and nothing that counts for the others. docs/design.md, "Memory that outlives its node".
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "page/namespace_epochs.h"
#include "page/region.h"
#include "page/writer_lock.h"
#include "pool/page_record.h"
#include "pool/page_table.h"

namespace p2pkv {

// The boots of a node in which its pool was the same memory: the first one, and the last.
struct KeptBoots {
  uint64_t since = 0;
  uint64_t last = 0;
};

// Not thread-safe: the pool's lock guards it.
class KeptRecords {
 public:
  // It describes a pool's region; a successor goes on with memory only if all of it is the same.
  struct Layout {
    uint64_t owner;  // node key
    uint64_t region_nbytes;
    uint64_t data_offset;
    uint64_t pool_inode;  // of the region's memfd: so that nobody takes another pool's records for its own
    uint32_t granule;
    uint32_t n_granules;

    friend bool operator==(const Layout&, const Layout&) = default;
  };
  // Where a predecessor has left a page.
  struct Left {
    uint32_t granule;
    uint32_t n_granules;
  };

  // Makes those of a new pool; null, with the reason in `error`. `is_kept`: a successor may write to them.
  static std::unique_ptr<KeptRecords> create(const Layout& layout, bool is_kept, std::string* error);
  // Takes those that a predecessor has left, who can write no more: `lock` is of `fd`. Null, with the reason
  // in `error`, and then nothing was changed, if they are of another version or of another pool.
  static std::unique_ptr<KeptRecords> adopt(int fd, WriterLock lock, const Layout& layout,
                                            std::string* error);

  // Gives a pool's memory back that nobody will go on with, though readers may map it for a while yet: all
  // its pages are misses to them first, and then the memory of these and of their records goes. What the
  // words need stays, a 512th of it. False, with the reason in `error`, if somebody writes to it, or it can't
  // be told where its words are; then nothing was changed.
  static bool give_back(int records, int pool, std::string* error);

  int fd() const { return region_->fd(); }

  // A block of `n_granules` is about to become this page, used at `stamp`.
  void write(uint32_t granule, const Page& page, uint32_t n_granules, uint64_t stamp);
  // The page was used, or is another's or the own one now.
  void use(uint32_t granule, uint64_t stamp, bool is_guest);
  // Says under which boot pages are told of from now on, before any is, and since which boot they are where
  // they were. The boot is written last: who finds a `since` above it knows that this was cut off.
  void write_boots(const KeptBoots& boots);
  // Zeros where nothing was said.
  KeptBoots boots() const;
  // Writes what must be known of epochs before keys are hashed.
  void write_epochs(const std::vector<NamespaceEpoch>& epochs);

  // The greatest of the words, which lie at `words`, and how many of them are even. False, with the reason in
  // `error`, if one of them was never a word.
  bool read_words(const uint8_t* words, uint64_t* greatest, uint32_t* n_pages, std::string* error) const;
  // Reads all pages whose words are even, in the order of place: where they lie, and, into the `table`, what
  // is known of them, without neighbours and holds. False, with the reason in `error`, if one of them is not
  // what it says or lies in another one.
  bool read(const uint8_t* words, PageTable* table, std::vector<Left>* pages, std::string* error) const;
  // False if it can't be told which they are.
  bool read_epochs(std::vector<NamespaceEpoch>* epochs) const;

  // Unmaps it and lets others write. Nobody may use it any more, nor write to the pool.
  void release();

 private:
  struct Epochs;
  struct Header;

  KeptRecords(std::unique_ptr<SharedRegion> region, WriterLock lock);
  // Maps those that were left, and finds that they are whole; null, with the reason in `error`.
  static std::unique_ptr<KeptRecords> map_left(int fd, size_t nbytes, WriterLock lock, std::string* error);
  bool read_page(uint32_t granule, uint64_t word, Page* page, uint32_t* n_granules) const;

  WriterLock lock_;  // goes after the mapping
  std::unique_ptr<SharedRegion> region_;
  Header* header_;
  PageRecord* records_;
};

}  // namespace p2pkv
