// SPDX-License-Identifier: Apache-2.0
// The runtime is found among the loaded libraries; nothing is linked. Every one offers gcc's entry points, clang's and
// Intel's too: the first is what `#pragma omp parallel` compiles to.
//
// Why: threads of OpenMP busy-wait for milliseconds after a parallel region, in case there is another. A second pool
// would oversubscribe the processors and run at half speed, as a model would see that alternates between our calls and
// the runtime's. Its spinning threads also start sooner than any that sleeps.
#include "core/openmp.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "core/environment.hpp"
#include "core/fork.hpp"
#include "core/per_thread.hpp"

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
  struct Paths {
    char text[4][4096];
    std::size_t count = 0;
  } paths;
  dl_iterate_phdr(  // which holds a lock that dlopen takes second
      [](dl_phdr_info* info, std::size_t, void* result) {
        auto& [text, count] = *static_cast<Paths*>(result);
        if (count == std::size(text)) return 1;
        if (info->dlpi_name && is_openmp(info->dlpi_name) && std::strlen(info->dlpi_name) < sizeof(text[0]))
          std::strcpy(text[count++], info->dlpi_name);
        return 0;
      },
      &paths);
  for (std::size_t n = 0; n < paths.count; ++n) {
    Runtime runtime;
    void* library = dlopen(paths.text[n], RTLD_LAZY | RTLD_NOLOAD);
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

// Searches again when libraries have been loaded since. Its lock is not taken in a forked child, nor are the others.
Runtime runtime() {
  static constinit std::mutex mutex;
  static constinit unsigned long long loads_seen = 0;
  static constinit Runtime found;
  const std::lock_guard lock(mutex);
  if (found.parallel) return found;
  const unsigned long long loads = count_loads();
  if (loads != loads_seen) found = search(), loads_seen = loads;
  return found;
}

// --- threads that a region would have to make

// Threads of regions that have ended since, and those of whom it is not known.
constinit std::atomic<unsigned> members_lost{0};

// Of a thread that has taken part in a region.
struct Member {
  ~Member() { ++members_lost; }
};

// Whether the system would make so many threads now: it makes them, and they end.
bool threads_can_be_made(int count) {
  const std::unique_ptr<pthread_t[]> threads(new (std::nothrow) pthread_t[static_cast<std::size_t>(count)]);
  if (!threads) return false;
  std::mutex all_made;
  const auto wait = [](void* gate) -> void* {
    const std::lock_guard lock(*static_cast<std::mutex*>(gate));
    return nullptr;
  };
  int made = 0;
  {
    const std::lock_guard lock(all_made);
    while (made < count && pthread_create(&threads[static_cast<std::size_t>(made)], nullptr, wait, &all_made) == 0)
      ++made;
  }
  for (int n = 0; n < made; ++n) pthread_join(threads[static_cast<std::size_t>(n)], nullptr);
  return made == count;
}

// The regions of one calling thread, for which a runtime keeps threads of their own. So only few callers get one.
class Team {
 public:
  ~Team() {
    if (has_place) --places_taken;
  }

  // Whether a region of so many threads will have them: the last one's are still there, or the system makes as many.
  // A runtime that is refused a thread ends the process.
  bool may_begin(int threads) {
    if (!has_place && !take_place()) return false;
    const unsigned lost = members_lost;
    if (threads <= size && lost == lost_before) return true;
    if (!threads_can_be_made(threads - 1)) return false;
    size = threads, lost_before = lost;
    return true;
  }

 private:
  static constexpr int most_teams = 2;
  static constinit std::atomic<int> places_taken;

  bool take_place() {
    has_place = places_taken.fetch_add(1) < most_teams;
    if (!has_place) --places_taken;
    return has_place;
  }

  bool has_place = false;
  int size = 0;
  unsigned lost_before = 0;
};

constinit std::atomic<int> Team::places_taken{0};

// --- regions

// `work` is published and `busy` collected by atomics, though the runtime hands memory over too: ThreadSanitizer does
// not see what the runtime does, and would take every task for a race.
struct Region {
  std::atomic<Time (*)(void*)> work{nullptr};
  void* context;
  std::atomic<Time::rep> busy{0};
};

void take_part(void* argument) {
  static constinit PerThread<Member> members;
  if (!members.get()) ++members_lost;
  Region& region = *static_cast<Region*>(argument);
  const auto work = region.work.load();
  region.busy += work(region.context).count();
}

}  // namespace

// $TESSERA_OPENMP is looked at once.
static bool switched_off() {
  enum { unknown, off, on };
  static constinit std::atomic<int> state{unknown};
  if (state == unknown) {
    const char* wish = environment("TESSERA_OPENMP");
    state = wish && std::strcmp(wish, "0") == 0 ? off : on;
  }
  return state == off;
}

bool run_on_openmp(int threads, Time (*work)(void*), void* context) {
  if (fork_count() > 0 || !forks_are_noticed() || switched_off()) return false;
  const Runtime openmp = runtime();
  if (!openmp.parallel || openmp.in_parallel()) return false;
  const int size = openmp.max_threads();
  if (size < threads) return false;
  // A runtime has threads for each that calls it; two calls at once have better use for ours.
  static constinit std::mutex region_mutex;
  const std::unique_lock in_use(region_mutex, std::try_to_lock);
  if (!in_use) return false;
  static constinit Patience patience;
  if (patience.ended(time_now())) return false;
  static constinit PerThread<Team> teams;
  Team* team = teams.get();
  if (!team || !team->may_begin(size)) return false;
  const Time begin = time_now();
  Region region{.context = context};
  region.work = work;
  openmp.parallel(take_part, &region, 0, 0);  // as many as the caller's own: with fewer, gcc's ends the others
  const Time end = time_now();
  patience.add(end, end - begin, Time(region.busy), threads);
  return true;
}

}  // namespace tessera
