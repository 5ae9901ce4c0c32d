// SPDX-License-Identifier: Apache-2.0
// `tessera dist`: several ranks without a network. `plan` says what each rank has to do, `check` judges schedules,
// `bits` runs ranks as threads and compares their results bit by bit, `faults` lets one of them fail, `measure` times a
// rank's calls, `simulate` whole schedules on a machine given in numbers. Implements docs/scale_out.md.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
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
  std::string scheme = "gather", json, times, out, device = "cpu";
  std::vector<std::int64_t> ranks, tokens;
  std::int64_t length = 0;  // of the one sequence of check and bits; 0: theirs
  std::int64_t heads = 32, kv_heads = 8, dim = 128, slices = 0, segment = 0, align = 128;
  std::string partition = "zigzag";
  std::int64_t left = -1, right = -1;
  bool full = false;
  double timeout = 1;
  double forward = 700, backward = 600, call = 15, link = 50, node_link = 450, latency = 5;
};

Scheme scheme_of(const Arguments& a) { return a.scheme == "ring" ? Scheme::ring : Scheme::gather; }

// --slices as given, for this number of ranks.
int slices_of(const Arguments& a, std::int64_t ranks) {
  if (ranks % a.slices != 0 || a.slices > a.kv_heads)
    throw Failure("--slices: is " + std::to_string(a.slices) + "; must divide the " + std::to_string(ranks) +
                  " ranks, and be at most the " + std::to_string(a.kv_heads) + " key heads.");
  return static_cast<int>(a.slices);
}

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
    const int slices = a.slices == 0 ? 1 : slices_of(a, ranks);
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
    const std::vector<Int64> lengths{a.length == 0 ? 2 * n * a.align : a.length};
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
    const Int64 tokens = a.length == 0 ? 16 * a.segment : a.length;
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

int bits(const Arguments& given, Json& rows) {
  Arguments a = given;
  if (a.segment == 0) a.segment = 192;
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
  std::printf("%10s %6s %-18s %12s %12s %6s %8s\n", "tokens", "ranks", "scheme", "forward", "backward", "calls", "K/V");
  for (const std::int64_t tokens : a.tokens.empty() ? std::vector<std::int64_t>{1 << 20} : a.tokens)
    for (const std::int64_t ranks : a.ranks.empty() ? std::vector<std::int64_t>{8, 64, 512} : a.ranks)
      for (const int slices : std::set<int>{1, a.slices == 0 ? 8 : slices_of(a, ranks)})
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
          std::printf("%10lld %6lld %-18s %7.4f %3.0f%% %7.4f %3.0f%% %6lld %5.2f GB\n", static_cast<long long>(tokens),
                      static_cast<long long>(ranks), name.c_str(), passes[0].seconds, 100 * passes[0].efficiency(),
                      passes[1].seconds, 100 * passes[1].efficiency(), passes[0].calls, passes[0].key_bytes * 1e-9);
        }
  return 0;
}

// --- measure

// --tokens are the rows of calls here, the heads those of the rank with most.
int measure(const Arguments& a, Json& rows) {
  const std::int64_t slices = a.slices == 0 ? 1 : slices_of(a, a.slices), kv = (a.kv_heads + slices - 1) / slices;
  const Device device = a.device == "cuda" ? Device{DeviceType::cuda, 0} : Device{};
  return dist_measure({device, a.tokens, kv * (a.heads / a.kv_heads), kv, a.dim, a.out}, rows);
}

// --- the commands

// What the flags' own limits leave open.
void check_sizes(const Arguments& a) {
  if (a.heads % a.kv_heads != 0)
    throw Failure("--heads: is " + std::to_string(a.heads) + "; must be a multiple of --kv-heads, " +
                  std::to_string(a.kv_heads) + ".");
  double tokens = 0;
  for (const std::int64_t x : a.tokens) tokens += static_cast<double>(x);
  if (tokens * static_cast<double>(a.heads * a.dim) * 2 > std::ldexp(1, 56))
    throw Failure("--tokens: are " + format("%.0f", tokens) + " in all; Q must not be larger than 2^56 bytes.");
}

struct Command {
  const char* name;
  int (*run)(const Arguments&, Json& rows);
  const CLI::App* parser;
};

