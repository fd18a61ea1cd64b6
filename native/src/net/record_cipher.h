// One direction of an encrypted connection: AES-256-GCM records that nobody without the connection's key can
// read, change, repeat, leave out or put elsewhere.
//
// A record is the length of what it holds (4 bytes), as many bytes encrypted, and a tag (16 bytes), which
// proves both. Its nonce is the number of the key and the record's own number under that key: neither is
// sent, both ends count. Once `rekey_after` bytes have gone under a key, the next one is made from it, so
// that who learns a key later can't read what went before.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "net/frames.h"

namespace p2pkv {

using CipherKey = std::array<uint8_t, 32>;

// HMAC-SHA256 of `label` followed by `about`, under `key`.
CipherKey derive_key(const CipherKey& key, std::string_view label, std::string_view about = {});

// The two directions of a connection have keys of their own, and no two connections have the same: the token
// in `hello` lets in one connection, once. All of the hello is bound in, since it is what goes unsealed.
// `session` travels over the control plane, sealed.
enum class Sender : uint8_t { kReader, kOwner };
CipherKey connection_key(const CipherKey& session, const Hello& hello, Sender sender);

// It counts what both sides of a direction count.
class RecordCipher {
 public:
  // A record has no more bytes than stay in a core's caches from the first step to the last.
  static constexpr size_t kMostBytes = 64 << 10;
  static constexpr size_t kLengthBytes = 4, kTagBytes = 16;
  static constexpr size_t kOverhead = kLengthBytes + kTagBytes;
  // 2^26 blocks of AES under one key: far below the 2^38 bytes and more after which its bounds begin to
  // matter.
  static constexpr uint64_t kRekeyAfter = 1 << 30;

  RecordCipher(const CipherKey& key, uint64_t rekey_after, bool is_sealing);
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

 protected:
  // Makes ready for the next record, of so many bytes. False if libcrypto fails, as for want of memory: then,
  // and once the others have failed, all do.
  bool begin(const uint8_t* length_field, size_t nbytes);
  bool update(uint8_t* out, const uint8_t* in, size_t nbytes);
  // Makes the record's tag at `tag`, or compares it.
  bool end(uint8_t* tag);

 private:
  struct Free {
    void operator()(void* context) const;
  };

  bool use_key();

  const std::unique_ptr<void, Free> context_;
  const bool is_sealing_;
  const uint64_t rekey_after_;
  CipherKey key_;
  uint64_t n_bytes_ = 0;    // under this key
  uint64_t n_records_ = 0;  // likewise
  uint32_t n_keys_ = 0;     // before this one
  bool is_usable_ = false;
};

// Used by one thread at a time, as the opener is.
class RecordSealer : private RecordCipher {
 public:
  RecordSealer(const CipherKey& key, uint64_t rekey_after) : RecordCipher(key, rekey_after, true) {}
  // Writes a record of the pieces, which have 1 to kMostBytes together, to `to`: so many bytes and kOverhead.
  // The pieces may change meanwhile: each byte is read once. False: nothing may be sent any more.
  bool seal(const iovec* pieces, size_t n_pieces, uint8_t* to);
  // Appends as many records as it takes.
  bool seal_all(const void* bytes, size_t nbytes, std::vector<uint8_t>* to);
};

class RecordOpener : private RecordCipher {
 public:
  RecordOpener(const CipherKey& key, uint64_t rekey_after) : RecordCipher(key, rekey_after, false) {}
  // Returns what a record holds that begins with these kLengthBytes; 0: no record does.
  static size_t n_bytes(const uint8_t* record);
  // Decrypts a whole record where it lies. False if it is not what the other side sealed next: then what is
  // there now is to be looked at by nobody, and nothing that comes later is opened.
  bool open(uint8_t* record);
};

}  // namespace p2pkv
