// SPDX-License-Identifier: Apache-2.0
// Atomic output: files appear complete or not at all, and all together or not at all (a transaction). Included by the
// commands that write something. Implements docs/tour.md, "Files that are written".
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
  ~Files();  // without commit(): rolls back

  // Creates the folder and its parents; without commit() those that are new are removed again.
  void create_folder(const std::filesystem::path& folder);

  // Writes the content to a temporary file in the same folder. Something that is there and is not a regular file
  // (a pipe, a terminal) cannot be replaced: it gets the content at commit().
  void add(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write);

  // Renames every file into place. `last` runs before the transaction is final. If anything throws, everything is
  // rolled back, except what was written to pipes and terminals.
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

// Recovery: rolls back the transaction of a killed process in the folder of this file, or of the file that it links to.
// Does nothing if there is no such folder.
void recover_folder_of(const std::filesystem::path& file);

// Before long work: throws Failure if a file could not be written there. Writes nothing; "" is no file.
void require_place(const std::string& path);

// An argument of the command line that is a file.
struct NamedPath {
  std::string name;  // "--json"
  std::filesystem::path path;
};

// Before work begins: throws Failure if an output would take the place of another one, or of an input. Links are
// followed, as they are when files are written.
void require_distinct(const std::vector<NamedPath>& outputs, const std::vector<NamedPath>& inputs);

}  // namespace tessera::cli
