// Files of one folder that are replaced together: all of them or none, also when the process is killed on the way.
// Included by cli/files.cpp.
// Implements docs/tour.md, "Files that are written".
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera::cli {

// New files are written beside their places, under names that begin with a dot, and synced. Then a journal appears that
// names them; what is there already is kept under a second name; the new ones are renamed into place; the journal goes,
// which is the moment from which they count. Whoever finds a journal undoes what it tells of.
class Replacement {
 public:
  // Waits until no other process is replacing files in the folder, and undoes what a killed one left half done.
  explicit Replacement(const std::filesystem::path& folder);
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;
  ~Replacement();  // before forget_old(): the folder is as it was

  bool is_of(const std::filesystem::path& folder) const;
  void write(const std::string& name, const std::function<void(std::ostream&)>& write);

  void place();       // everything is in its place
  void finish();      // and counts; while this object lives it can still be undone, in case another folder fails
  void forget_old();  // and now it cannot

 private:
  // All names are made beforehand: undoing takes no memory.
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
