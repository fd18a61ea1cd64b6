#include "transports/verbs/device_memory.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cuda/dmabuf.h"
#include "cuda/staging.h"
#include "net/tokens.h"
#include "transports/verbs/loopback.h"

namespace p2pkv::verbs {
namespace {

// The device's own time-outs would end what fails no sooner; a guess.
constexpr double kReadS = 2.0;
constexpr uint64_t kId = 1;
constexpr size_t kPattern = Loopback::kMostBytes;

// Bytes of the memory, in a place of the staging for what was there and one for the pattern.
struct End {
  uint64_t address;
  uint8_t* saved;
  uint8_t* pattern;
};

// Writes a pattern to both ends of some memory, and puts back what was there when it goes or is asked to.
class Marked {
 public:
  Marked(std::shared_ptr<cuda::Device> device, uint64_t address, uint64_t nbytes)
      : device_(std::move(device)), n_(std::min<uint64_t>(nbytes, kPattern)) {
    ends_.push_back({address, nullptr, nullptr});
    if (nbytes >= 2 * kPattern) ends_.push_back({address + nbytes - n_, nullptr, nullptr});
  }
  ~Marked() {
    std::string ignored;
    put_back(&ignored);
  }
  Marked(const Marked&) = delete;
  Marked& operator=(const Marked&) = delete;

  bool write(std::string* error) {
    staging_ = cuda::Staging::create(device_, cuda::Staging::kGranule, error);
    if (!staging_) return false;
    loan_ = staging_->borrow(4 * kPattern, 4 * kPattern, Deadline::after(kReadS));
    if (!loan_) return false;
    for (size_t i = 0; i < ends_.size(); ++i) {
      ends_[i].saved = loan_.data() + 2 * i * kPattern;
      ends_[i].pattern = ends_[i].saved + kPattern;
      fill_random(ends_[i].pattern, kPattern);
    }
    if (!copy(cuda::Direction::kToHost, &End::saved, error)) return false;
    is_written_ = true;  // in part, if the copy fails
    return copy(cuda::Direction::kToDevice, &End::pattern, error);
  }

  // Idempotent. False, with the reason in `error`, if the memory has lost what it had.
  bool put_back(std::string* error) {
    if (!is_written_) return true;
    is_written_ = false;
    return copy(cuda::Direction::kToDevice, &End::saved, error);
  }

  // Whether a rail reads the pattern. Else the reason is in `error`.
  bool is_read_by(const std::shared_ptr<Rail>& rail, uint32_t key, std::string* error) const {
    const auto completions = CompletionQueue::create(rail, Loopback::kCompletions, error);
    if (!completions) return false;
    const auto loopback = Loopback::create(rail, *completions, kId, error);
    if (!loopback) return false;
    for (const End& end : ends_) {
      if (!loopback->begin(end.address, key, static_cast<uint32_t>(n_)) ||
          !has_ended(*loopback, *completions)) {
        *error = rail->name() + " can't read the memory, though it is registered";
        return false;
      }
      if (std::memcmp(loopback->landed(), end.pattern, n_) != 0) {
        *error = rail->name() + " reads other bytes than are in the memory";
        return false;
      }
    }
    return true;
  }

 private:
  bool copy(cuda::Direction direction, uint8_t* End::* host, std::string* error) {
    std::vector<cuda::DeviceCopy> copies;
    for (const End& end : ends_) copies.push_back({end.address, end.*host, n_});
    const auto outcome = device_->copy(copies, direction, error);
    if (outcome == cuda::CopyOutcome::kLost) loan_.abandon();
    return outcome == cuda::CopyOutcome::kDone;
  }

  static bool has_ended(Loopback& loopback, CompletionQueue& completions) {
    const Deadline deadline = Deadline::after(kReadS);
    while (!deadline.passed()) {
      completions.drain();
      completions.arm();
      ibv_wc completion;
      while (completions.poll(&completion, 1) > 0) {
        if (completion.status != IBV_WC_SUCCESS) return false;
        if (loopback.completed()) return true;
      }
      pollfd fd{completions.fd(), POLLIN, 0};
      poll(&fd, 1, deadline.poll_ms());
    }
    return false;
  }

