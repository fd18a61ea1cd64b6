// Packing that is chosen automatically goes on while it pays, and costs little where it does not.
#include <cstdint>
#include <utility>

#include "check.h"
#include "pool/packing_choice.h"

namespace {

using p2pkv::Packing;
using p2pkv::PackingChoice;

constexpr uint64_t kPage = 1 << 20;
constexpr uint64_t kFast = kPage / 4;  // nanoseconds: 4 GB/s
constexpr uint64_t kSlow = kPage * 2;

// What a publisher of so many pages does: asks for each, and tells what became of those that were tried.
// Returns how many these were.
uint64_t publish(PackingChoice& choice, uint64_t n, uint64_t stored, uint64_t nanoseconds) {
  uint64_t n_tried = 0;
  for (uint64_t i = 0; i < n; ++i) {
    if (!choice.is_wanted(kPage)) continue;
    ++n_tried;
    choice.tried(kPage, stored, stored < kPage, nanoseconds);
  }
  return n_tried;
}

TEST(packing_choice_is_what_was_asked_for) {
  PackingChoice off(Packing::kOff), lossless(Packing::kLossless);
  CHECK_EQ(publish(off, 1000, kPage / 2, kFast), 0u);
  CHECK_EQ(publish(lossless, 1000, kPage, kSlow), 1000u);
  CHECK(!off.pages().is_on && lossless.pages().is_on);
  CHECK_EQ(lossless.pages().n_packed, 0u);
}

TEST(packing_choice_goes_on_while_it_pays) {
  PackingChoice choice(Packing::kAuto);
  CHECK_EQ(publish(choice, 1000, kPage / 4 * 3, kFast), 1000u);
  CHECK(choice.pages().is_on);
  CHECK_EQ(choice.pages().tried_bytes, 1000 * kPage);
  CHECK_EQ(choice.pages().stored_bytes, 750 * kPage);
  // the values change
  publish(choice, 200, kPage, kFast);
  CHECK(!choice.pages().is_on);
}

TEST(packing_choice_costs_a_sixty_fourth_where_it_does_not_pay) {
  constexpr uint64_t kPages = 1 << 16;
  for (const auto& [stored, nanoseconds] : {std::pair{kPage, kFast}, {kPage / 4 * 3, kSlow}}) {
    PackingChoice choice(Packing::kAuto);
    const uint64_t n_tried = publish(choice, kPages, stored, nanoseconds);
    CHECK(n_tried >= kPages / 65 && n_tried <= kPages / 60);
  }
}

TEST(packing_choice_notices_that_it_pays_now) {
  PackingChoice choice(Packing::kAuto);
  publish(choice, 100, kPage, kFast);
  CHECK(!choice.pages().is_on);
  publish(choice, PackingChoice::kPause * PackingChoice::kTrialBytes / kPage, kPage / 4 * 3, kFast);
  CHECK(publish(choice, 1000, kPage / 4 * 3, kFast) >= 900);
  CHECK(choice.pages().is_on);
}

}  // namespace
