// SPDX-License-Identifier: Apache-2.0
// A crash-safe transaction on one folder: its files are replaced all together or not at all, also when the process is
// killed. Included by cli/files.cpp. Implements docs/tour.md, "Files that are written".
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera::cli {

// An undo journal. New files are written in the same folder, under names that begin with a dot, and synced. Then a
// journal is written that lists them; old files are kept under a second name (hard link); the new files are renamed
// into place; the journal is removed, which is the commit point. A process that finds a journal rolls it back.
class Replacement {
 public:
  // Locks the folder against other processes, and rolls back what a killed one left.
  explicit Replacement(const std::filesystem::path& folder);
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;
  ~Replacement();  // before forget_old(): rolls back

  bool is_of(const std::filesystem::path& folder) const;
  void write(const std::string& name, const std::function<void(std::ostream&)>& write);

  void place();       // renames the new files into place
  void finish();      // commits; can still be rolled back while this object lives, in case another folder fails
  void forget_old();  // removes the old files: no way back

 private:
  // All names are made in advance: rolling back allocates no memory.
  struct File {
    std::string name;             // its final one
    std::string id;               // of the process that writes it, part of the names that begin with a dot
    std::uint64_t inode;          // of the new file: tells whether it is in its place
    std::string temporary, kept;  // names of the new file and of the old one
    File(const std::string& name, const std::string& id, std::uint64_t inode) :
        name(name), id(id), inode(inode), temporary("." + name + "." + id + ".tmp"),
        kept("." + name + "." + id + ".old") {}
  };

  [[noreturn]] void cannot_write(const std::string& name, const std::string& reason) const;
  [[noreturn]] void cannot_write_into(const std::string& reason) const;
  void lock();
  std::uint64_t inode_of(const std::string& name) const;
  void write_file(const std::string& name, const std::function<void(std::ostream&)>& write) const;
  void rename(const std::string& from, const std::string& to) const;
  void sync() const;
  bool undo(const File& file) const;
  std::vector<File> read_journal() const;
  void undo_journal() const;
  void remove_leftovers(const std::string& name) const;

  std::filesystem::path path;
  int folder = -1;
  bool locked = false, journaled = false;
  std::string id;
  std::vector<File> files;
};

}  // namespace tessera::cli
