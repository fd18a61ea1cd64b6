// The folder of a store: whose it is, and that nobody else has it open.
#pragma once

#include <memory>
#include <string>

#include "base/fd.h"
#include "disk/options.h"
#include "disk/record.h"

namespace p2pkv::disk {

// Holds the lock until it is destroyed. The lock is the process's: a forked child doesn't have it, and the
// kernel drops it when the process dies, however it dies.
class Folder {
 public:
  // Null, with the reason in `error`: in use, somebody else's, another version, or not to be had.
  static std::unique_ptr<Folder> open(const std::string& path, const DiskIdentity& identity,
                                      LayoutKind layout, Files& files, std::string* error);
  // Why nobody's store can be opened there as this one's, as `open` says it; empty where it can be, or is yet
  // to be made. It changes nothing, and does not say that the folder is in use.
  static std::string refusal(const std::string& path, const DiskIdentity& identity, LayoutKind layout,
                             Files& files);
  ~Folder();

  const std::string& path() const { return path_; }
  const Stamp& stamp() const { return stamp_; }
  // Whether it is still there, with the lock that this process holds. What was deleted is made again by
  // `restore`, and locked anew: 0 or -errno, with the reason in `error`. It fails if somebody else has the
  // folder by then, or nobody knows whose it is. What else lies there is then not to be believed: others may
  // have had it meanwhile.
  bool is_intact() const;
  int restore(std::string* error);

 private:
  Folder(std::string path, Files& files) : path_(std::move(path)), files_(files) {}
  bool make(std::string* error);
  bool is_private(std::string* error) const;
  bool lock(std::string* error);
  void unlock();
  bool identify(const DiskIdentity& identity, LayoutKind layout, std::string* error);
  bool is_same(const std::string& text, const DiskIdentity& identity, LayoutKind layout,
               std::string* error) const;
  int refuse_strangers(std::string* error);
  std::string damaged() const;
  bool is_of_this_node(const std::string& identity) const;

  const std::string path_;
  Files& files_;
  UniqueFd lock_;
  uint64_t device_ = 0;  // of the lock's file
  uint64_t inode_ = 0;
  bool is_listed_ = false;
  std::string identity_text_;
  Stamp stamp_{};
};

}  // namespace p2pkv::disk
