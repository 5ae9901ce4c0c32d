// SPDX-License-Identifier: Apache-2.0
// cpu_baselines [--threads N] [--json FILE]: Tessera beside two baselines of CPU attention, interleaved in one process:
// one row at a time (bench/row_by_row.hpp) and through a BLAS library (bench/unfused_blas.hpp). Method and figures:
// docs/benchmarks.md.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>
#include <string>

#include "bench/row_by_row.hpp"
#include "bench/unfused_blas.hpp"
#include "cases/buffer.hpp"
#include "tessera/tessera.hpp"

namespace tessera::bench {
namespace {

struct Row {
  Type type;
  std::int64_t queries, keys, dim;
  bool causal = false, backward = false;
  std::int64_t heads = 8, kv_heads = 8;

  bool decodes() const { return queries == 1; }
  double work() const {  // operations, or bytes of K and V
    if (decodes()) return 2.0 * double(keys * kv_heads * dim) * (type == Type::f32 ? 4 : 2);
    return 4.0 * double(heads * queries * keys * dim) * (backward ? 2.5 : 1) / (causal ? 2 : 1);
  }
  std::string name() const {
    std::string out = cases::name_of(type) + std::string(" ") + std::to_string(keys) + "," + std::to_string(dim);
    out += decodes() ? " one query" : causal ? " causal" : " full";
    if (heads != kv_heads) (out += ' ') += std::to_string(heads) + "/" + std::to_string(kv_heads);
    return out += decodes() ? "" : backward ? " backward" : " forward";
  }
};

std::vector<Row> rows() {
  std::vector<Row> list;
  for (const Type type : {Type::f32, Type::f16, Type::bf16}) {
    for (const auto& [n, dim] : {std::pair<std::int64_t, std::int64_t>{512, 64}, {2048, 64}, {2048, 128}})
      for (const bool backward : {false, true})
        if (type == Type::f32 || !backward) list.push_back({type, n, n, dim, false, backward});
    list.push_back({type, 2048, 2048, 128, true, false});
    list.push_back({type, 1, 8192, 128});
    list.push_back({type, 1, 8192, 128, false, false, 32, 8});
  }
  return list;
}

// A tensor [1,n,heads,dim] of normally distributed numbers.
cases::Buffer numbers(Type type, std::int64_t n, std::int64_t heads, std::int64_t dim, unsigned seed) {
  cases::Buffer buffer(type, {1, n, heads, dim});
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t e = 0; e < buffer.elements(); ++e) buffer.set(e, double(normal(bits)));
  return buffer;
}

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Contender {
  const char* name;
  std::function<void()> call;  // empty: cannot run this problem
  double seconds = 0;
};

// Interleaved rounds, each measurement at least 20 ms long; medians.
void measure(std::vector<Contender>& contenders) {
  constexpr int rounds = 7;
  for (Contender& c : contenders)
    if (c.call) c.call(), c.call();
  std::vector<std::vector<double>> times(contenders.size());
  for (int round = 0; round < rounds; ++round)
    for (std::size_t n = 0; n < contenders.size(); ++n) {
      if (!contenders[n].call) continue;
      double sum = 0;
      int calls = 0;
      for (; sum < 0.02; ++calls) sum += seconds_of(contenders[n].call);
      times[n].push_back(sum / calls);
    }
  for (std::size_t n = 0; n < contenders.size(); ++n) {
    if (times[n].empty()) continue;
    std::nth_element(times[n].begin(), times[n].begin() + rounds / 2, times[n].end());
    contenders[n].seconds = times[n][rounds / 2];
  }
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t n = 0; n < a.size(); ++n) most = std::max(most, std::fabs(double(a[n]) - double(b[n])));
  return most;
}

