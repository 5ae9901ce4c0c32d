// SPDX-License-Identifier: Apache-2.0
// Host overhead of a GPU call: a cold first call, which JIT-compiles or loads kernels, and a warm one, which only
// enqueues. Parts of `tessera bench --suite ladder`, and `--suite first-call`. See cli/bench.hpp. Method:
// docs/benchmarks.md.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "cli/bench.hpp"
#include "cli/failure.hpp"
#include "cli/gpu.hpp"
#include "cli/timing.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/cache.hpp"

extern char** environ;

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

// A head dimension that no pack has a cubin for: its first call compiles.
constexpr std::int64_t unpacked_dim = 72;

GpuAttention small_problem(std::int64_t N, std::int64_t D) {
  const std::vector<std::int64_t> size{1, N, 1, D};
  return {random_normal(Type::f32, size, 1), random_normal(Type::f32, size, 2), random_normal(Type::f32, size, 3),
          random_normal(Type::f32, size, 4)};
}

// Plans, runs and synchronises: what a program's first call costs.
double first_seconds(const GpuAttention& tensors, bool backward) {
  return seconds_of([&] {
    const GpuPass pass(tensors, backward, {}, nullptr);
    pass.enqueue();
    wait_for_gpu();
  });
}

std::size_t cached_kernels() {
  std::size_t count = 0;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(cuda::cache_folder(), none))
    count += entry.path().extension() == ".cubin";
  return count;
}

// A temporary folder, removed at the end of its scope.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "tessera_bench_XXXXXX").string();
    if (!mkdtemp(name.data()))
      throw Failure("no temporary folder could be made in " + fs::temp_directory_path().string() + ".");
    path = name;
  }
  ~TemporaryFolder() {
    std::error_code none;
    fs::remove_all(path, none);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  fs::path path;
};

struct FirstCalls {
  double forward = 0, backward = 0;  // seconds
  std::size_t compiled = 0;          // kernels
};

// Reads what bench_first_call() prints.
FirstCalls read_first_calls(const fs::path& printed) {
  FirstCalls calls;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(printed.c_str(), "r"), std::fclose);
  if (!file || std::fscanf(file.get(), " forward first call %lf s%*[^\n]", &calls.forward) != 1 ||
      std::fscanf(file.get(), " backward first call %lf s%*[^\n]", &calls.backward) != 1 ||
      std::fscanf(file.get(), " %zu kernels", &calls.compiled) != 1)
    throw Failure("`tessera bench --suite first-call` printed no figures in a process of its own.");
  return calls;
}

// Runs `tessera bench --suite first-call` in a process of its own with its own cache folder: a true cold start.
FirstCalls run_first_call(const fs::path& cache, const fs::path& printed) {
  std::vector<std::string> arguments{"tessera", "bench", "--suite", "first-call"};
  std::vector<std::string> variables{"TESSERA_CACHE=" + cache.string()};
  for (char** variable = environ; *variable; ++variable)
    if (std::strncmp(*variable, "TESSERA_CACHE=", 14) != 0) variables.push_back(*variable);
  const auto pointers = [](std::vector<std::string>& texts) {
    std::vector<char*> list;
    for (std::string& text : texts) list.push_back(text.data());
    list.push_back(nullptr);
    return list;
  };
  posix_spawn_file_actions_t into_file;
  posix_spawn_file_actions_init(&into_file);
  posix_spawn_file_actions_addopen(&into_file, STDOUT_FILENO, printed.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t child = 0;
  const int failed = posix_spawn(&child, "/proc/self/exe", &into_file, nullptr, pointers(arguments).data(),
                                 pointers(variables).data());
  posix_spawn_file_actions_destroy(&into_file);
  int status = 1;
  if (failed == 0) waitpid(child, &status, 0);
  if (failed != 0 || status != 0) throw Failure("`tessera bench --suite first-call` failed in a process of its own.");
  return read_first_calls(printed);
}

}  // namespace

int bench_first_call(const BenchArguments& a) {
  require_gpu("bench --suite first-call");
  const GpuAttention tensors = small_problem(256, unpacked_dim);  // warm-up: driver initialised, context created
  wait_for_gpu();
  const std::size_t before = cached_kernels();
  Json json;
  json["gpu"] = gpu_name();
  for (const bool backward : {false, true}) {
    const double seconds = first_seconds(tensors, backward);
    const double again = first_seconds(tensors, backward);
    json[backward ? "backward" : "forward"] = {{"seconds", seconds}, {"again", again}};
    std::printf("%-8s first call %.6f s, second call %.6f s (D=%lld)\n", backward ? "backward" : "forward", seconds,
                again, static_cast<long long>(unpacked_dim));
  }
  const std::size_t compiled = cached_kernels() - before;
  json["compiled"] = compiled;
  std::printf("%zu kernels were added to the cache %s\n", compiled, cuda::cache_folder().c_str());
  save_json(a.json, json);
  return 0;
}

Json measure_first_calls() {
  const TemporaryFolder folder;
  const fs::path cache = folder.path / "cache", printed = folder.path / "printed";
  const FirstCalls compiled = run_first_call(cache, printed), loaded = run_first_call(cache, printed);
  if (compiled.compiled == 0) throw Failure("first call: the kernels of D=72 were not compiled; are they packed?");
  if (loaded.compiled != 0) throw Failure("first call: a second process found nothing in the cache of the first.");
  Json json{{"kernels", compiled.compiled}};
  for (const bool backward : {false, true}) {
    const char* const pass = backward ? "backward" : "forward";
    const double first = backward ? compiled.backward : compiled.forward;
    const double disk = backward ? loaded.backward : loaded.forward;
    json[pass] = {{"compiled_seconds", first}, {"from_disk_seconds", disk}};
    std::printf("%-8s first call: %s compiled, %s from the disk cache\n", pass, time_text(first).c_str(),
                time_text(disk).c_str());
  }
  return json;
}

Json measure_repeated_calls() {
  constexpr int batches = 60, calls = 50;  // fewer launches in flight than would fill the driver's queue and block
  const GpuAttention tensors = small_problem(64, 64);
  const cuda::CurrentDevice current(first_gpu.id);  // as in a program that uses the CUDA runtime
  Json json;
  for (const bool backward : {false, true}) {
    const GpuPass pass(tensors, backward, {}, nullptr);
    std::vector<double> times;
    for (int batch = 0; batch < batches; ++batch) {
      for (int call = 0; call < calls; ++call) times.push_back(seconds_of([&] { pass.enqueue(); }));
      wait_for_gpu();
    }
    const double seconds = median(times);
    json[backward ? "backward" : "forward"] = seconds;
    std::printf("%-8s repeated call: %.1f us on the host (median of %zu)\n", backward ? "backward" : "forward",
                seconds * 1e6, times.size());
  }
  return json;
}

}  // namespace tessera::cli
