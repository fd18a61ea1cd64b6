// One-time tokens: what a peer that passed the control plane's CURVE handshake shows at a transport's socket.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

namespace p2pkv {

using Token = std::array<uint8_t, 32>;

// Fills `nbytes` with randomness of the kernel's generator.
void fill_random(void* to, size_t nbytes);

// The tokens one transport has handed out and not yet seen. Thread-safe.
//
// A token admits one connection, once, within kLifetime. Each belongs to a grant, the passive half of an
// endpoint, and dies with it; a secret that is never shown may go with it, and is forgotten with it. At most
// kMaxOutstanding are kept: minting one more drops the oldest, so a peer that asks for handshakes and never
// connects costs others a retry and this node no memory.
class TokenTable {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMaxOutstanding = 4096;
  static constexpr std::chrono::seconds kLifetime{30};

  // A number that no other grant of this table has.
  uint64_t new_grant();
  Token mint(uint64_t grant, const Token& secret = {});
  // True, with the token's grant and secret, the first time a live token is shown. Takes the same time
  // wherever it differs.
  bool redeem(const Token& token, uint64_t* grant, Token* secret = nullptr);
  // Forgets the tokens of a grant.
  void revoke(uint64_t grant);
  size_t outstanding();

 private:
  struct Entry {
    Token token;
    Token secret;
    uint64_t grant;
    Clock::time_point expiry;
  };
  void drop_expired();  // with mutex_ held

  std::mutex mutex_;           // guards all below
  std::deque<Entry> entries_;  // oldest first
  uint64_t last_grant_ = 0;
};

}  // namespace p2pkv