  const std::shared_ptr<cuda::Device> device_;
  const uint64_t n_;
  std::shared_ptr<cuda::Staging> staging_;
  cuda::Staging::Loan loan_;
  std::vector<End> ends_;
  bool is_written_ = false;
};

// By one way; null, with the reason in `error`.
std::shared_ptr<Registration> register_exported(const Rails& rails, cuda::Device& device, uint64_t address,
                                                uint64_t nbytes, cuda::DmabufWay way, bool readable,
                                                std::string* error) {
  for (const auto& rail : rails) {
    if (rail->api().reg_dmabuf_mr != nullptr) continue;
    *error = "libibverbs has no ibv_reg_dmabuf_mr; install rdma-core 34 or newer";
    return nullptr;
  }
  cuda::Dmabuf exported;  // of which the rails keep the memory, not the descriptor
  if (!cuda::export_dmabuf(device, address, nbytes, way, &exported, error)) return nullptr;
  const auto register_on = [&](const Rail& rail, int access) {
    return rail.api().reg_dmabuf_mr(rail.domain(), exported.offset, nbytes, address, exported.fd.get(),
                                    access);
  };
  auto made = Registration::create_on_device(rails, address, readable, register_on, error);
  if (!made) *error = "ibv_reg_dmabuf_mr on " + *error;
  return made;
}

std::shared_ptr<Registration> register_by_address(const Rails& rails, uint64_t address, uint64_t nbytes,
                                                  bool readable, std::string* error) {
  const auto register_on = [&](const Rail& rail, int access) {
    return rail.api().reg_mr(rail.domain(), reinterpret_cast<void*>(address), nbytes, access);
  };
  auto made = Registration::create_on_device(rails, address, readable, register_on, error);
  if (!made) *error = "ibv_reg_mr on " + *error + " (is nvidia-peermem loaded?)";
  return made;
}

}  // namespace

std::shared_ptr<Registration> register_device_memory(const Rails& rails, uint64_t address, uint64_t nbytes,
                                                     bool readable, std::string* error) {
  cuda::DeviceRange range;
  const bool is_found = cuda::find_device_range(address, &range);
  const auto device = is_found ? cuda::Device::open(range.device, error) : nullptr;
  if (!device) return nullptr;
  Marked marked(device, address, nbytes);
  if (!marked.write(error)) return nullptr;
  const std::pair<const char*, std::function<std::shared_ptr<Registration>(std::string*)>> ways[] = {
      {"as a dmabuf",
       [&](std::string* why) {
         return register_exported(rails, *device, address, nbytes, cuda::DmabufWay::kAsItIs, readable, why);
       }},
      {"as a dmabuf over PCIe",
       [&](std::string* why) {
         return register_exported(rails, *device, address, nbytes, cuda::DmabufWay::kOverPcie, readable, why);
       }},
      {"by its address",
       [&](std::string* why) { return register_by_address(rails, address, nbytes, readable, why); }},
  };
  std::shared_ptr<Registration> made;
  std::string reasons;
  for (const auto& [name, register_so] : ways) {
    std::string why;
    made = register_so(&why);
    for (size_t i = 0; made && i < rails.size(); ++i) {
      if (!marked.is_read_by(rails[i], made->local_key(i), &why)) made.reset();
    }
    if (made) break;
    reasons += (reasons.empty() ? "" : "; ") + std::string(name) + ": " + why;
  }
  if (!made) *error = "no RDMA device can be given this device memory: " + reasons;
  if (marked.put_back(&reasons)) return made;
  *error = "the bytes that a pattern was written over could not be put back: " + reasons;
  return nullptr;
}

}  // namespace p2pkv::verbs
