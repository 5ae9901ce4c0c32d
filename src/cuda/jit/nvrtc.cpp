// Finding and binding libnvrtc; see nvrtc.hpp.
#include "cuda/jit/nvrtc.hpp"

#include <glob.h>

#include <new>
#include <vector>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "cuda/library.hpp"

namespace tessera::cuda {
namespace {

const char* const library_names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

// Files that match a pattern, newest version last in the alphabet, so in reverse order.
void add_matches(const std::string& pattern, std::vector<std::string>& paths) {
  glob_t found{};
  const int status = glob(pattern.c_str(), 0, nullptr, &found);
  if (status == 0)
    for (std::size_t i = found.gl_pathc; i-- > 0;) paths.emplace_back(found.gl_pathv[i]);
  globfree(&found);
  if (status == GLOB_NOSPACE) throw std::bad_alloc();
}

// $TESSERA_NVRTC (a file) first, then the loader's own search, toolkit folders, and the folders of Python's wheels.
std::vector<std::string> candidates() {
  std::vector<std::string> paths, folders;
  if (const char* file = environment("TESSERA_NVRTC"); file && *file) return {file};
  for (const char* name : library_names) paths.emplace_back(name);
  for (const char* root : {environment("CUDA_HOME"), environment("CUDA_PATH")})
    if (root) folders.push_back(text(root, "/lib64"));
  for (const char* folder : {"/usr/local/cuda/lib64", "/usr/local/cuda-1[23]*/lib64", "/opt/cuda/lib64"})
    folders.emplace_back(folder);
  std::vector<std::string> prefixes{"/usr/local", "/usr"};
  if (const char* root = environment("VIRTUAL_ENV")) prefixes.insert(prefixes.begin(), root);
  if (const char* root = environment("CONDA_PREFIX")) prefixes.insert(prefixes.begin(), root);
  if (const char* home = environment("HOME")) prefixes.push_back(text(home, "/.local"));
  for (const std::string& prefix : prefixes)
    for (const char* packages : {"site-packages", "dist-packages"})
      for (const char* wheel : {"cu13", "cuda_nvrtc"})
        folders.push_back(text(prefix, "/lib/python3*/", packages, "/nvidia/", wheel, "/lib"));
  for (const std::string& folder : folders)
    for (const char* name : library_names) add_matches(text(folder, "/", name), paths);
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