int run(const Command& command, const Arguments& a) {
  check_sizes(a);
  if (!a.times.empty()) require_no_rates(*command.parser);
  for (const std::string& path : {a.json, a.out}) require_place(path);
  require_distinct({{"--json", a.json}, {"--out", a.out}}, {{"--times", a.times}});
  Json rows = Json::array();
  const int status = command.run(a, rows);
  if (!a.json.empty()) save_json(a.json, {{"command", std::string("dist ") + command.name}, {"rows", rows}});
  return status;
}

int faults(const Arguments& a, Json& rows) { return dist_faults(a.timeout, rows); }

constexpr double most_tokens = 1ll << 48, most_ranks = 1 << 20;  // the library's limits, too

void add_ranks(CLI::App& command, Arguments& a, const char* help) {
  add_flag(command, "--ranks", help, a.ranks, {.value = "LIST", .least = 1, .most = most_ranks});
}
void add_tokens(CLI::App& command, Arguments& a, const char* help) {
  add_flag(command, "--tokens", help, a.tokens, {.value = "LIST", .least = 1, .most = most_tokens});
}
void add_length(CLI::App& command, Arguments& a, const char* help) {
  add_flag(command, "--tokens", help, a.length, {.value = "N", .least = 1, .most = most_tokens});
}
void add_scheme(CLI::App& command, Arguments& a) {
  add_flag(command, "--scheme", "gather (the default) or ring", a.scheme,
           {.value = "NAME", .choices = {"gather", "ring"}});
}
void add_segment(CLI::App& command, Arguments& a, const char* help) {
  add_flag(command, "--segment", help, a.segment, {.value = "N", .least = 1, .most = most_tokens});
}
void add_align(CLI::App& command, Arguments& a) {
  add_flag(command, "--align", "Cuts lie on multiples of so many rows (default: 128)", a.align,
           {.value = "N", .least = 1, .most = 1 << 24});
}
void add_shape(CLI::App& command, Arguments& a, const char* slices) {
  const FlagStyle heads{.value = "N", .group = "Shape", .least = 1, .most = (1ll << 31) - 1};
  add_flag(command, "--heads", "Query heads (default: 32)", a.heads, heads);
  add_flag(command, "--kv-heads", "Key and value heads (default: 8)", a.kv_heads, heads);
  add_flag(command, "--dim", "Head dimension (default: 128)", a.dim,
           {.value = "N", .group = "Shape", .least = 1, .most = 512});
  add_flag(command, "--slices", slices, a.slices, {.value = "N", .group = "Shape", .least = 1, .most = most_ranks});
}

void add_plan_flags(CLI::App& command, Arguments& a) {
  add_ranks(command, a, "Numbers of ranks (default: 8)");
  add_tokens(command, a, "Lengths of all documents (default: 1048576)");
  add_scheme(command, a);
  add_segment(command, a, "Rows of a segment, for the same bits on any number of ranks (default: none)");
  add_flag(command, "--partition", "zigzag (the default), contiguous or balanced", a.partition,
           {.value = "NAME", .choices = {"zigzag", "contiguous", "balanced"}});
  add_flag(command, "--full", "No causal mask", a.full);
  const FlagStyle window{.value = "N", .least = 0, .most = most_tokens};
  add_flag(command, "--window-left", "Keys before a query that it sees (default: all)", a.left, window);
  add_flag(command, "--window-right", "The same behind it (default: all that the mask allows)", a.right, window);
  add_align(command, a);
  add_shape(command, a, "Ranks of a node, which share its heads out (default: 1)");
}

void add_simulate_flags(CLI::App& command, Arguments& a) {
  add_ranks(command, a, "Numbers of ranks (default: 8,64,512)");
  add_tokens(command, a, "Lengths of the sequence, one after the other (default: 1048576)");
  add_align(command, a);
  add_shape(command, a, "Ranks of a node, which share its heads out, beside 1 (default: 8)");
  const char* group = "Simulated machine";
  const FlagStyle rate{.value = "X", .group = group, .least = 0.001, .most = 1e9};
  const FlagStyle time{.value = "X", .group = group, .least = 0, .most = 1e9};
  add_flag(command, "--forward", "TFLOP/s of a rank in a forward call (default: 700)", a.forward, rate);
  add_flag(command, "--backward", "The same in a backward call (default: 600)", a.backward, rate);
  add_flag(command, "--times", "Measured calls instead: lines of pass, GFLOP and microseconds", a.times,
           {.value = "FILE", .group = group});
  add_flag(command, "--call", "Fixed microseconds of a call (default: 15)", a.call, time);
  add_flag(command, "--link", "GB/s of a rank between nodes, each way (default: 50)", a.link, rate);
  add_flag(command, "--node-link", "The same inside a node (default: 450)", a.node_link, rate);
  add_flag(command, "--latency", "Microseconds of a step's messages (default: 5)", a.latency, time);
}

