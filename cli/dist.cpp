// SPDX-License-Identifier: Apache-2.0
// `tessera dist`: several ranks without a network. `plan` says what each rank has to do, `check` judges schedules,
// `bits` runs ranks as threads and compares their results bit by bit, `faults` lets one of them fail, `measure` times a
// rank's calls, `simulate` whole schedules on a machine given in numbers. Implements docs/scale_out.md.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "cli/dist.hpp"
#include "cli/dist_times.hpp"
#include "cli/failure.hpp"
#include "cli/files.hpp"
#include "cli/flags.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"
#include "dist/attention.hpp"
#include "dist/cost.hpp"
#include "dist/simulate.hpp"
#include "dist/threads.hpp"

namespace tessera::cli {
namespace {

using namespace tessera::dist;

struct Arguments {
  std::string what, scheme = "gather", json, times, out, device = "cpu";
  std::vector<std::int64_t> ranks, tokens;
  std::int64_t heads = 32, kv_heads = 8, dim = 128, slices = 0, segment = 0, align = 128;
  std::string partition = "zigzag";
  std::int64_t left = -1, right = -1;
  bool full = false;
  double timeout = 1;
  double forward = 700, backward = 600, call = 15, link = 50, node_link = 450, latency = 5;
};

Scheme scheme_of(const Arguments& a) { return a.scheme == "ring" ? Scheme::ring : Scheme::gather; }

// --- plan

Partition partition_of(const Arguments& a, const std::vector<Int64>& lengths, const Mask& mask, int nodes) {
  if (a.partition == "zigzag") return zigzag(lengths, nodes, a.align);
  if (a.partition == "contiguous") return contiguous(lengths, nodes, a.align);
  return balanced(lengths, mask, nodes, a.align);
}

// --tokens are the documents here.
int plan(const Arguments& a, Json& rows) {
  std::vector<Int64> lengths(a.tokens.begin(), a.tokens.end());
  if (lengths.empty()) lengths = {1 << 20};
  const Shape shape{a.heads, a.kv_heads, a.dim, a.dim, 2};
  const Mask mask{!a.full, a.left, a.right, 0};
  for (const std::int64_t ranks : a.ranks.empty() ? std::vector<std::int64_t>{8} : a.ranks) {
    const int slices = static_cast<int>(std::max<std::int64_t>(a.slices, 1));
    if (ranks % slices != 0 || slices > a.kv_heads)
      throw Failure("--slices: is " + std::to_string(slices) + "; must divide the " + std::to_string(ranks) +
                    " ranks, and be at most the " + std::to_string(a.kv_heads) + " key heads.");
    const Partition partition = two_level(partition_of(a, lengths, mask, static_cast<int>(ranks) / slices), slices, 1);
    const auto make = [&](Pass pass) {
      return make_schedule(lengths, mask, partition, {scheme_of(a), pass, a.segment});
    };
    const Schedule forward = make(Pass::forward), backward = make(Pass::backward);
    std::printf("%lld ranks, %s, %s%s, %lld and %lld heads of %lld, 16 bits\n%s", static_cast<long long>(ranks),
                a.scheme.c_str(), a.partition.c_str(),
                slices > 1 ? (", " + std::to_string(slices) + " slices").c_str() : "", static_cast<long long>(a.heads),
                static_cast<long long>(a.kv_heads), static_cast<long long>(a.dim),
                table(forward, backward, shape).c_str());
    const std::vector<RankCost> f = rank_costs(forward, shape), b = rank_costs(backward, shape);
    for (std::size_t r = 0; r < f.size(); ++r)
      rows.push_back({{"ranks", ranks},
                      {"rank", static_cast<std::int64_t>(r)},
                      {"rows", f[r].rows},
                      {"forward_steps", f[r].steps},
                      {"forward_sent", f[r].sent},
                      {"forward_received", f[r].received},
                      {"forward_memory", f[r].memory},
                      {"backward_steps", b[r].steps},
                      {"backward_sent", b[r].sent},
                      {"backward_received", b[r].received},
                      {"backward_memory", b[r].memory},
                      {"work", f[r].pairs}});
  }
  return 0;
}

// --- check

int check(const Arguments& a, Json& rows) {
  int wrong = 0;
  for (const std::int64_t n : a.ranks.empty() ? std::vector<std::int64_t>{2, 3, 4, 8, 64, 512} : a.ranks) {
    const std::vector<Int64> lengths{a.tokens.empty() ? 2 * n * a.align : a.tokens[0]};
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Schedule s = make_schedule(lengths, {.causal = true}, zigzag(lengths, static_cast<int>(n), a.align),
                                       {scheme_of(a), pass, 0});
      const Judgement judgement = check_schedule(s, a.align);
      std::printf("%s, %s, %lld ranks: %s, balance %.3f\n", a.scheme.c_str(),
                  pass == Pass::forward ? "forward" : "backward", static_cast<long long>(n),
                  judgement.fault.empty() ? "covered once, matched, slots safe" : judgement.fault.c_str(),
                  judgement.balance);
      wrong += !judgement.fault.empty();
      rows.push_back({{"scheme", a.scheme},
                      {"pass", pass == Pass::forward ? "forward" : "backward"},
                      {"ranks", n},
                      {"fault", judgement.fault},
                      {"balance", judgement.balance}});
    }
  }
  return wrong != 0;
}

// --- bits

// Rows of all tokens, or of one rank: [rows][heads][width] in f32.
struct Numbers {
  std::vector<float> values;
  Int64 row = 0;  // numbers of one
};

struct Run {
  Problem problem;
  std::map<std::string, Numbers> of;

