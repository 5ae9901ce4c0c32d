// Output files that appear complete or not at all, and all together or not at all.
// Included by the commands that write something.
// Implements docs/tour.md, "Files that are written".
#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "cli/replacement.hpp"

namespace tessera::cli {

class Files {
 public:
  Files() = default;
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;
  ~Files();  // without commit(): removes all traces

  // Creates the folder and its parents; those that were not there before go away again without commit().
  void create_folder(const std::filesystem::path& folder);

  // Writes the content to a temporary file in the same folder. Something that is there and is not a regular file
  // (a pipe, a terminal) cannot be replaced: it gets the content at commit().
  void add(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write);

  // Puts every file into its place. `last` is what else must succeed; whatever throws before the end, nothing has
  // changed, but for pipes and terminals.
  void commit(const std::function<void()>& last = [] {});

 private:
  struct Stream {
    std::filesystem::path path;
    std::string content;
  };
  Replacement& replacement_in(const std::filesystem::path& folder);
  void write_streams() const;

  std::vector<std::unique_ptr<Replacement>> replacements;  // one for each folder
  std::vector<Stream> streams;
  std::vector<std::filesystem::path> created_folders;
};

// Undoes what a process that was killed has left half done in the folder where this file lies, or the file that it is a
// link to. Nothing if there is no such folder.
void recover_folder_of(const std::filesystem::path& file);

// An argument of the command line that is a file.
struct NamedPath {
  std::string name;  // "--json"
  std::filesystem::path path;
};

// Before work begins: throws Failure if an output would take the place of another one, or of an input. Links are
// followed, as they are when files are written.
void require_distinct(const std::vector<NamedPath>& outputs, const std::vector<NamedPath>& inputs);

}  // namespace tessera::cli
