// SPDX-License-Identifier: Apache-2.0
// `tessera run`: a user's own arrays in, O, LSE and gradients out.
// Everything is checked and planned before memory is allocated, and computed before a file appears; see docs/tour.md.
#include <limits>
#include <memory>
#include <optional>
#include <ostream>

#include "cli/array.hpp"
#include "cli/command.hpp"
#include "cli/failure.hpp"
#include "cli/files.hpp"
#include "cli/flags.hpp"
#include "cli/gpu.hpp"
#include "cli/npy.hpp"
#include "cli/options.hpp"
#include "cli/placement.hpp"
#include "cli/progress.hpp"
#include "cli/report.hpp"
#include "cli/timing.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {
namespace {

struct Arguments {
  std::string q, k, v, bias, mask, slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, rng, d_o, d_lse;
  std::string type, layout = "bnhd", out = "results", json;
  std::vector<std::string> gradients;
  bool f32_out = false, accumulate = false;
  AttentionFlags attention;
  ExecutionFlags execution;
};

void add_files(CLI::App& command, Arguments& a) {
  const FlagStyle required{.value = "FILE", .group = "Arrays", .required = true};
  const FlagStyle optional{.value = "FILE", .group = "Arrays"}, lengths{.value = "FILE", .group = "Lengths"};
  add_flag(command, "--q", "Queries [B, Nq, Hq, D], or packed [Tq, Hq, D]", a.q, required);
  add_flag(command, "--k", "Keys [B, Nk, Hk, D], or packed [Tk, Hk, D]", a.k, required);
  add_flag(command, "--v", "Values [B, Nk, Hk, Dv], or packed [Tk, Hk, Dv]", a.v, required);
  add_flag(command, "--do", "Gradient of O, in its shape: asks for the backward pass", a.d_o, optional);
  add_flag(command, "--dlse", "Gradient of LSE [B, Hq, Nq], or packed [Hq, Tq]", a.d_lse, optional);
  add_flag(command, "--bias", "Added to the scores [B|1, Hq|1, Nq|1, Nk|1]", a.bias, optional);
  add_flag(command, "--mask", "Non-zero means visible; the same shapes; bool or uint8", a.mask, optional);
  add_flag(command, "--slopes", "ALiBi slopes [Hq] or [B, Hq]", a.slopes, optional);
  add_flag(command, "--sinks", "Sinks [Hq]", a.sinks, optional);
  add_flag(command, "--rng", "Dropout's seed and offset, int64 [2], instead of --seed and --seed-offset", a.rng,
           optional);
  add_flag(command, "--cu-seqlens-q", "Packed: where each sequence's queries begin, int [B + 1]", a.cu_seqlens_q,
           lengths);
  add_flag(command, "--cu-seqlens-k", "Packed: where each sequence's keys begin, int [B + 1]", a.cu_seqlens_k, lengths);
  add_flag(command, "--seqused-q", "Used query lengths, int [B]", a.seqused_q, lengths);
  add_flag(command, "--seqused-k", "Used key lengths, int [B]", a.seqused_k, lengths);
}

// Reads an optional file; an empty path gives an absent array.
Array read_optional(const std::string& path) { return path.empty() ? Array() : read_npy(path); }

bool is_number(Type type) { return type <= Type::bf16; }

Array read_numbers(const std::string& path, std::optional<Type> type) {
  Array array = read_optional(path);
  if (!array || !type || array.type() == *type || !is_number(array.type())) return array;
  return converted(array, *type);
}

// Lengths may come as int64, which is what NumPy makes of a list.
Array read_lengths(const std::string& path) {
  const Array array = read_optional(path);
  if (!array || array.type() != Type::i64) return read_optional(path);
  for (std::int64_t i = 0; i < array.elements(); ++i)
    if (array.data<std::int64_t>()[i] != static_cast<std::int32_t>(array.data<std::int64_t>()[i]))
      throw Failure(path + ": entry " + std::to_string(i) + " does not fit into 32 bits.");
  return converted(array, Type::i32);
}

// The arrays of one run and the library's views of them.
class Run {
 public:
  explicit Run(const Arguments& a) :
      arguments(a), heads_first(a.layout == "bhnd"), execution(a.execution.execution()), placement(execution.device) {
    std::optional<Type> type;
    if (!a.type.empty()) type = type_named(a.type);
    q = read_numbers(a.q, type), k = read_numbers(a.k, type), v = read_numbers(a.v, type);
    d_o = read_numbers(a.d_o, type), bias = read_numbers(a.bias, type);
    wide = q.type() == Type::f64 ? Type::f64 : Type::f32;
    slopes = read_numbers(a.slopes, wide), sinks = read_numbers(a.sinks, wide), d_lse = read_numbers(a.d_lse, wide);
    mask = read_optional(a.mask), rng = read_optional(a.rng);
    cu_seqlens_q = read_lengths(a.cu_seqlens_q), cu_seqlens_k = read_lengths(a.cu_seqlens_k);
    seqused_q = read_lengths(a.seqused_q), seqused_k = read_lengths(a.seqused_k);
    options = a.attention.options();
    options.accumulate = a.accumulate;
    if (!d_o && (d_lse || a.accumulate || !a.gradients.empty()))
      throw Failure("--dlse, --accumulate and --gradients belong to the backward pass, which needs --do.");
  }