  explicit Run(const Arguments& a) {
    const Int64 tokens = a.tokens.empty() ? 16 * a.segment : a.tokens[0];
    problem = {{tokens}, 8, 8, 64, 64, Type::f32, {.causal = true}};
    for (const char* name : {"q", "k", "v", "dO", "O", "dQ", "dK", "dV"}) of[name].row = 8 * 64;
    of["LSE"].row = 8;
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    for (auto& [name, x] : of) x.values.resize(static_cast<std::size_t>(tokens * x.row));
    for (const char* name : {"q", "k", "v", "dO"})
      for (float& x : of[name].values) x = normal(engine);
  }

  void rank(std::shared_ptr<Communicator> communicator, const Sharing& sharing) {
    const int r = communicator->rank();
    const Int64 n = sharing.partition.rows(r);
    std::map<std::string, std::vector<float>> mine;
    const auto copy = [&](bool in) {
      for (auto& [name, x] : of) {
        std::vector<float>& part = mine[name];
        part.resize(static_cast<std::size_t>(n * x.row));
        Int64 at = 0;
        for (const Span& span : sharing.partition.of[static_cast<std::size_t>(r)]) {
          float *global = x.values.data() + span.begin * x.row, *local = part.data() + at * x.row;
          std::memcpy(in ? local : global, in ? global : local,
                      static_cast<std::size_t>(span.rows() * x.row) * sizeof(float));
          at += span.rows();
        }
      }
    };
    copy(true);
    const auto tokens = [&](const char* name) { return Tensor(mine[name].data(), Type::f32, {n, 8, 64}); };
    const Tensor lse = Tensor(mine["LSE"].data(), Type::f32, {n, 8}).transposed(0, 1);
    Inputs in;
    in.q = tokens("q"), in.k = tokens("k"), in.v = tokens("v");
    Outputs out;
    out.o = tokens("O"), out.lse = lse;
    dist::Plan plan(communicator, problem, sharing);
    plan.forward(in, out);
    plan.backward(in, {out.o, lse, tokens("dO"), {}}, {tokens("dQ"), tokens("dK"), tokens("dV"), {}, {}});
    copy(false);
  }

