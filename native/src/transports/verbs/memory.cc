#include "transports/verbs/memory.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace p2pkv::verbs {
namespace {

std::string lock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur / 1024) + " KiB";
}

std::string why_not(const Rail& rail, uint64_t nbytes, int error) {
  std::string text =
      rail.name() + " can't register " + std::to_string(nbytes) + " bytes: " + std::strerror(error);
  if (nbytes > rail.limits().max_mr_size) {
    return text + "; the device takes " + std::to_string(rail.limits().max_mr_size) + " at a time";
  }
  if (error == ENOMEM || error == EAGAIN || error == EPERM || error == EACCES) {
    return text + "; RLIMIT_MEMLOCK is " + lock_limit() + ", raise it (ulimit -l unlimited) or shrink " +
           "pool_size; the device has at most " + std::to_string(rail.limits().max_mr) + " registrations";
  }
  if (error == EFAULT) return text + "; the memory is not mapped, or read-only";
  return text;
}

}  // namespace

std::shared_ptr<Registration> Registration::create(const Rails& rails, uint8_t* base, uint64_t nbytes,
                                                   bool readable, std::string* error) {
  std::shared_ptr<Registration> made(new Registration);
  made->rails_ = rails;
  made->address_ = reinterpret_cast<uint64_t>(base);
  const int access = IBV_ACCESS_LOCAL_WRITE | (readable ? IBV_ACCESS_REMOTE_READ : 0);
  for (const auto& rail : rails) {
    ibv_mr* region = rail->api().reg_mr(rail->domain(), base, nbytes, access);
    if (region == nullptr) {
      *error = why_not(*rail, nbytes, errno);
      return nullptr;
    }
    made->regions_.push_back(region);
  }
  return made;
}

std::shared_ptr<Registration> Registration::create_on_device(const Rails& rails, uint64_t address,
                                                             bool readable, const RegisterOn& register_on,
                                                             std::string* error) {
  std::shared_ptr<Registration> made(new Registration);
  made->rails_ = rails;
  made->address_ = address;
  made->is_on_device_ = true;
  const int access = IBV_ACCESS_LOCAL_WRITE | (readable ? IBV_ACCESS_REMOTE_READ : 0);
  for (const auto& rail : rails) {
    ibv_mr* region = register_on(*rail, access);
    if (region == nullptr) {
      *error = rail->name() + ": " + std::strerror(errno);
      return nullptr;
    }
    made->regions_.push_back(region);
  }
  return made;
}

Registration::~Registration() {
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (rails_[i]->is_ours()) rails_[i]->api().dereg_mr(regions_[i]);
  }
}

std::string Registration::keys() const {
  RegionKeys keys{};
  keys.address = address_;
  keys.n_rails = static_cast<uint32_t>(regions_.size());
  for (size_t i = 0; i < regions_.size(); ++i) keys.keys[i] = regions_[i]->rkey;
  return to_blob(keys);
}

std::shared_ptr<Registration> RegistrationCache::get(const Rails& rails, uint8_t* base, uint64_t nbytes,
                                                     std::string* error) {
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
  auto& known = known_[{base, nbytes}];
  auto registration = known.lock();
  if (!registration) known = registration = Registration::create(rails, base, nbytes, false, error);
  return registration;
}

}  // namespace p2pkv::verbs
