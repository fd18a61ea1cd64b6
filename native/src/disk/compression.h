// Pages made smaller for the disk: zstd, with the bytes of 16-bit values split where that helps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace p2pkv::disk {

// What is done to pages before they are written. Mirrors DISK_COMPRESSION in p2pkv/config.py.
enum class Compression : uint8_t { kOff = 0, kZstd = 1 };

// Loads libzstd at run time, once. Empty, or a sentence saying what is missing. `library` is for tests.
std::string zstd_missing(const char* library = "libzstd.so.1");

// Used by one thread at a time; without libzstd nothing can be encoded or decoded.
class PageEncoder {
 public:
  PageEncoder();
  ~PageEncoder();
  // Writes the page smaller to `to`, which has room for `nbytes`; returns its bytes and sets the record's
  // flags. 0: it does not become smaller by an eighth at least, and is better written as it is.
  size_t encode(const uint8_t* page, size_t nbytes, uint8_t* to, uint16_t* flags);

 private:
  bool splits(const uint8_t* page, size_t nbytes);

  void* context_;
  std::vector<uint8_t> split_;
  std::vector<uint8_t> sample_;
  unsigned n_encoded_ = 0;
  bool is_split_ = false;  // what was best for the last page that was tried both ways
};

class PageDecoder {
 public:
  PageDecoder();
  ~PageDecoder();
  // The page of `length` bytes that `stored` bytes of a record with these flags hold; valid until the next
  // call. Null if they hold none. Any bytes may be given; whether the page is the right one its checksum
  // says.
  const uint8_t* decode(const uint8_t* from, size_t stored, uint16_t flags, size_t length);

 private:
  void* context_;
  std::vector<uint8_t> page_;
  std::vector<uint8_t> split_;
};

}  // namespace p2pkv::disk
