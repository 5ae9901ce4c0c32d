// The caches of compiled kernels; see cache.hpp.
#include "cuda/jit/cache.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "core/failure.hpp"
#include "cuda/device.hpp"
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
  if (const char* folder = std::getenv("TESSERA_CACHE")) return folder;
  const char* xdg = std::getenv("XDG_CACHE_HOME");
  if (xdg && *xdg) return text(xdg, "/tessera");
  const char* home = std::getenv("HOME");
  return home && *home ? text(home, "/.cache/tessera") : "";
}

// --- disk

namespace {

std::string content_hash(const std::vector<char>& bytes) { return Sha256().add({bytes.data(), bytes.size()}).hex(); }

// A key for the disk names the compiler too: another version may compile better.
std::string disk_key(const Unit& unit, const Nvrtc& nvrtc) {
  return Sha256().add_field(unit_key(unit)).add_field(text(nvrtc.major, ".", nvrtc.minor)).hex();
}

bool make_folders(const std::string& path) {
  for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1))
    mkdir(path.substr(0, slash).c_str(), 0700);  // exists already, mostly
  return mkdir(path.c_str(), 0700) == 0 || errno == EEXIST;
}

bool write_all(int file, const char* bytes, std::size_t count) {
  while (count > 0) {
    const ssize_t written = ::write(file, bytes, count);
    if (written <= 0) return false;
    bytes += written, count -= static_cast<std::size_t>(written);
  }
  return true;
}

}  // namespace

bool DiskCache::usable(bool create) const {
  if (folder.empty()) return false;
  if (create && !make_folders(folder)) return false;
  struct stat status;
  if (lstat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) return false;
  return status.st_uid == geteuid() && (status.st_mode & 0077) == 0;
}

std::optional<std::vector<char>> DiskCache::read(const std::string& key) const {
  if (!usable(false)) return {};
  std::ifstream file(path(key), std::ios::binary);
  if (!file) return {};
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  if (content.size() < 65 || content[64] != '\n') return {};
  std::vector<char> cubin(content.begin() + 65, content.end());
  if (content.substr(0, 64) != content_hash(cubin)) return {};
  return cubin;
}

void DiskCache::write(const std::string& key, const std::vector<char>& cubin) const {
  if (!usable(true)) return;
  static std::atomic<int> count{0};
  const std::string temporary = text(path(key), ".", getpid(), ".", count++);
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return;
  const std::string head = content_hash(cubin) + "\n";
  bool good = write_all(file, head.data(), head.size()) && write_all(file, cubin.data(), cubin.size());
  good = fsync(file) == 0 && good;
  close(file);
  if (!good || rename(temporary.c_str(), path(key).c_str()) != 0) unlink(temporary.c_str());
}

// --- dump, and the way to a cubin

namespace {

// $TESSERA_DUMP: a folder for everything about each unit that is compiled.
void dump(const Unit& unit, const Compiled& compiled) {
  const char* folder = std::getenv("TESSERA_DUMP");
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
  const bool wants_dump = std::getenv("TESSERA_DUMP") != nullptr;
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
  static std::mutex mutex;
  static std::map<std::pair<int, std::string>, Loading> kernels;

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
    return kernel.get();  // the map's future keeps it
  } catch (...) {
    // Those who wait get the error; the next to ask tries again.
    promise.set_exception(std::current_exception());
    const std::lock_guard lock(mutex);
    kernels.erase(key);
    throw;
  }
}

}  // namespace tessera::cuda
