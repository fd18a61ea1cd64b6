#include "net/tokens.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace p2pkv {
namespace {

bool equal_in_constant_time(const Token& a, const Token& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<uint8_t>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

void fill_random(void* to, size_t nbytes) {
  auto* at = static_cast<uint8_t*>(to);
  while (nbytes > 0) {
    const ssize_t n = getrandom(at, nbytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      // Going on with a guessable token would open the pool to strangers.
      std::perror("p2pkv: getrandom");
      std::abort();
    }
    at += n;
    nbytes -= static_cast<size_t>(n);
  }
}

uint64_t TokenTable::new_grant() {
  const std::lock_guard lock(mutex_);
  return ++last_grant_;
}

Token TokenTable::mint(uint64_t grant, const Token& secret) {
  Token token;
  fill_random(token.data(), token.size());
  const std::lock_guard lock(mutex_);
  drop_expired();
  if (entries_.size() >= kMaxOutstanding) entries_.pop_front();
  entries_.push_back({token, secret, grant, Clock::now() + kLifetime});
  return token;
}

bool TokenTable::redeem(const Token& token, uint64_t* grant, Token* secret) {
  const std::lock_guard lock(mutex_);
  drop_expired();
  size_t found = entries_.size();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (equal_in_constant_time(entries_[i].token, token)) found = i;
  }
  if (found == entries_.size()) return false;
  *grant = entries_[found].grant;
  if (secret != nullptr) *secret = entries_[found].secret;
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(found));
  return true;
}

void TokenTable::revoke(uint64_t grant) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [grant](const Entry& entry) { return entry.grant == grant; });
}

size_t TokenTable::outstanding() {
  const std::lock_guard lock(mutex_);
  drop_expired();
  return entries_.size();
}

void TokenTable::drop_expired() {
  const auto now = Clock::now();
  while (!entries_.empty() && entries_.front().expiry <= now) entries_.pop_front();
}

}  // namespace p2pkv
