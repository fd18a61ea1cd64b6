// Memory that devices may read and write: locked, and registered on every rail.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transports/verbs/rail.h"

namespace p2pkv::verbs {

using Rails = std::vector<std::shared_ptr<Rail>>;

// Registered from its creation to its end; then no device touches the memory any more.
class Registration {
 public:
  // Peers may read it, and never more than that, if `readable`. Null, with the limit that was hit in `error`.
  static std::shared_ptr<Registration> create(const Rails& rails, uint8_t* base, uint64_t nbytes,
                                              bool readable, std::string* error);
  // The same of memory of a CUDA device, which a rail gets to know by `register_on`: that returns null, with
  // errno set, if it doesn't. Whether the rail finds the memory's bytes there is for the caller to see.
  using RegisterOn = std::function<ibv_mr*(const Rail& rail, int access)>;
  static std::shared_ptr<Registration> create_on_device(const Rails& rails, uint64_t address, bool readable,
                                                        const RegisterOn& register_on, std::string* error);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  uint32_t local_key(size_t rail) const { return regions_[rail]->lkey; }
  uint64_t address() const { return address_; }
  // Then a word is not to be trusted before what the rail has written was pushed there (Loopback).
  bool is_on_device() const { return is_on_device_; }
  // What follows the RegionBlob.
  std::string keys() const;

 private:
  Registration() = default;

  Rails rails_;
  uint64_t address_ = 0;
  bool is_on_device_ = false;
  std::vector<ibv_mr*> regions_;  // by rail
};

// Registrations of local memory by range: what is registered twice is locked once, for as long as anybody has
// it. Thread-safe. Readable memory is not shared this way: the keys of one region must die with it.
class RegistrationCache {
 public:
  std::shared_ptr<Registration> get(const Rails& rails, uint8_t* base, uint64_t nbytes, std::string* error);

 private:
  std::mutex mutex_;  // guards all below; held while a range is being registered
  std::map<std::pair<uint8_t*, uint64_t>, std::weak_ptr<Registration>> known_;
};

}  // namespace p2pkv::verbs
