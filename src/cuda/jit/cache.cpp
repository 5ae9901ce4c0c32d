// SPDX-License-Identifier: Apache-2.0
// The caches of compiled kernels; see cache.hpp.
#include "cuda/jit/cache.hpp"

#include <dirent.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <mutex>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/file.hpp"
#include "cuda/jit/nvrtc.hpp"
#include "cuda/jit/pack.hpp"
#include "cuda/jit/sha256.hpp"
#include "cuda/jit/source.hpp"

namespace tessera::cuda {

std::string unit_key(const Unit& unit) {
  Sha256 sum;
  sum.add_field(unit.text).add_field(unit.architecture);
  for (const SourceFile* file : sources_read_by(unit.text)) sum.add_field(file->name).add_field(file->text);
  for (const std::string& flag : compile_flags()) sum.add_field(flag);
  return sum.hex();
}

std::string cache_folder() {
  if (const char* folder = environment("TESSERA_CACHE")) return folder;
  const char* xdg = environment("XDG_CACHE_HOME");
  if (xdg && *xdg) return text(xdg, "/tessera");
  const char* home = environment("HOME");
  return home && *home ? text(home, "/.cache/tessera") : "";
}

// --- disk

namespace {

std::string content_hash(const std::vector<char>& bytes) { return Sha256().add({bytes.data(), bytes.size()}).hex(); }

// The key of the disk cache includes the compiler's version: a newer one may generate better code.
std::string disk_key(const Unit& unit, const Nvrtc& nvrtc) {
  return Sha256().add_field(unit_key(unit)).add_field(text(nvrtc.major, ".", nvrtc.minor)).hex();
}

bool make_folders(const std::string& path) {
  for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1))
    mkdir(path.substr(0, slash).c_str(), 0700);  // exists already, mostly
  return mkdir(path.c_str(), 0700) == 0 || errno == EEXIST;
}

// Owned by this user and writable by nobody else.
bool is_ours_alone(const struct stat& status) { return status.st_uid == geteuid() && (status.st_mode & 0022) == 0; }

