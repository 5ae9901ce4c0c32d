// SPDX-License-Identifier: Apache-2.0
// Finds and loads libnvrtc; see nvrtc.hpp.
#include "cuda/jit/nvrtc.hpp"

#include <dirent.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "cuda/library.hpp"

namespace tessera::cuda {
namespace {

const char* const library_names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

// Folders PARENT/BEGIN.../REST in descending order of names: the newest version first. Not glob(), which has a double
// free when memory runs out.
void add_folders(const std::string& parent, std::string_view begin, const std::string& rest,
                 std::vector<std::string>& folders) {
  errno = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(parent.c_str()), closedir);
  if (errno == ENOMEM) throw std::bad_alloc();
  if (!open) return;
  std::set<std::string, std::greater<>> names;
  while (const dirent* entry = readdir(open.get()))
    if (std::string_view(entry->d_name).starts_with(begin)) names.emplace(entry->d_name);
  for (const std::string& name : names) folders.push_back(text(parent, "/", name, "/", rest));
}

// Search order: $TESSERA_NVRTC (a file; nothing else then), the dynamic loader's search path, CUDA toolkit folders,
// Python wheels.
std::vector<std::string> candidates() {
  std::vector<std::string> paths, folders;
  if (const char* file = environment("TESSERA_NVRTC"); file && *file) return {file};
  for (const char* name : library_names) paths.emplace_back(name);
  for (const char* root : {environment("CUDA_HOME"), environment("CUDA_PATH")})
    if (root) folders.push_back(text(root, "/lib64"));
  folders.emplace_back("/usr/local/cuda/lib64");
  for (const char* version : {"cuda-13", "cuda-12"}) add_folders("/usr/local", version, "lib64", folders);
  folders.emplace_back("/opt/cuda/lib64");
  std::vector<std::string> prefixes{"/usr/local", "/usr"};
  if (const char* root = environment("VIRTUAL_ENV")) prefixes.insert(prefixes.begin(), root);
  if (const char* root = environment("CONDA_PREFIX")) prefixes.insert(prefixes.begin(), root);
  if (const char* home = environment("HOME")) prefixes.push_back(text(home, "/.local"));
  for (const std::string& prefix : prefixes)
    for (const char* packages : {"site-packages", "dist-packages"})
      for (const char* wheel : {"cu13", "cuda_nvrtc"})
        add_folders(prefix + "/lib", "python3", text(packages, "/nvidia/", wheel, "/lib"), folders);
  for (const std::string& folder : folders)
    for (const char* name : library_names)
      if (std::string path = text(folder, "/", name); access(path.c_str(), F_OK) == 0) paths.push_back(std::move(path));
  return paths;
}

NvrtcOrReason open_nvrtc(Nvrtc& table) {
  const SharedLibrary library(candidates());
  if (!library.is_open())
    return {nullptr, text("NVRTC is missing: no libnvrtc.so.13 or .12 was found (", library.error(),
                          "); install it (CUDA's toolkit has it, and so has the Python package nvidia-cuda-nvrtc), "
                          "or set TESSERA_NVRTC to its path")};
  const char* missing = bind(library, {
#define X(name, symbol, parameters) {symbol, reinterpret_cast<void**>(&table.name)},
                                          TESSERA_NVRTC(X)
#undef X
                                      });
  if (missing) return {nullptr, text("NVRTC at ", library.path(), " is too old: it has no ", missing)};
  if (table.version(&table.major, &table.minor) != 0)
    return {nullptr, text("NVRTC at ", library.path(), " does not say its version")};
  table.path = library.path();
  return {&table, ""};
}

struct Opened {
  Nvrtc table{};
  NvrtcOrReason found = open_nvrtc(table);
};

}  // namespace

const NvrtcOrReason& find_nvrtc() {
  static constinit Once<const Opened> opened;
  return opened.get([] { return Opened(); }).found;
}

}  // namespace tessera::cuda
