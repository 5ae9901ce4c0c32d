// SPDX-License-Identifier: Apache-2.0
// Implements cli/files.hpp.
// What happens inside a folder is cli/replacement.cpp's.
#include "cli/files.hpp"

#include <fcntl.h>
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

bool is_stream(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error) && !fs::is_regular_file(path, error) && !fs::is_directory(path, error);
}

// Where a file lies or will lie, however it is spelled. A link that leads nowhere is itself the place.
fs::path place_of(const fs::path& path) {
  std::error_code error;
  const fs::path place = fs::weakly_canonical(fs::absolute(path), error);
  return error ? fs::absolute(path).lexically_normal() : place;
}

}  // namespace

Files::~Files() {
  replacements.clear();
  std::error_code ignored;
  for (auto folder = created_folders.rbegin(); folder != created_folders.rend(); ++folder) fs::remove(*folder, ignored);
}

void Files::create_folder(const fs::path& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return;
  if (fs::exists(folder, error)) cannot("write into", folder, "it is not a folder");
  const fs::path parent = folder.parent_path();
  if (!parent.empty() && parent != folder) create_folder(parent);
  created_folders.push_back(folder);  // before creating it: the push may throw, and the folder must not leak
  if (!fs::create_directory(folder, error)) created_folders.pop_back();
  if (error) cannot("create the folder", folder, error.message());
  const int descriptor = open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // a folder that may be written but not read cannot be synced
  errno = 0;
  const bool synced = fsync(descriptor) == 0 || errno == EINVAL;
  const std::string reason = system_reason();
  close(descriptor);
  if (!synced) cannot("create the folder", folder, reason);
}

Replacement& Files::replacement_in(const fs::path& folder) {
  for (const auto& replacement : replacements)
    if (replacement->is_of(folder)) return *replacement;
  return *replacements.emplace_back(std::make_unique<Replacement>(folder));
}

void Files::add(const fs::path& path, const std::function<void(std::ostream&)>& write) {
  std::error_code error;
  if (fs::is_directory(path, error)) cannot("write", path, "it is a folder");
  if (is_stream(path)) {
    std::ostringstream content;
    content.exceptions(std::ios::badbit);  // or the content would end where memory ran out
    write(content);
    streams.push_back({path, content.str()});
    return;
  }
  // A link is followed, so that what it points to is replaced and the link stays.
  const fs::path target = fs::exists(path, error) ? fs::canonical(path, error) : path;
  replacement_in(target.parent_path()).write(target.filename().string(), write);
}

void Files::write_streams() const {
  std::fflush(stdout);  // what was printed so far comes first if the stream is the same terminal or pipe
  for (const Stream& stream : streams) {
    errno = 0;
    std::ofstream out(stream.path, std::ios::binary);
    out << stream.content << std::flush;
    if (!out) cannot("write", stream.path, system_reason());
  }
}

void Files::commit(const std::function<void()>& last) {
  for (const auto& replacement : replacements) replacement->place();
  write_streams();
  last();
  for (const auto& replacement : replacements) replacement->finish();
  for (const auto& replacement : replacements) replacement->forget_old();
  replacements.clear();
  streams.clear();
  created_folders.clear();
}

void require_place(const std::string& path) {
  if (path.empty()) return;
  Files tried;  // which rolls back
  tried.add(path, [](std::ostream&) {});
}

void recover_folder_of(const fs::path& file) {
  std::error_code error;
  const fs::path folder = place_of(file).parent_path();
  if (fs::is_directory(folder, error)) Replacement{folder};
}

void require_distinct(const std::vector<NamedPath>& outputs, const std::vector<NamedPath>& inputs) {
  std::vector<NamedPath> places;
  for (const NamedPath& output : outputs) {
    if (output.path.empty() || is_stream(output.path)) continue;
    const fs::path place = place_of(output.path);
    for (const NamedPath& other : places)
      if (other.path == place)
        throw Failure(output.name + ": is " + output.path.string() + ", which is the place of " + other.name +
                      "; every output must have a place of its own.");
    for (const NamedPath& input : inputs)
      if (!input.path.empty() && place_of(input.path) == place)
        throw Failure(output.name + ": is " + output.path.string() + ", which is the file of " + input.name +
                      "; an output must not replace an input.");
    places.push_back({output.name, place});
  }
}

}  // namespace tessera::cli