  // Which outputs there will be. The library checks every shape and type here, before memory for them exists.
  void plan() {
    describe_outputs();
    forward_plan.emplace(Plan::forward(inputs(), outputs(), options, execution));
    if (d_o) backward_plan.emplace(Plan::backward(inputs(), saved(), gradients(), options, execution));
  }

  void allocate() {
    for (Output& output : results) {
      output.array = Array(output.type, output.shape);
      if (arguments.accumulate && output.name[0] == 'd') add_earlier(output);
    }
  }

  void copy_in() {
    for (const Array* array : {&q, &k, &v, &d_o, &bias, &slopes, &sinks, &d_lse, &mask, &rng, &cu_seqlens_q,
                               &cu_seqlens_k, &seqused_q, &seqused_k})
      placement.copy_in(*array);
    for (const Output& output : results) placement.copy_in(output.array);
  }

  void run_forward() {
    const Execution how = placement.with_workspace(execution, forward_plan->workspace_size());
    forward_seconds = seconds_of([&] {
      forward_plan->run(inputs(), outputs(), options, how);
      placement.wait();
    });
  }

  void run_backward() {
    const Execution how = placement.with_workspace(execution, backward_plan->workspace_size());
    backward_seconds = seconds_of([&] {
      backward_plan->run(inputs(), saved(), gradients(), options, how);
      placement.wait();
    });
  }

  void copy_out() {
    for (Output& output : results) placement.copy_out(output.array);
  }

  bool has_backward() const { return static_cast<bool>(d_o); }

  // Before anything is computed.
  void check_places() const {
    const Arguments& a = arguments;
    std::vector<NamedPath> outputs;
    for (const Output& output : results) outputs.push_back({output.name + ".npy", place_of(output)});
    outputs.push_back({"--json", a.json});
    require_distinct(outputs, {{"--q", a.q},
                               {"--k", a.k},
                               {"--v", a.v},
                               {"--do", a.d_o},
                               {"--dlse", a.d_lse},
                               {"--bias", a.bias},
                               {"--mask", a.mask},
                               {"--slopes", a.slopes},
                               {"--sinks", a.sinks},
                               {"--rng", a.rng},
                               {"--cu-seqlens-q", a.cu_seqlens_q},
                               {"--cu-seqlens-k", a.cu_seqlens_k},
                               {"--seqused-q", a.seqused_q},
                               {"--seqused-k", a.seqused_k}});
  }

  // All files, the JSON included, appear together, and only if what is printed arrives too: whoever sees the run fail
  // may repeat it, with --accumulate too.
  void write(Progress& progress) const {
    Files files;
    const std::filesystem::path folder(arguments.out);
    files.create_folder(folder);
    for (const Output& output : results)
      files.add(place_of(output), [&](std::ostream& out) { write_npy(out, output.array); });
    if (!arguments.json.empty()) files.add(arguments.json, [&](std::ostream& out) { out << json().text(); });
    files.commit([&] {
      progress.hide();
      print();
      require_stdout();
    });
  }