void add_measure_flags(CLI::App& command, Arguments& a) {
  add_tokens(command, a, "Rows of calls, of queries and of keys (default: 256,1024; cuda: 1024 to 16384)");
  add_flag(command, "--device", "cpu (the default) or cuda", a.device, {.value = "NAME", .choices = {"cpu", "cuda"}});
  add_flag(command, "--out", "Also write the times to this file, for simulate --times", a.out, {.value = "FILE"});
  add_shape(command, a, "Ranks of a node, which share its heads out (default: 1)");
}

}  // namespace

Action add_dist(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  Arguments& a = *arguments;
  CLI::App& group =
      add_command_group(program, "dist", "Several ranks: costs, schedules, bits, faults, times, simulation",
                        "Examples:\n"
                        "  tessera dist plan --tokens 1048576 --ranks 8\n"
                        "  tessera dist bits --ranks 1,2,4,8\n"
                        "  tessera dist COMMAND --help                     every option of a command");
  std::vector<Command> commands;
  const auto add = [&](const char* name, auto run, const char* what, const char* examples) -> CLI::App& {
    CLI::App& command = add_command(group, name, what, examples);
    commands.push_back({name, run, &command});
    return command;
  };
  CLI::App& planned = add("plan", plan, "Rows, steps, bytes and memory of each rank",
                          "Examples:\n"
                          "  tessera dist plan --tokens 1048576 --ranks 8\n"
                          "  tessera dist plan --tokens 5000,300,70000 --ranks 4 --partition balanced");
  add_plan_flags(planned, a);

  CLI::App& checked = add("check", check, "Judge schedules: causal, one sequence, zigzag",
                          "Examples:\n"
                          "  tessera dist check --ranks 2,64,512\n"
                          "  tessera dist check --ranks 3 --tokens 1000 --scheme ring");
  add_ranks(checked, a, "Numbers of ranks (default: 2,3,4,8,64,512)");
  add_length(checked, a, "Length of the sequence (default: two cuts for each rank)");
  add_scheme(checked, a);
  add_align(checked, a);

  CLI::App& compared = add("bits", bits, "Run ranks as threads and compare the bits: f32, causal, 8 heads of 64",
                           "Examples:\n"
                           "  tessera dist bits --ranks 1,2,4,8");
  add_ranks(compared, a, "Numbers of ranks (default: 1,2,4,8)");
  add_length(compared, a, "Length of the sequence (default: 16 segments)");
  add_scheme(compared, a);
  add_segment(compared, a, "Rows of a segment (default: 192)");

  CLI::App& failing = add("faults", faults, "Let one of four ranks fail, in every way",
                          "Examples:\n"
                          "  tessera dist faults --timeout 0.5");
  add_flag(failing, "--timeout", "Seconds that a rank waits for another (default: 1)", a.timeout,
           {.value = "X", .least = 0.1, .most = 3600});

  CLI::App& measured = add("measure", measure, "Time the calls that a rank makes, in bf16, for simulate --times",
                           "Examples:\n"
                           "  tessera dist measure --device cuda --slices 8 --out times.txt\n"
                           "  tessera dist simulate --slices 8 --times times.txt");
  add_measure_flags(measured, a);

  CLI::App& simulated = add("simulate", simulate, "Time schedules on a machine given in numbers: causal, zigzag",
                            "Examples:\n"
                            "  tessera dist simulate --tokens 1048576,10485760 --ranks 8,64,512");
  add_simulate_flags(simulated, a);

  for (CLI::App* command : {&planned, &checked, &compared, &failing, &measured, &simulated})
    add_json_flag(*command, a.json);
  return [arguments, commands] {
    for (const Command& command : commands)
      if (is_chosen(*command.parser)) return run(command, *arguments);
    return 0;
  };
}

}  // namespace tessera::cli
