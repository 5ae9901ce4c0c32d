// SPDX-License-Identifier: Apache-2.0
// Implements cli/replacement.hpp. All paths are relative to the folder's descriptor (openat): renaming the folder
// meanwhile changes nothing.
#include "cli/replacement.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <streambuf>
#include <system_error>
#include <thread>

#include "cli/failure.hpp"

namespace tessera::cli {
namespace {

constexpr const char* journal = ".tessera-journal";

// Writes to a descriptor: std::ofstream loses errno and cannot be synced.
class DescriptorBuffer : public std::streambuf {
 public:
  explicit DescriptorBuffer(int file) : file(file) {}
  int error = 0;

 protected:
  std::streamsize xsputn(const char* bytes, std::streamsize count) override {
    for (std::streamsize done = 0; done < count;) {
      const ssize_t written = ::write(file, bytes + done, static_cast<std::size_t>(count - done));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        error = written < 0 ? errno : ENOSPC;
        return done;
      }
      done += written;
    }
    return count;
  }
  int_type overflow(int_type c) override {
    const char byte = traits_type::to_char_type(c);
    return xsputn(&byte, 1) == 1 ? c : traits_type::eof();
  }

 private:
  int file;
};

constexpr const char* id_begin = "tessera-";
constexpr auto longest_wait = std::chrono::minutes(10);

bool is_id(const std::string& text) {
  return text.starts_with(id_begin) && text.find_first_not_of("0123456789-", std::strlen(id_begin)) == text.npos;
}

bool is_name(const std::string& text) {
  return !text.empty() && text != "." && text != ".." && text.find('/') == text.npos;
}

std::string new_id() {
  const auto clock = std::chrono::system_clock::now().time_since_epoch().count();
  return id_begin + std::to_string(getpid()) + "-" + std::to_string(clock);
}

}  // namespace

void Replacement::cannot_write(const std::string& name, const std::string& reason) const {
  throw Failure("cannot write " + (path / name).string() + ": " + reason + ".");
}

void Replacement::cannot_write_into(const std::string& reason) const {
  throw Failure("cannot write into " + (path.empty() ? "this folder" : path.string()) + ": " + reason + ".");
}

