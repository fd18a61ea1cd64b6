#include "disk/folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "base/checksum.h"

namespace p2pkv::disk {
namespace {

constexpr const char* kTitle = "p2pkv disk store";
constexpr size_t kMaxIdentity = 64 << 10;

// The stores this process has open: the lock does not keep a process from its own files.
std::mutex open_mutex;  // guards `open_stores`
std::set<std::pair<uint64_t, uint64_t>> open_stores;

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, value);
  return text;
}

// One line, whatever is in it.
std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c >= ' ' && c <= '~' && c != '%') {
      out += c;
    } else {
      char code[4];
      std::snprintf(code, sizeof code, "%%%02x", static_cast<unsigned char>(c));
      out += code;
    }
  }
  return out;
}

std::string identity_text(const DiskIdentity& identity, LayoutKind layout, uint64_t store) {
  std::string text = std::string(kTitle) + "\nversion=" + std::to_string(kFormatVersion);
  text += "\nlayout=" + std::string(name_of(layout)) + "\nnode=" + escape(identity.node_id);
  text += "\nnamespace=" + escape(identity.name_space);
  if (identity.cluster != kDefaultCluster) text += "\ncluster=" + escape(identity.cluster);
  text += "\nstore=" + hex(store) + "\n";
  return text + "check=" + hex(checksum(text.data(), text.size())) + "\n";
}

std::map<std::string, std::string> fields_of(const std::string& text) {
  std::map<std::string, std::string> fields;
  size_t start = text.find('\n') + 1;
  while (start < text.size()) {
    const size_t end = std::min(text.find('\n', start), text.size());
    const size_t equals = text.find('=', start);
    if (equals < end) fields[text.substr(start, equals - start)] = text.substr(equals + 1, end - equals - 1);
    start = end + 1;
  }
  return fields;
}

bool is_whole(const std::string& text) {
  const size_t check = text.rfind("check=");
  return check != std::string::npos &&
         text.substr(check) == "check=" + hex(checksum(text.data(), check)) + "\n";
}

uint64_t random_store() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;
}

}  // namespace

const char* name_of(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::kFile:
      return "file";
    case LayoutKind::kOffset:
      return "offset";
    default:
      return "bucket";
  }
}

std::unique_ptr<Folder> Folder::open(const std::string& path, const DiskIdentity& identity, LayoutKind layout,
                                     Files& files, std::string* error) {
  std::unique_ptr<Folder> folder(new Folder(path, files));
  if (!folder->make(error) || !folder->lock(error) || !folder->identify(identity, layout, error))
    return nullptr;
  return folder;
}

std::string Folder::refusal(const std::string& path, const DiskIdentity& identity, LayoutKind layout,
                            Files& files) {
  std::string error;
  Folder folder(path, files);
  struct stat status;
  if (lstat(path.c_str(), &status) < 0 && errno == ENOENT) return "";
  if (!folder.is_private(&error)) return error;
  std::string text;
  const int loaded = load_file(files, path + "/store", kMaxIdentity, &text);
  if (loaded == -ENOENT) {
    folder.refuse_strangers(&error);
  } else if (loaded < 0) {
    error = "cannot read " + path + "/store: " + std::strerror(-loaded);
  } else {
    folder.is_same(text, identity, layout, &error);
  }
  return error;
}

// Whoever else may write to a folder can have this process write wherever a link of his leads, and can take
// its files away. So it must be this user's alone, also if it was there before.
bool Folder::make(std::string* error) {
  if (const int made = files_.make_folder(path_); made < 0) {
    *error = "cannot make " + path_ + ": " + std::strerror(-made);
    return false;
  }
  return is_private(error);
}