// One row: three contenders over the same tensors. Tessera writes O as f32, as the baselines do.
std::vector<Contender> run(const Row& row, int threads, const Blas& blas, double& difference) {
  const std::int64_t q_count = row.queries * row.heads * row.dim, k_count = row.keys * row.kv_heads * row.dim;
  const cases::Buffer q = numbers(row.type, row.queries, row.heads, row.dim, 1),
                      k = numbers(row.type, row.keys, row.kv_heads, row.dim, 2),
                      v = numbers(row.type, row.keys, row.kv_heads, row.dim, 3),
                      d_o = numbers(row.type, row.queries, row.heads, row.dim, 4);
  const auto floats = [](std::int64_t count) { return std::vector<float>(static_cast<std::size_t>(count)); };
  std::vector<float> o = floats(q_count), lse = floats(row.queries * row.heads), other = o, third = o;
  std::vector<float> dq = floats(q_count), dk = floats(k_count), dv = dk, dq2 = dq, dk2 = dk, dv2 = dk;
  const auto tensor = [&](std::vector<float>& x, std::int64_t n, std::int64_t heads) {
    return Tensor(x.data(), Type::f32, {1, n, heads, row.dim});
  };
  Inputs in;
  in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor();
  const Outputs out{.o = tensor(o, row.queries, row.heads),
                    .lse = Tensor(lse.data(), Type::f32, {1, row.heads, row.queries})};
  const Saved saved{.o = out.o, .lse = out.lse, .d_o = d_o.tensor()};
  const Gradients gradients{.dq = tensor(dq, row.queries, row.heads),
                            .dk = tensor(dk, row.keys, row.kv_heads),
                            .dv = tensor(dv, row.keys, row.kv_heads)};
  Options options;
  options.causal = row.causal;
  Execution execution{.threads = threads};
  const Plan plan = row.backward ? Plan::backward(in, saved, gradients, options, execution)
                                 : Plan::forward(in, out, options, execution);
  std::vector<char> workspace(plan.workspace_size());
  execution.workspace = workspace.data(), execution.workspace_bytes = workspace.size();

  const Problem problem{.type = row.type,
                        .queries = row.queries,
                        .keys = row.keys,
                        .heads = row.heads,
                        .kv_heads = row.kv_heads,
                        .dim = row.dim,
                        .causal = row.causal,
                        .threads = threads,
                        .q = in.q.data,
                        .k = in.k.data,
                        .v = in.v.data};
  Unfused unfused(blas, problem);
  const bool plain = blas && row.type == Type::f32;
  if (row.backward) {
    forward(in, out, options, {.threads = threads});
    if (plain) unfused.forward(other.data());
  }
  std::vector<Contender> contenders{{"tessera", {}}, {"rows", {}}, {"blas", {}}};
  if (row.backward) {
    contenders[0].call = [&] { plan.run(in, saved, gradients, options, execution); };
    if (plain)
      contenders[2].call = [&] {
        unfused.backward(o.data(), static_cast<const float*>(d_o.tensor().data), dq2.data(), dk2.data(), dv2.data());
      };
  } else {
    contenders[0].call = [&] { plan.run(in, out, options, execution); };
    if (row_by_row_usable()) contenders[1].call = [&] { row_by_row(problem, third.data()); };
    if (plain) contenders[2].call = [&] { unfused.forward(other.data()); };
  }
  measure(contenders);
  difference = 0;
  if (contenders[1].call) difference = std::max(difference, largest_difference(o, third));
  if (contenders[2].call && !row.backward) difference = std::max(difference, largest_difference(o, other));
  if (contenders[2].call && row.backward)
    for (const auto& [ours, theirs] : {std::pair{&dq, &dq2}, {&dk, &dk2}, {&dv, &dv2}})
      difference = std::max(difference, largest_difference(*ours, *theirs));
  for (Contender& c : contenders) c.call = {};
  return contenders;
}

int main_of(int argc, char** argv) {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  std::string json;
  for (int n = 1; n < argc; n += 2) {
    const std::string flag = argv[n];
    const char* value = n + 1 < argc ? argv[n + 1] : nullptr;
    if (flag == "--threads" && value && std::atoi(value) > 0) {
      threads = std::atoi(value);
    } else if (flag == "--json" && value) {
      json = value;
    } else {
      std::fprintf(stderr, "usage: cpu_baselines [--threads N] [--json FILE]; not understood: %s\n", flag.c_str());
      return 2;
    }
  }
  const Blas blas;
  std::printf("%d threads; rows: one query row at a time; blas: unfused through %s\n\n", threads,
              blas ? blas.name().c_str() : "OpenBLAS, which was not found");
  std::printf("%-34s%10s%10s%10s%9s%9s%12s\n", "", "tessera", "rows", "blas", "vs rows", "vs blas", "difference");
  std::string text;
  bool right = true;
  for (const Row& row : rows()) {
    double difference = 0;
    const std::vector<Contender> c = run(row, threads, blas, difference);
    // bf16 rounds P; the others agree to f32's rounding.
    right = right && difference < (row.type == Type::bf16 ? 2e-2 : row.backward ? 1e-3 : 1e-4);
    std::printf("%-34s", row.name().c_str());
    text += (text.empty() ? "" : ",\n") + std::string("  {\"row\": \"") + row.name() + "\"";
    for (const Contender& one : c) {
      if (one.seconds == 0) std::printf("%10s", "-");
      if (one.seconds == 0) continue;
      std::printf("%10.1f", row.work() / one.seconds / 1e9);
      text += std::string(", \"") + one.name + "\": " + std::to_string(row.work() / one.seconds / 1e9);
    }
    for (const std::size_t n : {1u, 2u})
      c[n].seconds == 0 ? std::printf("%9s", "-") : std::printf("%8.2fx", c[n].seconds / c[0].seconds);
    std::printf("%12.1e\n", difference);
    std::fflush(stdout);
    text += "}";
  }
  std::printf(
      "\nGF/s by 4 H N N D forward, 2.5 times that backward, half of it causal; one query: GB/s of K and V.\n"
      "Medians of rounds in turn. Difference: the largest, from Tessera's results.\n");
  if (!json.empty()) std::ofstream(json) << "{\"threads\": " << threads << ", \"rows\": [\n" << text << "\n]}\n";
  if (!right) std::fprintf(stderr, "cpu_baselines: the results differ by more than rounding\n");
  return right ? 0 : 1;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) { return tessera::bench::main_of(argc, argv); }
