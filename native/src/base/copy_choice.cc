#include "base/copy_choice.h"

#include <atomic>
#include <mutex>
#include <optional>

namespace p2pkv {
namespace {

constexpr std::chrono::milliseconds kBudget{20};

// memcpy is taken unless another one is faster by more than this: less is noise, and memcpy suits what is in
// the cache already.
constexpr double kTie = 1.03;

using Choices = std::vector<CopyChoice>;

std::atomic<const CopyKernel*> chosen[2][std::size(kSizeClasses)];

// Guards what follows; the copies look at `chosen` alone.
std::mutex mutex;
std::optional<Choices> measured;  // once in a process
Choices in_force;

size_t class_of(size_t nbytes) {
  size_t number = 0;
  while (nbytes > kSizeClasses[number].most) ++number;
  return number;
}

template <typename Each>
void for_each_class(const Each& each) {
  for (const Copying copying : {Copying::kPlain, Copying::kSummed}) {
    for (size_t i = 0; i < std::size(kSizeClasses); ++i) each(copying, i);
  }
}

void put_in_force(const Choices& choices) {
  size_t next = 0;
  for_each_class([&](Copying copying, size_t i) {
    chosen[static_cast<size_t>(copying)][i] = find_copy_kernel(choices[next++].kernel);
  });
  in_force = choices;
}

Choices the_same_everywhere(const CopyKernel& kernel) {
  Choices choices;
  for_each_class(
      [&](Copying copying, size_t i) { choices.push_back({copying, &kSizeClasses[i], kernel.name, 0}); });
  return choices;
}

CopyChoice fastest(Copying copying, const SizeClass& sizes, const std::vector<Trial>& trials) {
  CopyChoice best{copying, &sizes, library_kernel().name, 1};
  double least = kTie;
  for (const Trial& trial : trials) {
    if (trial.copying != copying || trial.sizes != &sizes || trial.of_memcpy <= least) continue;
    best.kernel = trial.kernel->name;
    best.of_memcpy = least = trial.of_memcpy;
  }
  return best;
}

}  // namespace

const CopyKernel& kernel_for(Copying copying, size_t nbytes) {
  if (nbytes < kLeastChosenFor) return library_kernel();
  const CopyKernel* kernel =
      chosen[static_cast<size_t>(copying)][class_of(nbytes)].load(std::memory_order_relaxed);
  return kernel == nullptr ? library_kernel() : *kernel;
}

bool use_copy_kernel(std::string_view name) {
  const CopyKernel* kernel = find_copy_kernel(name);
  if (kernel == nullptr) return false;
  const std::lock_guard lock(mutex);
  put_in_force(the_same_everywhere(*kernel));
  return true;
}

void use_fastest_copy_kernels(uint8_t* memory, size_t nbytes) {
  const std::lock_guard lock(mutex);
  if (!measured) {
    const std::vector<Trial> trials = try_copy_kernels(memory, nbytes, kBudget);
    Choices choices;
    for_each_class(
        [&](Copying copying, size_t i) { choices.push_back(fastest(copying, kSizeClasses[i], trials)); });
    measured = choices;
  }
  put_in_force(*measured);
}

std::vector<CopyChoice> copy_choices() {
  const std::lock_guard lock(mutex);
  return in_force.empty() ? the_same_everywhere(library_kernel()) : in_force;
}

}  // namespace p2pkv