  UInt64 hash(const char* name) const {
    UInt64 h = 1469598103934665603u;
    for (const float x : of.at(name).values) h = (h ^ __builtin_bit_cast(UInt32, x)) * 1099511628211u;
    return h;
  }
};

int bits(const Arguments& a, Json& rows) {
  const char* const names[] = {"O", "LSE", "dQ", "dK", "dV"};
  std::vector<UInt64> first;
  bool same = true;
  for (const std::int64_t ranks : a.ranks.empty() ? std::vector<std::int64_t>{1, 2, 4, 8} : a.ranks)
    for (const bool heads : {false, true}) {
      if (heads && (ranks == 1 || a.scheme == "ring")) continue;
      Run run(a);
      const int slices = heads ? static_cast<int>(ranks) : 1;
      const Sharing sharing{
          .partition = two_level(zigzag(run.problem.lengths, static_cast<int>(ranks) / slices, a.segment), slices, 1),
          .scheme = scheme_of(a),
          .segment = a.scheme == "ring" ? 0 : a.segment,
          .timeout = 300,
          .threads = 1};
      std::vector<std::string> faults(static_cast<std::size_t>(ranks));
      run_ranks(static_cast<int>(ranks), [&](int r, std::shared_ptr<Communicator> communicator) {
        try {
          run.rank(std::move(communicator), sharing);
        } catch (const std::exception& error) {
          faults[static_cast<std::size_t>(r)] = error.what();
        }
      });
      for (const std::string& fault : faults)
        if (!fault.empty()) throw Failure(fault + ".");
      std::vector<UInt64> hashes;
      std::printf("%2lld ranks, %-7s", static_cast<long long>(ranks), heads ? "Ulysses" : a.scheme.c_str());
      for (const char* name : names) hashes.push_back(run.hash(name)), std::printf("  %s %016llx", name, hashes.back());
      std::printf("\n");
      rows.push_back({{"ranks", ranks}, {"scheme", heads ? std::string("Ulysses") : a.scheme}, {"hashes", hashes}});
      if (first.empty()) first = hashes;
      same &= hashes == first;
    }
  std::printf("O LSE dQ dK dV: %s\n", same ? "same" : a.scheme == "ring" ? "differ (expected of a ring)" : "differ");
  return !same && a.scheme != "ring";
}

// --- simulate

int simulate(const Arguments& a, Json& rows) {
  const Shape shape{a.heads, a.kv_heads, a.dim, a.dim, 2};
  Machine machine{a.forward * 1e12, a.backward * 1e12, a.call * 1e-6,
                  a.link * 1e9,     a.node_link * 1e9, a.latency * 1e-6};
  if (!a.times.empty()) {
    read_call_times(a.times, machine);
    std::printf("Simulated with the call times of %s: %g and %g TFLOP/s at best", a.times.c_str(),
                machine.forward_times.best_rate() * 1e-12, machine.backward_times.best_rate() * 1e-12);
  } else {
    std::printf("Simulated, not measured: %g and %g TFLOP/s inside a call, %g us a call", a.forward, a.backward,
                a.call);
  }
  std::printf(", %g GB/s between nodes, %g inside.\n", a.link, a.node_link);
  std::printf("%10s %6s %-16s %12s %12s %6s %8s\n", "tokens", "ranks", "scheme", "forward", "backward", "calls", "K/V");
  for (const std::int64_t tokens : a.tokens.empty() ? std::vector<std::int64_t>{1 << 20} : a.tokens)
    for (const std::int64_t ranks : a.ranks.empty() ? std::vector<std::int64_t>{8, 64, 512} : a.ranks)
      for (const int slices : {1, static_cast<int>(a.slices)})
        for (const Scheme scheme : {Scheme::ring, Scheme::gather}) {
          if (ranks % slices != 0 || slices > a.kv_heads) continue;
          const std::vector<Int64> lengths{tokens};
          const Partition partition = two_level(zigzag(lengths, static_cast<int>(ranks) / slices, a.align), slices, 1);
          Simulated passes[2];
          for (const Pass pass : {Pass::forward, Pass::backward})
            passes[pass == Pass::backward] =
                simulate(make_schedule(lengths, {.causal = true}, partition, {scheme, pass, 0}), shape, machine);
          const std::string name =
              (slices > 1 ? std::to_string(slices) + " slices x " : "") + (scheme == Scheme::ring ? "ring" : "gather");
          rows.push_back({{"tokens", tokens},
                          {"ranks", ranks},
                          {"scheme", name},
                          {"forward_seconds", passes[0].seconds},
                          {"forward_efficiency", passes[0].efficiency()},
                          {"backward_seconds", passes[1].seconds},
                          {"backward_efficiency", passes[1].efficiency()},
                          {"calls", passes[0].calls},
                          {"key_bytes", passes[0].key_bytes}});
          std::printf("%10lld %6lld %-16s %7.4f %3.0f%% %7.4f %3.0f%% %6lld %5.2f GB\n", static_cast<long long>(tokens),
                      static_cast<long long>(ranks), name.c_str(), passes[0].seconds, 100 * passes[0].efficiency(),
                      passes[1].seconds, 100 * passes[1].efficiency(), passes[0].calls, passes[0].key_bytes * 1e-9);
        }
  return 0;
}

// --- measure

// --tokens are the rows of calls here.
int measure(const Arguments& a, Json& rows) {
  const bool on_gpu = a.device == "cuda";
  DistMeasure what{on_gpu ? Device{DeviceType::cuda, 0} : Device{}, a.tokens, a.heads, a.kv_heads, a.dim, a.out};
  const std::int64_t slices = std::max<std::int64_t>(a.slices, 1);
  if (a.kv_heads % slices != 0)
    throw Failure("--slices: is " + std::to_string(slices) + "; must divide the " + std::to_string(a.kv_heads) +
                  " key heads.");
  what.heads /= slices, what.kv_heads /= slices;
  if (what.rows.empty()) what.rows = {256, 1024};
  if (a.tokens.empty() && on_gpu) what.rows = {1024, 2048, 4096, 8192, 16384};
  return dist_measure(what, rows);
}

int run(const Arguments& a) {
  for (const std::string& path : {a.json, a.out}) require_place(path);
  require_distinct({{"--json", a.json}, {"--out", a.out}}, {{"--times", a.times}});
  const auto positive = [](const char* flag, const std::vector<std::int64_t>& values) {
    for (const std::int64_t x : values)
      if (x < 1) throw Failure(std::string(flag) + ": is " + std::to_string(x) + "; must be positive.");
  };
  positive("--ranks", a.ranks), positive("--tokens", a.tokens);
  positive("--align", {a.align}), positive("--heads, --kv-heads and --dim", {a.heads, a.kv_heads, a.dim});
  if (a.heads % a.kv_heads != 0)
    throw Failure("--heads: is " + std::to_string(a.heads) + "; must be a multiple of --kv-heads, " +
                  std::to_string(a.kv_heads) + ".");
  Json rows = Json::array();
  Arguments b = a;
  if (a.what == "bits" && a.segment == 0) b.segment = 192;
  if (a.what == "simulate" && a.slices == 0) b.slices = 8;
  const int status = a.what == "plan"      ? plan(a, rows)
                     : a.what == "check"   ? check(a, rows)
                     : a.what == "bits"    ? bits(b, rows)
                     : a.what == "faults"  ? dist_faults(a.timeout, rows)
                     : a.what == "measure" ? measure(a, rows)
                                           : simulate(b, rows);
  if (!a.json.empty()) save_json(a.json, {{"command", "dist " + a.what}, {"rows", rows}});
  return status;
}

}  // namespace

