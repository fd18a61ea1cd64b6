#include "base/copy_trial.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <optional>

#include "base/checksum.h"

namespace p2pkv {
namespace {

using Clock = std::chrono::steady_clock;

// Twice what a core's share of the last-level cache is on most servers. Where there is more memory more is
// used, so that what one round has left in a cache is mostly gone when the next comes there.
constexpr size_t kLeastMemory = 16 << 20;
constexpr size_t kMostMemory = 64 << 20;
constexpr size_t kLeastRounds = 5;
constexpr size_t kMostRounds = 101;
// A kernel that had less of memcpy's speed in every round is left out: the time is better spent on the
// others.
constexpr double kFarBehind = 0.67;

// Private memory, for those who have none that is free.
class OwnMemory {
 public:
  OwnMemory()
      : base_(mmap(nullptr, kLeastMemory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                   -1, 0)) {}
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  ~OwnMemory() {
    if (base_ != MAP_FAILED) munmap(base_, kLeastMemory);
  }

  // Null if there is none.
  uint8_t* base() const { return base_ == MAP_FAILED ? nullptr : static_cast<uint8_t*>(base_); }

 private:
  void* base_;
};

// Halves of memory that is copied from and to; each copy is at another place, far from the one before.
class Ground {
 public:
  Ground(uint8_t* memory, size_t nbytes) : memory_(memory), half_(std::bit_floor(nbytes / 2)) {
    // Memory that nobody has written to is one page of zeros for the kernel, or none at all.
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (size_t at = 0; at < 2 * half_; at += page) memory_[at] = static_cast<uint8_t>(at / page) | 1;
  }

  // Seconds that the size class's samples take.
  template <typename Copy>
  double time(const SizeClass& sizes, const Copy& copy) {
    const size_t n_places = half_ / sizes.sample;
    const size_t stride = (n_places * 5 / 8) | 1;  // odd: it comes to every place
    const Clock::time_point began = Clock::now();
    for (size_t i = 0; i < sizes.n_samples; ++i) {
      place_ += stride;
      const size_t at = place_ % n_places * sizes.sample;
      copy(memory_ + half_ + at, memory_ + at, sizes.sample);
    }
    return std::chrono::duration<double>(Clock::now() - began).count();
  }

 private:
  uint8_t* const memory_;
  const size_t half_;
  size_t place_ = 0;
};

struct Contestant {
  Copying copying;
  const SizeClass* sizes;
  const CopyKernel* kernel;
  size_t by_memcpy;             // where the one that copies the same by memcpy stands
  std::vector<double> seconds;  // one a round
  bool is_beaten = false;
};

std::vector<Contestant> contestants() {
  std::vector<Contestant> all;
  for (const SizeClass& sizes : kSizeClasses) {
    for (const Copying copying : {Copying::kPlain, Copying::kSummed}) {
      const size_t by_memcpy = all.size();  // the library's kernel is the first
      for (const CopyKernel& kernel : copy_kernels()) {
        const bool can_take_part =
            copying == Copying::kPlain || all.size() == by_memcpy || kernel.copy_and_sum != nullptr;
        if (can_take_part) all.push_back({copying, &sizes, &kernel, by_memcpy, {}});
      }
    }
  }
  return all;
}

double run(const Contestant& contestant, Ground& ground) {
  const CopyKernel& kernel = *contestant.kernel;
  if (contestant.copying == Copying::kPlain) return ground.time(*contestant.sizes, kernel.copy);
  Checksum sum;
  return ground.time(*contestant.sizes, [&](uint8_t* to, const uint8_t* from, size_t nbytes) {
    copy_and_checksum_by(kernel, to, from, nbytes, sum);
  });
}

// Its speed in each of its rounds, memcpy's in the same round being 1; sorted.
std::vector<double> ratios_of(const Contestant& contestant, const std::vector<Contestant>& all) {
  const std::vector<double>& of_memcpy = all[contestant.by_memcpy].seconds;
  std::vector<double> ratios(contestant.seconds.size());
  for (size_t i = 0; i < ratios.size(); ++i) ratios[i] = of_memcpy[i] / contestant.seconds[i];
  std::ranges::sort(ratios);
  return ratios;
}

double bytes_per_second_of(const Contestant& contestant) {
  std::vector<double> seconds = contestant.seconds;
  std::ranges::sort(seconds);
  const SizeClass& sizes = *contestant.sizes;
  return static_cast<double>(sizes.sample * sizes.n_samples) / seconds[seconds.size() / 2];
}

void run_round(size_t round, std::vector<Contestant>& all, Ground& ground) {
  // each round another one is the first, so that none always follows the same one
  for (size_t i = 0; i < all.size(); ++i) {
    Contestant& contestant = all[(i + round) % all.size()];
    if (!contestant.is_beaten) contestant.seconds.push_back(run(contestant, ground));
  }
  if (round == 0) return;  // once is by chance
  for (Contestant& contestant : all) contestant.is_beaten = ratios_of(contestant, all).back() < kFarBehind;
}

}  // namespace

std::vector<Trial> try_copy_kernels(uint8_t* memory, size_t nbytes, std::chrono::microseconds budget) {
  std::optional<OwnMemory> own;
  if (nbytes < kLeastMemory) memory = own.emplace().base(), nbytes = kLeastMemory;
  if (memory == nullptr) return {};  // who is so short of memory copies by memcpy
  const Clock::time_point end = Clock::now() + budget;
  Ground ground(memory, std::min(nbytes, kMostMemory));
  std::vector<Contestant> all = contestants();
  for (size_t round = 0; round < kLeastRounds || (round < kMostRounds && Clock::now() < end); ++round) {
    run_round(round, all, ground);
  }
  std::vector<Trial> trials;
  for (const Contestant& contestant : all) {
    const std::vector<double> ratios = ratios_of(contestant, all);
    trials.push_back({contestant.copying, contestant.sizes, contestant.kernel, ratios[ratios.size() / 2],
                      bytes_per_second_of(contestant)});
  }
  return trials;
}

}  // namespace p2pkv
