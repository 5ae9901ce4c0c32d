// Output files that appear complete or not at all: written beside their place, then renamed all together.
// Included by the commands that write something.
// Implements the promise "no output file appears on an error" of docs/tour.md.
#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

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

  // Renames every file into its place.
  void commit();

 private:
  struct Pending {
    std::filesystem::path temporary, final;
  };
  struct Stream {
    std::filesystem::path path;
    std::string content;
  };
  std::vector<Pending> pending;
  std::vector<Stream> streams;
  std::vector<std::filesystem::path> created_folders;
};

}  // namespace tessera::cli
