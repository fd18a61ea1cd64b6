// The file system as the disk tier uses it: the one place through which faults can be injected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace p2pkv::disk {

// Everything starts at multiples of this in files and buffers, as O_DIRECT wants it.
constexpr uint64_t kBlock = 4096;

constexpr uint64_t round_up(uint64_t nbytes, uint64_t to) {
  return (nbytes + to - 1) / to * to;
}

// Calls return what the system call did, or -errno; none throws. Thread-safe.
class Files {
 public:
  virtual ~Files() = default;

  // O_CLOEXEC is added, and O_NOFOLLOW but for folders: a link leads to what is not the store's. New files
  // have mode 0600.
  virtual int open(const std::string& path, int flags) = 0;
  // Fewer than `nbytes` only at the end of the file.
  virtual int64_t read(int fd, void* to, size_t nbytes, uint64_t offset) = 0;
  // All or an error; part of it may have been written then.
  virtual int64_t write(int fd, const void* from, size_t nbytes, uint64_t offset) = 0;
  // Makes the file this long with blocks behind it, so that writing within it can't run out of space. Where
  // the file system can't promise that it only gets longer.
  virtual int allocate(int fd, uint64_t nbytes) = 0;
  virtual int truncate(int fd, uint64_t nbytes) = 0;
  // Data, and what is needed to find it again.
  virtual int sync(int fd) = 0;
  virtual int remove(const std::string& path) = 0;
  virtual int rename(const std::string& from, const std::string& to) = 0;
  // 0 when it is there already.
  virtual int make_folder(const std::string& path) = 0;
  // Names but for "." and "..".
  virtual int list(const std::string& path, std::vector<std::string>* names) = 0;
  // Length of the file; disk blocks it occupies, in bytes, if `occupied`.
  virtual int64_t nbytes(const std::string& path, bool occupied) = 0;

  // Whether reads and writes may bypass this object, straight to the kernel (io_uring).
  virtual bool allows_bypass() const = 0;
};

// The kernel's.
Files& real_files();

// Writes a small file so that after a crash there is the old one, the new one or none; 0 or -errno.
int replace_file(Files& files, const std::string& path, const std::string& content);
// The content of a small file; 0 or -errno.
int load_file(Files& files, const std::string& path, size_t max, std::string* content);
// Makes a folder's entries last; 0 or -errno.
int sync_folder(Files& files, const std::string& path);

}  // namespace p2pkv::disk
