#include "net/record_cipher.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "net/libcrypto.h"

namespace p2pkv {

CipherKey derive_key(const CipherKey& key, std::string_view label, std::string_view about) {
  std::string text(label);
  text.append(about);
  CipherKey derived;
  unsigned int size = 0;
  const LibCrypto& crypto = LibCrypto::get();
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  if (crypto.hmac(crypto.sha256(), key.data(), static_cast<int>(key.size()), bytes, text.size(),
                  derived.data(), &size) == nullptr ||
      size != derived.size()) {
    fill_random(derived.data(), derived.size());  // nobody has it: the connection will not work, but is safe
  }
  return derived;
}

CipherKey connection_key(const CipherKey& session, const Hello& hello, Sender sender) {
  const bool is_reader = sender == Sender::kReader;
  return derive_key(session, is_reader ? "p2pkv tcp aes-256-gcm reader" : "p2pkv tcp aes-256-gcm owner",
                    to_blob(hello));
}

void RecordCipher::Free::operator()(void* context) const {
  LibCrypto::get().context_free(context);
}

RecordCipher::RecordCipher(const CipherKey& key, uint64_t rekey_after, bool is_sealing)
    : context_(LibCrypto::get().context_new()),
      is_sealing_(is_sealing),
      rekey_after_(rekey_after),
      key_(key) {
  is_usable_ = use_key();
}

bool RecordCipher::use_key() {
  const LibCrypto& crypto = LibCrypto::get();
  return context_ != nullptr && crypto.cipher_init(context_.get(), crypto.aes_256_gcm(), nullptr, key_.data(),
                                                   nullptr, is_sealing_ ? 1 : 0) == 1;
}

bool RecordCipher::begin(const uint8_t* length_field, size_t nbytes) {
  if (n_bytes_ >= rekey_after_) {
    key_ = derive_key(key_, "p2pkv tcp next");
    n_bytes_ = n_records_ = 0;
    ++n_keys_;
    is_usable_ = is_usable_ && use_key();
  }
  std::array<uint8_t, 12> nonce;
  std::memcpy(nonce.data(), &n_keys_, 4);
  std::memcpy(nonce.data() + 4, &n_records_, 8);
  ++n_records_;
  n_bytes_ += nbytes;
  int n_out = 0;
  const LibCrypto& crypto = LibCrypto::get();
  // -1: to go on sealing, or opening, with the key there is.
  is_usable_ = is_usable_ &&
               crypto.cipher_init(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1 &&
               crypto.cipher_update(context_.get(), nullptr, &n_out, length_field, kLengthBytes) == 1;
  return is_usable_;
}

bool RecordCipher::update(uint8_t* out, const uint8_t* in, size_t nbytes) {
  int n_out = 0;
  is_usable_ = is_usable_ &&
               LibCrypto::get().cipher_update(context_.get(), out, &n_out, in, static_cast<int>(nbytes)) == 1;
  return is_usable_;
}

bool RecordCipher::end(uint8_t* tag) {
  const LibCrypto& crypto = LibCrypto::get();
  uint8_t none[kTagBytes];  // GCM has nothing left to write
  int n_out = 0;
  const auto finish = [&] { return crypto.cipher_final(context_.get(), none, &n_out) == 1; };
  const auto control = [&](int what) {
    return crypto.context_control(context_.get(), what, kTagBytes, tag) == 1;
  };
  is_usable_ = is_usable_ && (is_sealing_ ? finish() && control(LibCrypto::kGetTag)
                                          : control(LibCrypto::kSetTag) && finish());
  return is_usable_;
}

bool RecordSealer::seal(const iovec* pieces, size_t n_pieces, uint8_t* to) {
  size_t nbytes = 0;
  for (size_t i = 0; i < n_pieces; ++i) nbytes += pieces[i].iov_len;
  const auto length = static_cast<uint32_t>(nbytes);
  std::memcpy(to, &length, kLengthBytes);
  if (!begin(to, nbytes)) return false;
  uint8_t* out = to + kLengthBytes;
  for (size_t i = 0; i < n_pieces; out += pieces[i++].iov_len) {
    if (!update(out, static_cast<const uint8_t*>(pieces[i].iov_base), pieces[i].iov_len)) return false;
  }
  return end(out);
}

bool RecordSealer::seal_all(const void* bytes, size_t nbytes, std::vector<uint8_t>* to) {
  const auto* at = static_cast<const uint8_t*>(bytes);
  while (nbytes > 0) {
    const size_t n = std::min(nbytes, kMostBytes);
    const iovec piece{const_cast<uint8_t*>(at), n};
    to->resize(to->size() + n + kOverhead);
    if (!seal(&piece, 1, to->data() + to->size() - n - kOverhead)) return false;
    at += n;
    nbytes -= n;
  }
  return true;
}

size_t RecordOpener::n_bytes(const uint8_t* record) {
  uint32_t length;
  std::memcpy(&length, record, kLengthBytes);
  return length <= kMostBytes ? length : 0;
}

bool RecordOpener::open(uint8_t* record) {
  const size_t nbytes = n_bytes(record);
  uint8_t* bytes = record + kLengthBytes;
  return nbytes > 0 && begin(record, nbytes) && update(bytes, bytes, nbytes) && end(bytes + nbytes);
}

}  // namespace p2pkv
