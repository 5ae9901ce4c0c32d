// The runtime is found among the loaded libraries; nothing is linked. Every one offers gcc's entry points, clang's and
// Intel's too: the first is what `#pragma omp parallel` compiles to.
//
// Why: threads of OpenMP keep spinning for milliseconds after a parallel region, in case there is another. A second
// pool would share the processors with them and run at half speed, which is what a model that alternates between our
// calls and the runtime's would see. Its threads, spinning, also start sooner than any that sleeps.
#include "core/openmp.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "core/environment.hpp"

namespace tessera {
namespace {

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags) = nullptr;
  int (*max_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
};

bool is_openmp(const char* path) {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash ? slash + 1 : path;
  for (const char* known : {"libgomp", "libomp", "libiomp5"})
    if (std::strncmp(name, known, std::strlen(known)) == 0) return true;
  return false;
}

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// The first runtime in the order in which libraries were loaded. It is never unloaded from then on.
Runtime search() {
  std::vector<std::string> paths;
  dl_iterate_phdr(  // which holds a lock that dlopen takes second
      [](dl_phdr_info* info, std::size_t, void* result) {
        if (info->dlpi_name && is_openmp(info->dlpi_name))
          static_cast<std::vector<std::string>*>(result)->emplace_back(info->dlpi_name);
        return 0;
      },
      &paths);
  for (const std::string& path : paths) {
    Runtime runtime;
    void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (library && find(library, "GOMP_parallel", runtime.parallel) &&
        find(library, "omp_get_max_threads", runtime.max_threads) &&
        find(library, "omp_in_parallel", runtime.in_parallel))
      return runtime;
  }
  return {};
}

// How many libraries have been loaded so far.
unsigned long long count_loads() {
  unsigned long long count = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        *static_cast<unsigned long long*>(result) = info->dlpi_adds;
        return 1;
      },
      &count);
  return count;
}

// Searches again when libraries have been loaded since.
Runtime runtime() {
  static std::mutex mutex;
  static unsigned long long loads_seen = 0;
  static Runtime found;
  const std::lock_guard lock(mutex);
  if (found.parallel) return found;
  const unsigned long long loads = count_loads();
  if (loads != loads_seen) found = search(), loads_seen = loads;
  return found;
}

std::atomic<bool> forked{false};

// From the moment when the library is loaded: the runtime may have been used before the first call.
[[maybe_unused]] const int watching_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Region {
  Time (*work)(void*);
  void* context;
  std::atomic<Time::rep> busy{0};
};

void take_part(void* argument) {
  Region& region = *static_cast<Region*>(argument);
  region.busy += region.work(region.context).count();
}

}  // namespace

bool run_on_openmp(int threads, Time (*work)(void*), void* context) {
  static const bool allowed = [] {
    const char* wish = environment("TESSERA_OPENMP");
    return !wish || std::strcmp(wish, "0") != 0;
  }();
  if (!allowed) return false;
  if (forked) return false;
  const Runtime openmp = runtime();
  if (!openmp.parallel || openmp.max_threads() < threads || openmp.in_parallel()) return false;
  // A runtime has threads for each that calls it; two calls at once have better use for ours.
  static std::mutex region_mutex;
  const std::unique_lock in_use(region_mutex, std::try_to_lock);
  if (!in_use) return false;
  static Patience patience;
  const Time begin = time_now();
  if (patience.ended(begin)) return false;
  Region region{work, context};
  openmp.parallel(take_part, &region, 0, 0);  // as many as the caller's own: with fewer, gcc's ends the others
  const Time end = time_now();
  patience.add(end, end - begin, Time(region.busy), threads);
  return true;
}

}  // namespace tessera
