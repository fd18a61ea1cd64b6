// OpenSSL's libcrypto, found at run time, so that nobody needs it who encrypts no pages.
//
// It has the fastest AES-GCM for each kind of processor, and one for those without instructions for it, and
// it seals piece by piece, so that pages are encrypted from where they lie without being gathered before.
#pragma once

#include <cstddef>
#include <string>

namespace p2pkv {

// Its functions by their names without EVP_; that part of its ABI has not changed since version 1.1. Contexts
// are `void*` here, since its headers are not needed to build.
struct LibCrypto {
  static constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
  static constexpr int kSetTag = 0x11;  // EVP_CTRL_AEAD_SET_TAG

  void* (*context_new)();
  void (*context_free)(void*);
  int (*context_control)(void*, int what, int size, void*);
  int (*cipher_init)(void*, const void* cipher, void* engine, const unsigned char* key,
                     const unsigned char* nonce, int is_sealing);
  int (*cipher_update)(void*, unsigned char* out, int* n_out, const unsigned char* in, int n_in);
  int (*cipher_final)(void*, unsigned char* out, int* n_out);
  const void* (*aes_256_gcm)();
  const void* (*sha256)();
  unsigned char* (*hmac)(const void* hash, const void* key, int key_size, const unsigned char* in,
                         size_t in_size, unsigned char* out, unsigned int* out_size);
  const char* (*version)(int what);

  // Loads it, once for the process. Empty, or what is missing and what to install.
  static std::string missing();
  // `missing` must have found nothing missing; the same holds below.
  static const LibCrypto& get();
  // As in "OpenSSL 3.0.19 27 Jan 2026".
  static std::string version_text();
};

}  // namespace p2pkv