  void print() const {
    std::printf("forward   %s  kernel %s\n", time_text(forward_seconds).c_str(), forward_plan->kernel().c_str());
    if (has_backward())
      std::printf("backward  %s  kernel %s\n", time_text(backward_seconds).c_str(), backward_plan->kernel().c_str());
    for (const Output& output : results)
      std::printf("wrote %s/%s.npy  %s %s%s\n", arguments.out.c_str(), output.name.c_str(), name_of(output.type),
                  text_of(output.shape).c_str(), output.type == Type::bf16 ? " (as f4)" : "");
  }

 private:
  struct Output {
    std::string name;
    Type type;
    std::vector<std::int64_t> shape;
    bool rows;  // has the layout of Q, K, V
    Array array{};
  };

  std::filesystem::path place_of(const Output& output) const {
    return std::filesystem::path(arguments.out) / (output.name + ".npy");
  }

  // Null data while only planning.
  Tensor view(const Array& array, bool rows) const {
    const Tensor t = placement.view(array);
    return rows && heads_first && t.ndim == 4 ? t.transposed(1, 2) : t;
  }

  Tensor view(const std::string& name) const {
    for (const Output& output : results) {
      if (output.name != name) continue;
      if (output.array) return view(output.array, output.rows);
      Tensor t;
      t.type = output.type, t.ndim = static_cast<std::int32_t>(output.shape.size());
      std::int64_t stride = 1;
      for (std::size_t d = output.shape.size(); d-- > 0; stride *= output.shape[d])
        t.shape[d] = output.shape[d], t.strides[d] = stride;
      t = placement.planned(t);
      return output.rows && heads_first && t.ndim == 4 ? t.transposed(1, 2) : t;
    }
    return {};
  }

  Inputs inputs() const {
    Inputs in;
    in.q = view(q, true), in.k = view(k, true), in.v = view(v, true);
    const auto plain = [&](const Array& array) { return placement.view(array); };
    in.bias = plain(bias), in.mask = plain(mask), in.slopes = plain(slopes), in.sinks = plain(sinks);
    in.cu_seqlens_q = plain(cu_seqlens_q), in.cu_seqlens_k = plain(cu_seqlens_k);
    in.seqused_q = plain(seqused_q), in.seqused_k = plain(seqused_k), in.rng = plain(rng);
    return in;
  }
  Outputs outputs() const { return {.o = view("o"), .lse = view("lse")}; }
  Saved saved() const {
    return {.o = view("o"), .lse = view("lse"), .d_o = view(d_o, true), .d_lse = placement.view(d_lse)};
  }
  Gradients gradients() const {
    return {.dq = view("dq"), .dk = view("dk"), .dv = view("dv"), .dbias = view("dbias"), .dsinks = view("dsinks")};
  }

  bool wanted(const std::string& gradient) const {
    const auto& list = arguments.gradients;
    return list.empty() || std::find(list.begin(), list.end(), gradient) != list.end();
  }

  void describe_outputs() {
    const bool wide_results = arguments.f32_out || (arguments.accumulate && wide == Type::f32);
    const auto type_like = [&](const Array& input) { return wide_results ? Type::f32 : input.type(); };
    std::vector<std::int64_t> o = q.shape(), lse = q.shape();
    o.back() = v.shape().back();
    lse.pop_back();
    if (!lse.empty() && !heads_first && lse.size() >= 2) std::swap(lse.back(), lse[lse.size() - 2]);
    if (lse.empty()) lse = {1};  // q is malformed; the library refuses it next
    results.push_back({"o", arguments.f32_out ? Type::f32 : q.type(), o, true});
    results.push_back({"lse", wide, lse, false});
    if (!d_o) return;
    if (wanted("dq")) results.push_back({"dq", type_like(q), q.shape(), true});
    if (wanted("dk")) results.push_back({"dk", type_like(k), k.shape(), true});
    if (wanted("dv")) results.push_back({"dv", type_like(v), v.shape(), true});
    if (bias && wanted("dbias")) results.push_back({"dbias", type_like(bias), bias.shape(), false});
    if (sinks && wanted("dsinks")) results.push_back({"dsinks", sinks.type(), sinks.shape(), false});
  }

