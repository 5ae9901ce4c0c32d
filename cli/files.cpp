// Implements cli/files.hpp.
// Nobody includes this.
// Temporary names carry the process id, so that two runs into one folder do not meet.
#include "cli/files.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>

#include "cli/failure.hpp"

namespace tessera::cli {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void cannot(const std::string& verb, const fs::path& path, const std::string& reason) {
  throw Failure("cannot " + verb + " " + path.string() + ": " + reason + ".");
}

std::string system_reason() { return errno != 0 ? std::strerror(errno) : "the system gave no reason"; }

}  // namespace

Files::~Files() {
  std::error_code ignored;
  for (const Pending& file : pending) fs::remove(file.temporary, ignored);
  for (auto folder = created_folders.rbegin(); folder != created_folders.rend(); ++folder) fs::remove(*folder, ignored);
}

void Files::create_folder(const fs::path& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return;
  if (fs::exists(folder, error)) cannot("write into", folder, "it is not a folder");
  if (folder.has_parent_path() && folder.parent_path() != folder) create_folder(folder.parent_path());
  if (fs::create_directory(folder, error)) created_folders.push_back(folder);
  if (error) cannot("create the folder", folder, error.message());
}

void Files::add(const fs::path& path, const std::function<void(std::ostream&)>& write) {
  std::error_code error;
  if (fs::is_directory(path, error)) cannot("write", path, "it is a folder");
  if (fs::exists(path, error) && !fs::is_regular_file(path, error)) {
    std::ostringstream content;
    write(content);
    streams.push_back({path, content.str()});
    return;
  }
  // A link is followed, so that what it points to is replaced and the link stays.
  const fs::path target = fs::exists(path, error) ? fs::canonical(path, error) : path;
  std::string name(".");
  name += target.filename().string() + "." + std::to_string(getpid()) + ".tmp";
  const fs::path temporary = target.parent_path() / name;
  errno = 0;
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  if (!out) cannot("write", path, system_reason());
  pending.push_back({temporary, target});
  write(out);
  out.close();
  if (!out) cannot("write", path, system_reason());
}

void Files::commit() {
  for (const Pending& file : pending) {
    std::error_code error;
    fs::rename(file.temporary, file.final, error);
    if (error) cannot("write", file.final, error.message());
  }
  pending.clear();
  created_folders.clear();
  std::fflush(stdout);  // what was printed so far comes first if the stream is the same terminal or pipe
  for (const Stream& stream : streams) {
    errno = 0;
    std::ofstream out(stream.path, std::ios::binary);
    out << stream.content << std::flush;
    if (!out) cannot("write", stream.path, system_reason());
  }
  streams.clear();
}

}  // namespace tessera::cli
