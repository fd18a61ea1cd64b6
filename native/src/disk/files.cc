#include "disk/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "base/fd.h"

namespace p2pkv::disk {
namespace {

int result_of(int value) {
  return value < 0 ? -errno : value;
}

class RealFiles : public Files {
 public:
  int open(const std::string& path, int flags) override {
    const int follow = (flags & O_DIRECTORY) != 0 ? 0 : O_NOFOLLOW;
    return result_of(::open(path.c_str(), flags | O_CLOEXEC | follow, 0600));
  }

  int64_t read(int fd, void* to, size_t nbytes, uint64_t offset) override {
    size_t done = 0;
    while (done < nbytes) {
      const ssize_t n = pread(fd, static_cast<char*>(to) + done, nbytes - done, offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return -errno;
      if (n == 0) break;
      done += static_cast<size_t>(n);
      if (done % kBlock != 0) break;  // the end of the file: O_DIRECT refuses to go on from here
    }
    return static_cast<int64_t>(done);
  }

  int64_t write(int fd, const void* from, size_t nbytes, uint64_t offset) override {
    size_t done = 0;
    while (done < nbytes) {
      const ssize_t n = pwrite(fd, static_cast<const char*>(from) + done, nbytes - done, offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return -errno;
      if (n == 0) return -ENOSPC;
      done += static_cast<size_t>(n);
    }
    return static_cast<int64_t>(done);
  }

  int allocate(int fd, uint64_t nbytes) override {
    int done;
    do {
      done = fallocate(fd, 0, 0, static_cast<off_t>(nbytes));
    } while (done < 0 && errno == EINTR);
    if (done < 0 && errno == EOPNOTSUPP) return truncate(fd, nbytes);
    return result_of(done);
  }

  int truncate(int fd, uint64_t nbytes) override {
    return result_of(ftruncate(fd, static_cast<off_t>(nbytes)));
  }
  int sync(int fd) override { return result_of(fdatasync(fd)); }
  int remove(const std::string& path) override { return result_of(unlink(path.c_str())); }
  int rename(const std::string& from, const std::string& to) override {
    return result_of(::rename(from.c_str(), to.c_str()));
  }

  int make_folder(const std::string& path) override {
    const int done = result_of(mkdir(path.c_str(), 0700));
    return done == -EEXIST ? 0 : done;
  }

  int list(const std::string& path, std::vector<std::string>* names) override {
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), closedir);
    if (!folder) return -errno;
    errno = 0;
    while (const dirent* entry = readdir(folder.get())) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names->push_back(name);
    }
    return -errno;
  }

  int64_t nbytes(const std::string& path, bool occupied) override {
    struct stat status;
    if (stat(path.c_str(), &status) < 0) return -errno;
    return occupied ? int64_t{status.st_blocks} * 512 : int64_t{status.st_size};
  }

  bool allows_bypass() const override { return true; }
};

}  // namespace

Files& real_files() {
  static RealFiles files;
  return files;
}

int replace_file(Files& files, const std::string& path, const std::string& content) {
  const std::string draft = path + ".new";
  const UniqueFd fd(files.open(draft, O_WRONLY | O_CREAT | O_TRUNC));
  if (fd.get() < 0) return fd.get();
  const int64_t written = files.write(fd.get(), content.data(), content.size(), 0);
  if (written < 0) return static_cast<int>(written);
  // before the rename: a name must not come to lead to a file whose bytes are not there
  if (const int synced = files.sync(fd.get()); synced < 0) return synced;
  if (const int renamed = files.rename(draft, path); renamed < 0) return renamed;
  return sync_folder(files, path.substr(0, path.rfind('/')));
}

int load_file(Files& files, const std::string& path, size_t max, std::string* content) {
  const UniqueFd fd(files.open(path, O_RDONLY));
  if (fd.get() < 0) return fd.get();
  content->resize(max);
  const int64_t n = files.read(fd.get(), content->data(), max, 0);
  content->resize(n < 0 ? 0 : static_cast<size_t>(n));
  return n < 0 ? static_cast<int>(n) : 0;
}

int sync_folder(Files& files, const std::string& path) {
  const UniqueFd fd(files.open(path, O_RDONLY | O_DIRECTORY));
  return fd.get() < 0 ? fd.get() : files.sync(fd.get());
}

}  // namespace p2pkv::disk
