#include "net/libcrypto.h"

#include <mutex>

#include "base/runtime_library.h"

namespace p2pkv {
namespace {

constexpr const char* kCryptoName = "libcrypto.so.3";

// Filled once under the library's mutex, before anybody is told that nothing is missing.
LibCrypto loaded_crypto{};

bool find_crypto(const RuntimeLibrary& library, LibCrypto* out, std::string* error) {
  return library.find("EVP_CIPHER_CTX_new", &out->context_new, error) &&
         library.find("EVP_CIPHER_CTX_free", &out->context_free, error) &&
         library.find("EVP_CIPHER_CTX_ctrl", &out->context_control, error) &&
         library.find("EVP_CipherInit_ex", &out->cipher_init, error) &&
         library.find("EVP_CipherUpdate", &out->cipher_update, error) &&
         library.find("EVP_CipherFinal_ex", &out->cipher_final, error) &&
         library.find("EVP_aes_256_gcm", &out->aes_256_gcm, error) &&
         library.find("EVP_sha256", &out->sha256, error) && library.find("HMAC", &out->hmac, error) &&
         library.find("OpenSSL_version", &out->version, error);
}

}  // namespace

std::string LibCrypto::missing() {
  static RuntimeLibrary library(kCryptoName, "OpenSSL 3");
  const std::lock_guard lock(library.mutex);
  if (library.is_loaded()) return {};
  std::string error;
  LibCrypto found{};
  if (!library.open(kCryptoName, &error) || !find_crypto(library, &found, &error)) {
    return "OpenSSL's " + std::string(kCryptoName) + " can't be loaded (" + error +
           "); install OpenSSL 3: libssl3 of Debian and Ubuntu, openssl-libs of Fedora and RHEL";
  }
  loaded_crypto = found;
  library.keep(kCryptoName, reinterpret_cast<void*>(found.cipher_update));
  return {};
}

const LibCrypto& LibCrypto::get() {
  return loaded_crypto;
}

std::string LibCrypto::version_text() {
  return loaded_crypto.version(0);
}

}  // namespace p2pkv
