// Which kernel copies page bytes: naming one, measuring all, and what is chosen; and who helps with large
// batches.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/copy_choice.h"
#include "base/copy_team.h"
#include "bindings/bindings.h"
#include "pool/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const CopyKernel& kernel : copy_kernels()) names.emplace_back(kernel.name);
  return names;
}

void use_fastest(Pool* pool) {
  uint8_t* memory = nullptr;
  size_t nbytes = 0;
  if (pool != nullptr) {
    if (pool->stats().used != 0) throw nb::value_error("pool has pages, which measuring would overwrite");
    memory = pool->region().base() + pool->data_offset();
    nbytes = pool->data_nbytes();
  }
  const nb::gil_scoped_release unlocked;
  use_fastest_copy_kernels(memory, nbytes);
}

const char* name_of(Copying copying) {
  return copying == Copying::kPlain ? "copy" : "copy_and_sum";
}

// Returns what is copied, the size class, the kernel, and its speed with memcpy's being 1, or 0.
std::vector<std::tuple<std::string, std::string, std::string, double>> choices() {
  std::vector<std::tuple<std::string, std::string, std::string, double>> all;
  for (const CopyChoice& choice : copy_choices()) {
    all.emplace_back(name_of(choice.copying), choice.sizes->name, choice.kernel, choice.of_memcpy);
  }
  return all;
}

// Measures all kernels for so many seconds, in memory of its own, and leaves the choice as it is. Returns
// what is copied, the size class, the kernel, and its bytes a second.
std::vector<std::tuple<std::string, std::string, std::string, double>> try_kernels(double seconds) {
  std::vector<Trial> trials;
  {
    const nb::gil_scoped_release unlocked;
    trials = try_copy_kernels(nullptr, 0, std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6)));
  }
  std::vector<std::tuple<std::string, std::string, std::string, double>> all;
  for (const Trial& trial : trials) {
    all.emplace_back(name_of(trial.copying), trial.sizes->name, trial.kernel->name, trial.bytes_per_second);
  }
  return all;
}

// Keeps the process's team while it is open, which is none where there is one core.
class HiredTeam {
 public:
  explicit HiredTeam(bool is_always)
      : team_(CopyTeam::hire(is_always ? CopyTeam::Zeal::kAlways : CopyTeam::Zeal::kMeasured)) {}
  void close() { team_.reset(); }
  bool is_there() const { return team_ != nullptr; }

 private:
  std::shared_ptr<CopyTeam> team_;
};

std::tuple<uint64_t, uint64_t> count_large() {
  const LargeCopies counts = large_copies();
  return {counts.alone, counts.shared};
}

}  // namespace

void bind_copies(nb::module_& m) {
  m.def("copy_kernels", kernel_names);
  m.def("use_copy_kernel", [](const std::string& name) { return use_copy_kernel(name); }, "name"_a);
  m.def("use_fastest_copy_kernels", use_fastest, "pool"_a.none());
  m.def("copy_choices", choices);
  m.def("try_copy_kernels", try_kernels, "seconds"_a);
  nb::class_<HiredTeam>(m, "CopyTeam", "A second thread for large batches. See p2pkv/memory/copies.py.")
      .def(nb::init<bool>(), "always"_a = false)
      .def("close", &HiredTeam::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("is_there", &HiredTeam::is_there);
  m.def("large_copies", count_large);
}

}  // namespace p2pkv