Action add_dist(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  Arguments& a = *arguments;
  CLI::App& command = add_command(
      program, "dist", "Several ranks: costs of a plan, schedules checked, bits compared, faults, times, simulation",
      "Examples:\n"
      "  tessera dist plan --tokens 1048576 --ranks 8\n"
      "  tessera dist plan --tokens 5000,300,70000 --ranks 4 --partition balanced\n"
      "  tessera dist check --ranks 2,64,512\n"
      "  tessera dist bits --ranks 1,2,4,8\n"
      "  tessera dist faults\n"
      "  tessera dist simulate --tokens 1048576,10485760 --ranks 8,64,512\n"
      "  tessera dist measure --device cuda --slices 8 --out times.txt\n"
      "  tessera dist simulate --slices 8 --times times.txt");
  add_flag(command, "what", "plan, check, bits, faults, measure or simulate", a.what,
           {.value = "WHAT", .choices = {"plan", "check", "bits", "faults", "measure", "simulate"}, .required = true});
  add_flag(command, "--ranks", "Numbers of ranks", a.ranks, {.value = "LIST"});
  add_flag(command, "--tokens",
           "Lengths of the sequence (check, bits: the first; plan: of all documents; measure: rows of calls)", a.tokens,
           {.value = "LIST"});
  add_flag(command, "--scheme", "gather (the default) or ring; simulate has both", a.scheme,
           {.value = "NAME", .choices = {"gather", "ring"}});
  add_flag(command, "--segment", "Rows of a segment, for the same bits on any number of ranks (bits: 192)", a.segment,
           {.value = "N", .least = 1});
  add_flag(command, "--partition", "plan: zigzag (the default), contiguous or balanced", a.partition,
           {.value = "NAME", .choices = {"zigzag", "contiguous", "balanced"}});
  add_flag(command, "--full", "plan: no causal mask", a.full);
  add_flag(command, "--window-left", "plan: keys before a query that it sees (default: all)", a.left,
           {.value = "N", .least = 0});
  add_flag(command, "--window-right", "plan: the same behind it (default: all that the mask allows)", a.right,
           {.value = "N", .least = 0});
  add_flag(command, "--timeout", "faults: seconds that a rank waits for another (default: 1)", a.timeout,
           {.value = "X", .least = 0.1});
  add_flag(command, "--device", "measure: cpu (the default) or cuda", a.device,
           {.value = "NAME", .choices = {"cpu", "cuda"}});
  add_flag(command, "--out", "measure: also write the times to this file, for simulate --times", a.out,
           {.value = "FILE"});
  add_flag(command, "--align", "Cuts lie on multiples of so many rows (default: 128)", a.align, {.value = "N"});
  add_json_flag(command, a.json);
  const FlagStyle machine{.value = "X", .group = "Simulated machine"}, number{.value = "N", .group = "Shape"};
  add_flag(command, "--heads", "Query heads (default: 32)", a.heads, number);
  add_flag(command, "--kv-heads", "Key and value heads (default: 8)", a.kv_heads, number);
  add_flag(command, "--dim", "Head dimension (default: 128)", a.dim, number);
  add_flag(command, "--slices", "Ranks of a node, which share its heads out (default: 1; simulate: 8)", a.slices,
           {.value = "N", .group = "Shape", .least = 1});
  add_flag(command, "--forward", "TFLOP/s of a rank in a forward call (default: 700)", a.forward, machine);
  add_flag(command, "--backward", "The same in a backward call (default: 600)", a.backward, machine);
  add_flag(command, "--times", "Measured calls instead: lines of pass, GFLOP and microseconds", a.times,
           {.value = "FILE", .group = "Simulated machine"});
  add_flag(command, "--call", "Fixed microseconds of a call (default: 15)", a.call, machine);
  add_flag(command, "--link", "GB/s of a rank between nodes, each way (default: 50)", a.link, machine);
  add_flag(command, "--node-link", "The same inside a node (default: 450)", a.node_link, machine);
  add_flag(command, "--latency", "Microseconds of a step's messages (default: 5)", a.latency, machine);
  return [arguments] { return run(*arguments); };
}

}  // namespace tessera::cli