bool Folder::is_private(std::string* error) const {
  const std::string advice = ", or set disk_path to a folder that is not there yet, which the node makes";
  const std::string user = std::to_string(geteuid());
  struct stat link;
  struct stat folder;
  if (lstat(path_.c_str(), &link) < 0 || stat(path_.c_str(), &folder) < 0) {
    *error = "cannot examine " + path_ + ": " + std::strerror(errno);
    return false;
  }
  if (!S_ISDIR(folder.st_mode)) {
    *error = path_ + " is no folder; give another disk_path";
  } else if (S_ISLNK(link.st_mode) && link.st_uid != 0 && link.st_uid != geteuid()) {
    *error = path_ + " is a link of user " + std::to_string(link.st_uid) +
             ", who may have it lead elsewhere; " + "make the link as user " + user +
             ", as whom this node runs, or give the folder itself";
  } else if (folder.st_uid != geteuid()) {
    *error = path_ + " belongs to user " + std::to_string(folder.st_uid) + ", and this node runs as user " +
             user + ", whose it must be; have an administrator chown it to " + user + advice + " below it";
  } else if ((folder.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", folder.st_mode & 07777U);
    *error = path_ + " has mode " + mode + ", so others than user " + user +
             " may put files and links there; chmod go-w " + path_ + advice;
  } else {
    return true;
  }
  return false;
}

Folder::~Folder() {
  const std::lock_guard guard(open_mutex);
  unlock();
}

// With `open_mutex`.
void Folder::unlock() {
  if (!is_listed_) return;
  // first: closing it after another store of this process locked the file would drop that one's lock
  lock_.reset();
  open_stores.erase({device_, inode_});
  is_listed_ = false;
}

bool Folder::lock(std::string* error) {
  const std::lock_guard guard(open_mutex);
  const std::string path = path_ + "/lock";
  struct stat status;
  // before opening it: closing a second descriptor would drop this process's lock
  if (lstat(path.c_str(), &status) == 0 && open_stores.contains({status.st_dev, status.st_ino})) {
    if (is_listed_ && status.st_dev == device_ && status.st_ino == inode_) return true;
    *error = path_ + " is in use by this process already";
    return false;
  }
  UniqueFd fd(files_.open(path, O_RDWR | O_CREAT));
  if (fd.get() < 0) {
    *error = "cannot open " + path + ": " + std::strerror(-fd.get());
    return false;
  }
  struct flock whole{};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (fcntl(fd.get(), F_SETLK, &whole) < 0) {
    const int reason = errno;
    *error = "cannot lock " + path + ": " + std::strerror(reason);
    if ((reason == EAGAIN || reason == EACCES) && fcntl(fd.get(), F_GETLK, &whole) == 0) {
      *error =
          path_ + " is in use by process " + std::to_string(whole.l_pid) + "; give each node its own folder";
    }
    return false;
  }
  struct stat there;
  if (fstat(fd.get(), &status) < 0 || lstat(path.c_str(), &there) < 0) {
    *error = "cannot examine " + path + ": " + std::strerror(errno);
    return false;
  }
  if (there.st_dev != status.st_dev || there.st_ino != status.st_ino) {
    // whoever made the one that is there now has locked that
    *error = "cannot lock " + path + ": it was replaced meanwhile";
    return false;
  }
  unlock();
  lock_ = std::move(fd);
  device_ = status.st_dev;
  inode_ = status.st_ino;
  is_listed_ = open_stores.insert({device_, inode_}).second;
  return true;
}

int Folder::refuse_strangers(std::string* error) {
  std::vector<std::string> names;
  if (const int listed = files_.list(path_, &names); listed < 0) {
    *error = "cannot list " + path_ + ": " + std::strerror(-listed);
    return listed;
  }
  for (const std::string& name : names) {
    if (name == "lock" || name == "store.new" || name == "lost+found") continue;
    *error = path_ + " holds '" + name + "' and no store of p2pkv; give an empty folder or a store's";
    return -ENOTEMPTY;
  }
  return 0;
}

// Whether the file `store` with this text is that of a store of this identity and layout.
bool Folder::is_same(const std::string& text, const DiskIdentity& identity, LayoutKind layout,
                     std::string* error) const {
  auto fields = fields_of(text);
  // the version first: another one may sign otherwise
  const std::string version = std::to_string(kFormatVersion);
  if (text.starts_with(kTitle) && !fields["version"].empty() && fields["version"] != version &&
      is_whole(text)) {
    *error = path_ + " has format version " + fields["version"] + ", this p2pkv reads version " + version +
             "; delete it or use the p2pkv that made it";
    return false;
  }
  if (!text.starts_with(kTitle) || !is_whole(text)) {
    *error = damaged();
    return false;
  }
  fields.try_emplace("cluster", escape(kDefaultCluster));
  const std::pair<const char*, std::string> expected[] = {{"cluster", escape(identity.cluster)},
                                                          {"node", escape(identity.node_id)},
                                                          {"namespace", escape(identity.name_space)},
                                                          {"layout", name_of(layout)}};
  for (const auto& [name, value] : expected) {
    if (fields[name] == value) continue;
    *error = path_ + " is the store of " + name + " '" + fields[name] + "', not '" + value +
             "'; delete it or give another folder";
    return false;
  }
  return true;
}

bool Folder::identify(const DiskIdentity& identity, LayoutKind layout, std::string* error) {
  std::string text;
  const int loaded = load_file(files_, path_ + "/store", kMaxIdentity, &text);
  if (loaded == -ENOENT) {
    if (refuse_strangers(error) < 0) return false;
    stamp_.store = identity.store != 0 ? identity.store : random_store();
    identity_text_ = identity_text(identity, layout, stamp_.store);
    if (const int written = replace_file(files_, path_ + "/store", identity_text_); written < 0) {
      *error = "cannot make a store in " + path_ + ": " + std::strerror(-written);
      return false;
    }
  } else if (loaded < 0) {
    *error = "cannot read " + path_ + "/store: " + std::strerror(-loaded);
    return false;
  } else {
    if (!is_same(text, identity, layout, error)) return false;
    stamp_.store = std::strtoull(fields_of(text)["store"].c_str(), nullptr, 16);
    identity_text_ = text;
  }
  stamp_.name_space = checksum(identity.name_space.data(), identity.name_space.size());
  return true;
}

std::string Folder::damaged() const {
  return path_ + "/store is damaged, so nobody knows whose pages these are; delete the folder";
}

bool Folder::is_intact() const {
  // any other error says nothing about whether it is there
  const auto is_gone = [](int error) { return error == ENOENT || error == ENOTDIR || error == ESTALE; };
  struct stat status;
  const bool is_found = lstat((path_ + "/lock").c_str(), &status) == 0;
  const bool has_lock = is_found ? status.st_dev == device_ && status.st_ino == inode_ : !is_gone(errno);
  const int64_t nbytes = files_.nbytes(path_ + "/store", false);
  const bool has_name = nbytes < 0 ? !is_gone(static_cast<int>(-nbytes))
                                   : nbytes == static_cast<int64_t>(identity_text_.size());
  return is_listed_ && has_lock && has_name;
}

// All but the store's number and the check, which follow one another.
bool Folder::is_of_this_node(const std::string& identity) const {
  const auto owner_of = [](const std::string& text) { return text.substr(0, text.find("\nstore=")); };
  return owner_of(identity) == owner_of(identity_text_);
}

int Folder::restore(std::string* error) {
  if (!make(error) || !lock(error)) return -EBUSY;
  std::string text;
  const int loaded = load_file(files_, path_ + "/store", kMaxIdentity, &text);
  if (loaded == 0 && text == identity_text_) return 0;
  if (loaded < 0 && loaded != -ENOENT) {
    *error = "cannot read " + path_ + "/store: " + std::strerror(-loaded);
    return loaded;
  }
  if (loaded == 0 && !(is_whole(text) && is_of_this_node(text))) {
    *error = is_whole(text) ? path_ + " is the store of somebody else by now" : damaged();
    const std::lock_guard guard(open_mutex);
    unlock();
    return -EEXIST;
  }
  const int written = replace_file(files_, path_ + "/store", identity_text_);
  if (written < 0) *error = "cannot make a store in " + path_ + ": " + std::strerror(-written);
  return written;
}

}  // namespace p2pkv::disk