  // --accumulate: what an earlier run left in the folder is added to.
  void add_earlier(Output& output) const {
    const auto path = place_of(output);
    recover_folder_of(path);
    if (!std::filesystem::exists(path)) return;
    Array earlier = read_npy(path);
    if (earlier.shape() != output.shape || earlier.type() != output.type)
      throw Failure(path.string() + ": cannot be added to, it holds " + name_of(earlier.type()) + " " +
                    text_of(earlier.shape()) + " and not " + name_of(output.type) + " " + text_of(output.shape) + ".");
    output.array = std::move(earlier);
  }

  Json json() const {
    Json json;
    json["machine"] = machine();
    json["forward"] = {{"kernel", forward_plan->kernel()},
                       {"seconds", forward_seconds},
                       {"workspace_bytes", forward_plan->workspace_size()}};
    if (has_backward())
      json["backward"] = {{"kernel", backward_plan->kernel()},
                          {"seconds", backward_seconds},
                          {"workspace_bytes", backward_plan->workspace_size()}};
    for (const Output& output : results)
      json["outputs"].push_back(
          {{"file", output.name + ".npy"}, {"type", name_of(output.type)}, {"shape", output.shape}});
    return json;
  }

  const Arguments& arguments;
  const bool heads_first;
  Array q, k, v, d_o, bias, slopes, sinks, d_lse, mask, rng, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  Type wide = Type::f32;  // of LSE, slopes and sinks
  Options options;
  Execution execution;
  Placement placement;
  std::vector<Output> results;
  std::optional<Plan> forward_plan, backward_plan;
  double forward_seconds = 0, backward_seconds = 0;
};

int run(const Arguments& arguments) {
  require_device("run", arguments.execution.device_name());
  Progress progress(1 + 2.5);  // the backward pass does 2.5 times the work
  progress.step("reading");
  Run run(arguments);
  run.plan();
  run.check_places();
  run.allocate();
  run.copy_in();
  progress.step("forward");
  run.run_forward();
  progress.advance(1);
  progress.step("backward");
  if (run.has_backward()) run.run_backward();
  progress.advance(2.5);
  run.copy_out();
  progress.step("writing");
  run.write(progress);
  return 0;
}

}  // namespace

Action add_run(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  Arguments& a = *arguments;
  CLI::App& command = add_command(
      program, "run", "Attention of your own .npy arrays",
      "Files are NumPy's: <f4, <f2 or <f8 (f8 runs on the float64 reference), C order. bf16 travels in f4 files with\n"
      "--type bf16. On any error one sentence says what is wrong, and no file is written.\n\n"
      "Examples:\n"
      "  tessera run --q q.npy --k k.npy --v v.npy --causal\n"
      "  tessera run --q q.npy --k k.npy --v v.npy --do do.npy --type bf16 --window 128,0 --out results\n"
      "  tessera run --q q.npy --k k.npy --v v.npy --type f16 --device cuda\n"
      "  tessera run --q q.npy --k k.npy --v v.npy --cu-seqlens-q cu.npy --cu-seqlens-k cu.npy --out results");
  add_files(command, a);
  add_flag(command, "--out",
           "Folder for o.npy, lse.npy, and with --do dq.npy, dk.npy, dv.npy, dbias.npy, dsinks.npy (default: results)",
           a.out, {.value = "DIR"});
  add_type_flag(command, a.type,
                "f32, f16, bf16 or f64: round Q, K, V, dO, bias to it first (default: the files' own)");
  add_flag(command, "--layout", "bnhd (the default), or bhnd for arrays [B, H, N, D]", a.layout,
           {.value = "NAME", .choices = {"bnhd", "bhnd"}});
  add_flag(command, "--f32-out", "Write O and the gradients as f32 whatever the type of the inputs", a.f32_out);
  add_flag(command, "--gradients", "Only these of dq,dk,dv,dbias,dsinks (default: all that exist)", a.gradients,
           {.value = "LIST", .choices = {"dq", "dk", "dv", "dbias", "dsinks"}});
  add_flag(command, "--accumulate", "Add to the f32 gradients that an earlier run left in DIR", a.accumulate);
  add_json_flag(command, a.json);
  a.attention.add_to(command);
  a.execution.add_to(command);
  return [arguments] { return run(*arguments); };
}

}  // namespace tessera::cli