// Entries are opened relative to the folder's descriptor (openat): renaming a parent afterwards cannot substitute
// another folder.
Descriptor open_folder(const std::string& path) {
  Descriptor folder(path.empty() ? -1 : open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (folder && (fstat(folder.get(), &status) != 0 || !is_ours_alone(status) || (status.st_mode & 0077) != 0))
    folder.close();
  return folder;
}

// A process that is killed while it writes leaves its temporary file behind. Writing takes milliseconds, so a file that
// is an hour old is stale. `now` is the file system's clock, which may differ from this machine's. "KEY.cubin" is an
// entry, "KEY.cubin.PROCESS.NUMBER" one that is being written; `being_written` is ".cubin.".
void remove_leftovers(const Descriptor& folder, const timespec& now, const std::string& being_written) {
  const int again = openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const list = again < 0 ? nullptr : fdopendir(again);
  if (!list) {
    Descriptor(again).close();
    return;
  }
  while (const dirent* const entry = readdir(list)) {
    struct stat status {};
    if (std::strstr(entry->d_name, being_written.c_str()) &&
        fstatat(folder.get(), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
        status.st_mtim.tv_sec < now.tv_sec - 3600)
      unlinkat(folder.get(), entry->d_name, 0);
  }
  closedir(list);
}

}  // namespace

std::optional<std::vector<char>> DiskCache::read(const std::string& key) const {
  const Descriptor folder = open_folder(path);
  if (!folder) return {};
  const Descriptor file(openat(folder.get(), (key + ending).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!file || fstat(file.get(), &status) != 0 || !is_ours_alone(status)) return {};
  std::string reason;
  const std::optional<std::string> content = read_content(file, reason);
  if (!content || content->size() < 65 || (*content)[64] != '\n') return {};
  std::vector<char> cubin(content->begin() + 65, content->end());
  if (content->compare(0, 64, content_hash(cubin)) != 0) return {};
  return cubin;
}

void DiskCache::write(const std::string& key, const std::vector<char>& cubin) const {
  if (path.empty() || !make_folders(path)) return;
  const Descriptor folder = open_folder(path);
  if (!folder) return;
  static constinit std::atomic<int> count{0};
  const std::string entry = key + ending, head = content_hash(cubin) + "\n";
  // The clock makes names unique across containers that share the folder: their processes may have equal ids.
  const auto clock = std::chrono::system_clock::now().time_since_epoch().count();
  const std::string temporary = text(entry, ".", getpid(), "-", clock, ".", count++);
  Descriptor file(openat(folder.get(), temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) return;
  struct stat status {};
  bool good = write_all(file, head.data(), head.size()) && write_all(file, cubin.data(), cubin.size());
  good = good && fsync(file.get()) == 0 && fstat(file.get(), &status) == 0;
  good = file.close() && good;
  if (!good || renameat(folder.get(), temporary.c_str(), folder.get(), entry.c_str()) != 0)
    unlinkat(folder.get(), temporary.c_str(), 0);
  if (good) remove_leftovers(folder, status.st_mtim, text(ending, "."));
}

// --- dump, and the way to a cubin

namespace {

// $TESSERA_DUMP: a folder for source, PTX, cubin and log of each unit that is compiled.
void dump(const Unit& unit, const Compiled& compiled) {
  const char* folder = environment("TESSERA_DUMP");
  if (!folder || !*folder || !make_folders(folder)) return;
  const std::string stem = text(folder, "/", unit_key(unit).substr(0, 16), ".", unit.architecture);
  std::ofstream(stem + ".cu") << unit.text;
  std::ofstream(stem + ".ptx") << compiled.ptx;
  std::ofstream(stem + ".cubin", std::ios::binary)
      .write(compiled.cubin.data(), static_cast<std::streamsize>(compiled.cubin.size()));
  std::ofstream(stem + ".log") << compiled.log;
}

}  // namespace

std::vector<char> find_cubin(const Unit& unit) {
  const bool wants_dump = environment("TESSERA_DUMP") != nullptr;
  if (!wants_dump)
    if (auto packed = find_in_packs(unit_key(unit))) return *packed;
  const NvrtcOrReason& found = find_nvrtc();
  if (!found.nvrtc)
    throw Failure(TESSERA_DEVICE_ERROR, text(found.reason, ". Without it only packed kernels run, and this one is not ",
                                             "among them: ", packs_text()));
  const DiskCache disk(cache_folder());
  const std::string key = disk_key(unit, *found.nvrtc);
  if (!wants_dump)
    if (auto stored = disk.read(key)) return *stored;
  const Compiled compiled = compile(unit);
  dump(unit, compiled);
  disk.write(key, compiled.cubin);
  return compiled.cubin;
}

// --- memory

const LoadedKernel* find_kernel(const std::string& unit_text, const char* symbol, int device) {
  using Loading = std::shared_future<std::shared_ptr<const LoadedKernel>>;
  struct Known {
    std::mutex mutex;
    std::map<std::pair<int, std::string>, Loading> kernels;
  };
  static constinit Once<Known> known;
  auto& [mutex, kernels] = known.get([] { return Known(); });

  const std::pair<int, std::string> key{device, text(symbol, "\n", unit_text)};
  std::promise<std::shared_ptr<const LoadedKernel>> promise;
  Loading loading;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = kernels.find(key); found != kernels.end())
      loading = found->second;
    else
      kernels.emplace(key, promise.get_future().share());
  }
  if (loading.valid()) return loading.get().get();
  try {
    const std::vector<char> cubin = find_cubin({unit_text, properties(device).architecture()});
    auto kernel = std::make_shared<const LoadedKernel>(cubin, symbol, device);
    promise.set_value(kernel);
    return kernel.get();  // owned by the future in the map
  } catch (...) {
    // Waiting threads get the error; the entry is erased, so that the next call tries again.
    promise.set_exception(std::current_exception());
    const std::lock_guard lock(mutex);
    kernels.erase(key);
    throw;
  }
}

}  // namespace tessera::cuda