Replacement::Replacement(const std::filesystem::path& given) :
    path(given), folder(open(given.empty() ? "." : given.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), id(new_id()) {
  if (folder < 0) cannot_write_into(std::strerror(errno));
  try {
    lock();
    undo_journal();
  } catch (...) {
    close(folder);
    throw;
  }
}

Replacement::~Replacement() {
  bool undone = true;
  for (const File& file : files) undone = undo(file) && undone;
  // A journal that could not be rolled back completely stays, for the next process to try.
  if (journaled && undone) unlinkat(folder, journal, 0);
  close(folder);
}

// Takes the folder's lock, with a timeout: two processes that each hold one folder and want the other's would deadlock.
// Some network file systems cannot lock folders; processes then run unsynchronised.
void Replacement::lock() {
  const auto end = std::chrono::steady_clock::now() + longest_wait;
  while (flock(folder, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return;
    if (std::chrono::steady_clock::now() > end)
      cannot_write_into("another process has been writing there for ten minutes");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  locked = true;
}

bool Replacement::is_of(const std::filesystem::path& other) const {
  struct stat ours {
  }, theirs{};
  return fstat(folder, &ours) == 0 && stat(other.empty() ? "." : other.c_str(), &theirs) == 0 &&
         ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev;
}

// 0 where there is none.
std::uint64_t Replacement::inode_of(const std::string& name) const {
  struct stat status {};
  return fstatat(folder, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 ? status.st_ino : 0;
}

void Replacement::write_file(const std::string& name, const std::function<void(std::ostream&)>& write) const {
  const int file = openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (file < 0) throw std::system_error(errno, std::generic_category());
  DescriptorBuffer buffer(file);
  std::ostream out(&buffer);
  try {
    write(out);
  } catch (...) {
    close(file);
    throw;
  }
  if (buffer.error == 0 && fsync(file) != 0) buffer.error = errno;
  if (close(file) != 0 && buffer.error == 0) buffer.error = errno;
  if (buffer.error != 0) throw std::system_error(buffer.error, std::generic_category());
}

void Replacement::write(const std::string& name, const std::function<void(std::ostream&)>& write) {
  for (const File& other : files)
    if (other.name == name) cannot_write(name, "it is the place of two outputs");
  remove_leftovers(name);
  files.emplace_back(name, id, 0);
  File& file = files.back();
  try {
    write_file(file.temporary, write);
  } catch (const std::system_error& error) {
    cannot_write(name, error.code().message());
  }
  file.inode = inode_of(file.temporary);
}

void Replacement::rename(const std::string& from, const std::string& to) const {
  if (renameat(folder, from.c_str(), folder, to.c_str()) != 0) cannot_write(to, std::strerror(errno));
}

void Replacement::sync() const {
  // EINVAL: the file system does not support syncing this.
  if (fsync(folder) != 0 && errno != EINVAL) cannot_write_into(std::strerror(errno));
}

void Replacement::place() {
  const std::string draft = std::string(journal) + "." + id + ".tmp";
  try {
    write_file(draft, [&](std::ostream& out) {
      for (const File& file : files) out << file.name << '\0' << file.id << '\0' << file.inode << '\0';
    });
    journaled = true;
    rename(draft, journal);
  } catch (const std::system_error& error) {
    unlinkat(folder, draft.c_str(), 0);
    cannot_write_into(error.code().message());
  } catch (...) {
    unlinkat(folder, draft.c_str(), 0);
    throw;
  }
  sync();
  for (const File& file : files) {
    // A hard link keeps the old file, which also stays in place meanwhile. On a file system without hard links it is
    // renamed.
    if (inode_of(file.name) != 0 && linkat(folder, file.name.c_str(), folder, file.kept.c_str(), 0) != 0)
      rename(file.name, file.kept);
    rename(file.temporary, file.name);
  }
  sync();
}

void Replacement::finish() {
  if (unlinkat(folder, journal, 0) != 0) cannot_write_into(std::strerror(errno));
  journaled = false;
  sync();
}

void Replacement::forget_old() {
  for (const File& file : files) unlinkat(folder, file.kept.c_str(), 0);
  files.clear();
}

// Correct at any moment between the first temporary file and forget_old(), and idempotent.
bool Replacement::undo(const File& file) const {
  bool good = true;
  const std::uint64_t present = inode_of(file.name), kept = inode_of(file.kept);
  if (kept != 0 && (present == 0 || present == file.inode))
    good = renameat(folder, file.kept.c_str(), folder, file.name.c_str()) == 0;
  else if (kept != 0)  // the old file is still in place, or another process's is
    good = unlinkat(folder, file.kept.c_str(), 0) == 0;
  else if (present != 0 && present == file.inode)
    good = unlinkat(folder, file.name.c_str(), 0) == 0;
  return (unlinkat(folder, file.temporary.c_str(), 0) == 0 || errno == ENOENT) && good;
}

// A journal is trusted only if this user owns it, and its names must not lead outside the folder.
std::vector<Replacement::File> Replacement::read_journal() const {
  const int file = openat(folder, journal, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0 && errno == ENOENT) return {};
  struct stat status {};
  std::string content(65536, '\0');
  ssize_t bytes = -1;
  if (file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid())
    bytes = read(file, content.data(), content.size());
  if (file >= 0) close(file);
  content.resize(static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
  std::vector<std::string> fields;
  for (std::size_t begin = 0, end; (end = content.find('\0', begin)) != content.npos; begin = end + 1)
    fields.push_back(content.substr(begin, end - begin));
  std::vector<File> found;
  for (std::size_t i = 0; i + 2 < fields.size(); i += 3)
    if (is_name(fields[i]) && is_id(fields[i + 1]))
      found.emplace_back(fields[i], fields[i + 1], std::strtoull(fields[i + 2].c_str(), nullptr, 10));
  if (found.empty() || found.size() * 3 != fields.size())
    cannot_write_into(std::string("its file ") + journal +
                      " is not this user's, or damaged; it tells which files an earlier process was replacing");
  return found;
}

void Replacement::undo_journal() const {
  const std::vector<File> found = read_journal();
  if (found.empty()) return;
  bool undone = true;
  for (const File& file : found) undone = undo(file) && undone;
  if (!undone || unlinkat(folder, journal, 0) != 0)
    cannot_write_into(std::string("what a killed process left there cannot be undone: ") + std::strerror(errno));
  sync();
}

// Removes the leftovers of killed processes for this file. Safe: nobody else writes while we hold the lock.
void Replacement::remove_leftovers(const std::string& name) const {
  const int again = locked ? openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  DIR* const list = again < 0 ? nullptr : fdopendir(again);
  if (!list && again >= 0) close(again);
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    const std::string found = entry->d_name;
    for (const std::string& begin : {"." + name + ".", std::string(journal) + "."})
      for (const std::string end : {".tmp", ".old"})
        if (found.size() > begin.size() + end.size() && found.starts_with(begin) && found.ends_with(end) &&
            is_id(found.substr(begin.size(), found.size() - begin.size() - end.size())))
          unlinkat(folder, entry->d_name, 0);
  }
  if (list) closedir(list);
}

}  // namespace tessera::cli
