// SPDX-License-Identifier: Apache-2.0
// Packs of compiled kernels; see pack.hpp.
#include "cuda/jit/pack.hpp"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "core/parallel.hpp"
#include "cuda/jit/cache.hpp"
#include "cuda/jit/file.hpp"
#include "cuda/jit/sha256.hpp"

namespace tessera::cuda {

// --- making

Pack make_pack(const std::vector<NamedUnit>& units, const Pack& old, int threads,
               const std::function<void(const NamedUnit&, const Compiled&)>& on_compiled) {
  Pack pack;
  std::vector<std::pair<const NamedUnit*, PackedKernel*>> missing;
  for (const NamedUnit& named : units) {
    const std::string key = unit_key(named.unit);
    if (pack.contains(key)) continue;
    PackedKernel& kernel = pack[key];
    const auto found = old.find(key);
    if (found != old.end()) kernel.cubin = found->second.cubin;
    if (found == old.end()) missing.emplace_back(&named, &kernel);
    kernel.architecture = named.unit.architecture, kernel.kernel = named.kernel, kernel.variant = named.variant;
  }
  std::mutex mutex;
  parallel_for(static_cast<std::int64_t>(missing.size()), threads, [&](std::int64_t index, int) {
    const auto& [named, kernel] = missing[static_cast<std::size_t>(index)];
    const Compiled compiled = compile(named->unit);
    kernel->cubin = compiled.cubin;
    const std::lock_guard lock(mutex);
    on_compiled(*named, compiled);
  });
  return pack;
}

// --- the file format

namespace {

constexpr std::string_view magic = "TESSERA PACK 1\n";
constexpr std::size_t hash_digits = 64, size_digits = 16;

void add_field(std::string& out, std::string_view bytes) {
  std::string size(size_digits, '0');
  for (std::size_t n = bytes.size(), i = size_digits; i-- > 0; n >>= 4) size[i] = "0123456789abcdef"[n & 15];
  out += size;
  out += bytes;
}

[[noreturn]] void damaged() { throw Failure(TESSERA_DEVICE_ERROR, "this is not a pack of kernels, or it is damaged"); }

std::string_view take(std::string_view& bytes, std::size_t count) {
  if (bytes.size() < count) damaged();
  const std::string_view taken = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return taken;
}

std::string_view take_field(std::string_view& bytes) {
  const std::string_view digits = take(bytes, size_digits);
  std::size_t count = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), count, 16);
  if (error != std::errc{} || end != digits.end()) damaged();
  return take(bytes, count);
}

// The embedded pack is as trustworthy as the library's code: its checksum is not verified, which saves time at every
// start.
enum class Trust { checked, unchecked };

Pack parse(std::string_view bytes, Trust trust) {
  if (take(bytes, std::min(magic.size(), bytes.size())) != magic) damaged();
  const std::string_view hash = take(bytes, hash_digits);
  if (trust == Trust::checked && hash != Sha256().add(bytes).hex()) damaged();
  Pack pack;
  while (!bytes.empty()) {
    const auto [place, is_new] = pack.try_emplace(std::string(take_field(bytes)));
    if (!is_new) damaged();
    PackedKernel& kernel = place->second;
    kernel.architecture = take_field(bytes), kernel.kernel = take_field(bytes), kernel.variant = take_field(bytes);
    const std::string_view cubin = take_field(bytes);
    kernel.cubin.assign(cubin.begin(), cubin.end());
  }
  return pack;
}

}  // namespace

std::string write_pack(const Pack& pack) {
  std::string body;
  for (const auto& [key, kernel] : pack) {
    for (const std::string& field : {key, kernel.architecture, kernel.kernel, kernel.variant}) add_field(body, field);
    add_field(body, {kernel.cubin.data(), kernel.cubin.size()});
  }
  return text(magic, Sha256().add(body).hex(), body);
}

Pack read_pack(std::string_view bytes) { return parse(bytes, Trust::checked); }

Pack read_pack_file(const std::string& path) {
  std::string reason;
  const std::optional<std::string> content = read_file(path, reason);
  if (!content) throw Failure(TESSERA_DEVICE_ERROR, text("pack ", path, ": cannot be read: ", reason));
  try {
    return read_pack(*content);
  } catch (const Failure& failure) {
    throw Failure(failure.status, text("pack ", path, ": ", failure.what()));
  }
}

void write_pack_file(const std::string& path, const Pack& pack) {
  const std::string temporary = text(path, ".", getpid()), content = write_pack(pack);
  const auto refuse = [&](const char* reason) {
    throw Failure(TESSERA_DEVICE_ERROR, text("pack ", path, ": cannot be written: ", reason));
  };
  unlink(temporary.c_str());  // stale: of a killed process that had this id
  Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file) refuse(std::strerror(errno));
  const bool good = write_all(file, content.data(), content.size()) && fsync(file.get()) == 0 && file.close();
  if (!good || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(temporary.c_str());
    refuse(std::strerror(error));
  }
}

// --- the packs of this process

namespace {

struct Place {
  std::string name;
  Pack pack;
};

// An unreadable $TESSERA_PACK is an error at every look-up, not ignored: whoever set it wants it to be used.
const std::vector<Place>& places() {
  static constinit Once<const std::vector<Place>> list;
  return list.get([] {
    std::vector<Place> out;
    if (!embedded_pack().empty()) out.push_back({"the library", parse(embedded_pack(), Trust::unchecked)});
    if (const char* path = environment("TESSERA_PACK"); path && *path) out.push_back({path, read_pack_file(path)});
    return out;
  });
}

// Architecture -> kernel -> its variants.
using Contents = std::map<std::string, std::map<std::string, std::vector<std::string>>>;

Contents contents_of(const Pack& pack) {
  Contents contents;
  for (const auto& [key, k] : pack) contents[k.architecture][k.kernel].push_back(k.variant);
  return contents;
}

template <class Items, class ToText>
std::string joined(const Items& items, const char* separator, const ToText& to_text) {
  std::string out;
  for (const auto& item : items) out += text(out.empty() ? "" : separator, to_text(item));
  return out;
}

}  // namespace

std::optional<std::vector<char>> find_in_packs(const std::string& unit_key) {
  for (const Place& place : places())
    if (const auto found = place.pack.find(unit_key); found != place.pack.end()) return found->second.cubin;
  return {};
}

std::string packs_summary() {
  const std::string out = joined(places(), "; ", [](const Place& place) {
    const std::string counts = joined(contents_of(place.pack), " and ", [](const auto& architecture) {
      std::size_t count = 0;
      for (const auto& [kernel, variants] : architecture.second) count += variants.size();
      return text(count, " kernels for ", architecture.first);
    });
    return text(counts.empty() ? "no kernels" : counts, " in ", place.name);
  });
  return out.empty() ? "no kernels" : out;
}

std::string packs_text() {
  const std::string out = joined(places(), "; ", [](const Place& place) {
    const std::string lists = joined(contents_of(place.pack), "; ", [](const auto& architecture) {
      const std::string kernels = joined(architecture.second, ", ", [](const auto& kernel) {
        return text(kernel.first, " (", joined(kernel.second, ", ", [](const std::string& v) { return v; }), ")");
      });
      return text("for ", architecture.first, " ", kernels);
    });
    return text(place.name, " holds ", lists.empty() ? "none" : lists);
  });
  return out.empty() ? "the library was built without any" : out;
}

}  // namespace tessera::cuda
