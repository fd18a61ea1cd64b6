#include <cstdint>
#include <string>
#include <vector>

#include "base/copy.h"
#include "base/copy_choice.h"
#include "base/copy_trial.h"
#include "check.h"

namespace {

using p2pkv::CopyChoice;
using p2pkv::Copying;
using p2pkv::kernel_for;

constexpr size_t kKiB = 1024;

TEST(copy_choice_is_memcpy_for_small_copies_whatever_is_named) {
  for (const p2pkv::CopyKernel& kernel : p2pkv::copy_kernels()) {
    CHECK(p2pkv::use_copy_kernel(kernel.name));
    for (const Copying copying : {Copying::kPlain, Copying::kSummed}) {
      CHECK(kernel_for(copying, 0).name == "memcpy");
      CHECK(kernel_for(copying, 4 * kKiB - 1).name == "memcpy");
      for (const size_t nbytes : {4 * kKiB, 16 * kKiB, 256 * kKiB, 256 * kKiB + 1, size_t{1} << 40}) {
        CHECK(kernel_for(copying, nbytes).name == kernel.name);
      }
    }
    for (const CopyChoice& choice : p2pkv::copy_choices()) {
      CHECK(choice.kernel == kernel.name);
      CHECK_EQ(choice.of_memcpy, 0.0);
    }
  }
  CHECK(p2pkv::use_copy_kernel("memcpy"));
}

TEST(copy_choice_refuses_a_kernel_that_is_not_there_and_stays_as_it_was) {
  CHECK(p2pkv::use_copy_kernel("memcpy"));
  CHECK(!p2pkv::use_copy_kernel("sse"));
  CHECK(!p2pkv::use_copy_kernel(""));
  for (const CopyChoice& choice : p2pkv::copy_choices()) CHECK(choice.kernel == "memcpy");
}

TEST(copy_choice_is_measured_once_and_comes_back_after_a_name) {
  p2pkv::use_fastest_copy_kernels(nullptr, 0);
  const std::vector<CopyChoice> measured = p2pkv::copy_choices();
  CHECK_EQ(measured.size(), 2 * std::size(p2pkv::kSizeClasses));
  for (size_t i = 0; i < measured.size(); ++i) {
    const CopyChoice& choice = measured[i];
    CHECK(choice.sizes == &p2pkv::kSizeClasses[i % std::size(p2pkv::kSizeClasses)]);
    CHECK(kernel_for(choice.copying, choice.sizes->sample).name == choice.kernel);
    // a tie is memcpy's
    CHECK(choice.kernel == "memcpy" ? choice.of_memcpy == 1 : choice.of_memcpy > 1.03);
  }
  CHECK(p2pkv::use_copy_kernel("memcpy"));
  p2pkv::use_fastest_copy_kernels(nullptr, 0);
  const std::vector<CopyChoice> again = p2pkv::copy_choices();
  for (size_t i = 0; i < measured.size(); ++i) {
    CHECK(again[i].kernel == measured[i].kernel);
    CHECK_EQ(again[i].of_memcpy, measured[i].of_memcpy);
  }
  CHECK(p2pkv::use_copy_kernel("memcpy"));
}

TEST(copy_trials_have_every_kernel_in_every_size_class_and_stay_in_their_memory) {
  constexpr size_t kNbytes = 40 << 20, kBeside = 4 * kKiB;
  std::vector<uint8_t> memory(kNbytes + 2 * kBeside, 0xee);
  const auto trials = p2pkv::try_copy_kernels(memory.data() + kBeside, kNbytes, std::chrono::milliseconds(1));
  for (const p2pkv::SizeClass& sizes : p2pkv::kSizeClasses) {
    for (const p2pkv::CopyKernel& kernel : p2pkv::copy_kernels()) {
      size_t n_plain = 0, n_summed = 0;
      for (const p2pkv::Trial& trial : trials) {
        if (trial.sizes != &sizes || trial.kernel != &kernel) continue;
        CHECK(trial.of_memcpy > 0);
        CHECK(trial.bytes_per_second > 0);
        if (kernel.name == "memcpy") CHECK_EQ(trial.of_memcpy, 1.0);
        ++(trial.copying == Copying::kPlain ? n_plain : n_summed);
      }
      CHECK_EQ(n_plain, 1u);
      CHECK_EQ(n_summed, kernel.name == "memcpy" || kernel.copy_and_sum != nullptr ? 1u : 0u);
    }
  }
  for (size_t i = 0; i < kBeside; ++i) CHECK(memory[i] == 0xee && memory[kBeside + kNbytes + i] == 0xee);
}

}  // namespace
