// SPDX-License-Identifier: Apache-2.0
// The problems whose kernels the compile gate compiles: options, head dims, types, architectures. See gate.hpp.
#include <algorithm>
#include <set>

#include "api/units.hpp"
#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "cuda/read.hpp"
#include "gpu/append.hpp"
#include "gpu/merge.hpp"
#include "tests/gate/gate.hpp"

namespace tessera::gate {
namespace {

using api::HeadDims;

// The control group is meant to be what comes out without care for registers.
bool may_spill(const std::string& kernel) { return kernel.starts_with("naive"); }

enum class Concerns { all, forward, backward, sixteen_bit };

// One way in which a problem departs from the plain one. Options that change nothing in the code give the same units,
// which are compiled once, so the list may be long.
struct Option {
  const char* name;
  Concerns concerns;
  bool together;  // part of "all together"
  void (*apply)(Problem& p);
};

bool concerns(const Option& option, const Problem& p) {
  switch (option.concerns) {
    case Concerns::forward:
      return p.pass == Pass::forward;
    case Concerns::backward:
      return p.pass == Pass::backward;
    case Concerns::sixteen_bit:
      return p.q_type != Type::f32;
    default:
      return true;
  }
}

std::array<std::int64_t, 4> full(const Problem& p) { return {p.B, p.Hq, p.Nq, p.Nk}; }

void set_bias_and_gradient(Problem& p, std::array<std::int64_t, 4> shape) {
  p.bias = Broadcast{p.q_type, shape};
  if (p.pass == Pass::backward) p.dbias = p.q_type;
}

void write_f32(Problem& p) {
  for (auto* gradient : {&p.dq, &p.dk, &p.dv, &p.dbias})
    if (*gradient) *gradient = Type::f32;
}

const Option any_order{"any order", Concerns::backward, false, [](Problem& p) { p.options.deterministic = false; }};

// In this order: what sets the gradients' types comes after what asks for them.
const Option options[] = {
    {"gqa", Concerns::all, true, [](Problem& p) { p.Hk = 2; }},
    {"packed", Concerns::all, true, [](Problem& p) { p.packed = true; }},
    {"seqused", Concerns::all, true, [](Problem& p) { p.seqused_q = p.seqused_k = true; }},
    {"one query", Concerns::all, false, [](Problem& p) { p.Nq = 1; }},
    {"short", Concerns::all, false, [](Problem& p) { p.B = 1, p.Nq = p.Nk = 77; }},
    {"causal", Concerns::all, true, [](Problem& p) { p.options.causal = true; }},
    {"window", Concerns::all, true, [](Problem& p) { p.options.window_left = 100, p.options.window_right = 3; }},
    {"scale", Concerns::all, false, [](Problem& p) { p.options.scale = -1; }},
    {"softcap", Concerns::all, true, [](Problem& p) { p.options.softcap = 30; }},
    {"alibi", Concerns::all, true, [](Problem& p) { p.slopes = 1; }},
    {"mask", Concerns::all, true,
     [](Problem& p) {
       p.mask = Broadcast{Type::u8, full(p)};
     }},
    {"dropout", Concerns::all, true, [](Problem& p) { p.options.dropout = 0.1; }},
    {"bias", Concerns::all, true,
     [](Problem& p) {
       p.bias = Broadcast{p.q_type, full(p)};
     }},
    {"f32 bias", Concerns::sixteen_bit, false,
     [](Problem& p) {
       p.bias = Broadcast{Type::f32, full(p)};
     }},
    {"dBias", Concerns::backward, true, [](Problem& p) { set_bias_and_gradient(p, full(p)); }},
    {"dBias of keys", Concerns::backward, false,
     [](Problem& p) {
       set_bias_and_gradient(p, {1, p.Hq, 1, p.Nk});
     }},
    {"dBias of pairs", Concerns::backward, false,
     [](Problem& p) {
       set_bias_and_gradient(p, {1, 1, p.Nq, p.Nk});
     }},
    {"sinks", Concerns::all, true,
     [](Problem& p) {
       p.sinks = true;
       if (p.pass == Pass::backward) p.dsinks = Type::f32;
     }},
    {"no LSE", Concerns::forward, false, [](Problem& p) { p.lse = false; }},
    {"dLSE", Concerns::backward, true, [](Problem& p) { p.d_lse = true; }},
    {"no dQ", Concerns::backward, false, [](Problem& p) { p.dq.reset(); }},
    {"no dK", Concerns::backward, false, [](Problem& p) { p.dk.reset(); }},
    {"no dV", Concerns::backward, false, [](Problem& p) { p.dv.reset(); }},
    any_order,
    {"narrow", Concerns::all, true, [](Problem& p) { p.alignment = static_cast<int>(size_of(p.q_type)); }},
    {"parts", Concerns::forward, false, [](Problem& p) { p.options.part_invariant = true; }},
    {"finish", Concerns::forward, false, [](Problem& p) { p.options.part_invariant = true, p.Nk = 0; }},
    {"16 rows", Concerns::forward, false, [](Problem& p) { p.Nq = 16; }},
    {"32 rows", Concerns::forward, false, [](Problem& p) { p.Nq = 32; }},
    {"64 rows", Concerns::forward, false, [](Problem& p) { p.Nq = 64; }},
    {"few keys", Concerns::forward, false, [](Problem& p) { p.Nk = 256; }},
    {"many keys", Concerns::forward, false, [](Problem& p) { p.Nk = 32768; }},
    {"pages", Concerns::forward, false,
     [](Problem& p) { p.pages = Pages{.count = 1000, .v_count = 1000, .size = 16, .entries = 256, .status = true}; }},
    {"scales", Concerns::forward, false, [](Problem& p) { p.k_scale = p.v_scale = 3; }},
    {"head scales", Concerns::forward, false, [](Problem& p) { p.k_scale = p.v_scale = 1; }},
    {"dim scales", Concerns::forward, false, [](Problem& p) { p.k_scale = p.v_scale = 4; }},
    {"tree", Concerns::forward, false, [](Problem& p) { p.tree_words = 2, p.positions = true; }},
    {"e4m3", Concerns::forward, false, [](Problem& p) { p.k_type = p.v_type = Type::e4m3; }},
    {"i8", Concerns::forward, false, [](Problem& p) { p.k_type = p.v_type = Type::i8; }},
    {"qv", Concerns::forward, false, [](Problem& p) { p.qv = true; }},
    {"f32 out", Concerns::sixteen_bit, true, [](Problem& p) { p.o_type = Type::f32, write_f32(p); }},
    {"accumulate", Concerns::backward, true, [](Problem& p) { p.options.accumulate = true, write_f32(p); }},
};

// Where the planners choose other tiles, and where rows end in the middle of a load.
const HeadDims dim_classes[] = {{1, 1},     {40, 40},   {64, 64},   {80, 80},   {96, 96},   {128, 128},
                                {160, 160}, {192, 192}, {192, 128}, {256, 256}, {512, 512}, {576, 512}};
const Type types[] = {Type::f32, Type::f16, Type::bf16};
const Pass passes[] = {Pass::forward, Pass::backward};
const char* const newest_architecture = "sm_90a";
const char* const architectures[] = {"sm_80", newest_architecture};
const char* const old_architecture = "sm_75";  // no cp.async, a quarter of the shared memory

const Option* option_named(const std::string& name) {
  return std::find_if(std::begin(options), std::end(options), [&](const Option& o) { return o.name == name; });
}

// What changes the code of `hopper`, besides head dims and types. A bias is of one type or the other.
const char* const hopper_options[] = {"scale",    "softcap", "alibi",  "mask",    "dropout", "bias",
                                      "f32 bias", "parts",   "finish", "f32 out", "pages"};
const HeadDims hopper_dims[] = {{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};  // its tiles
const Type hopper_types[] = {Type::f16, Type::bf16};

// What changes the code of `mma`, besides head dims and types, and where: every architecture from sm_75 on, of which
// these have tiles of a class each.
const char* const mma_options[] = {"scale", "softcap",  "alibi",   "mask",   "dropout",
                                   "bias",  "f32 bias", "f32 out", "narrow", "pages"};
const HeadDims mma_dims[] = {{40, 40}, {64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
const char* const mma_architectures[] = {"sm_75",   "sm_80",   "sm_86",   "sm_87",   "sm_89",  "sm_90a",
                                         "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"};
const char* const mma_classes[] = {"sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a"};

// What changes the code of `decode`, besides head dims and types: how many rows there are, and options.
const char* const decode_rows[] = {"one query", "16 rows", "32 rows", "64 rows"};
const char* const decode_lengths[] = {"few keys", "many keys"};  // for blocks that are alone, and for wide ones
const char* const decode_options[] = {"softcap",    "alibi", "pages", "f32 out", "scales",
                                      "dim scales", "tree",  "e4m3",  "i8"};
const HeadDims latent_dims[] = {{64, 512}, {64, 128}};  // of K, which V belongs to
const HeadDims decode_dims[] = {{40, 40}, {64, 64}, {128, 128}, {192, 128}, {256, 256}};
const char* const decode_architectures[] = {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"};

// Append, merge and reading: a kernel each, for every problem.
const char* const call_architectures[] = {"sm_75", "sm_80", "sm_90a", "sm_120a"};

// Whose kernels are looked at: those of every rung, of the one that a call gets, or of one family.
enum class Rungs { all, best, hopper, mma, decode };

bool concerns(Rungs rungs, const api::GpuPlan& plan) {
  if (rungs == Rungs::hopper) return plan.family == "hopper";
  if (rungs == Rungs::mma) return plan.family == "mma";
  if (rungs == Rungs::decode) return plan.family == "decode";
  return true;
}

// What the kernels of one family say, each for itself; of all the kernels `vector`, which takes most.
std::string refusal(Rungs rungs, const std::vector<api::GpuPlan>& plans) {
  if (rungs == Rungs::all || rungs == Rungs::best)
    return std::ranges::find(plans, "vector", &api::GpuPlan::kernel)->reason;
  std::string said;
  for (const api::GpuPlan& plan : plans)
    if (concerns(rungs, plan)) said += text(said.empty() ? "" : "; ", plan.kernel, ": ", plan.reason);
  return said;
}

class Collector {
 public:
  UnitSet set;

  // A plain problem with options, which are named one by one unless there is a name for them together. Nothing happens
  // if one of them does not concern it.
  void add(Rungs rungs, const char* architecture, Pass pass, Type type, HeadDims dims,
           const std::vector<const Option*>& chosen, const char* name = nullptr) {
    Problem p = api::plain_problem(pass, type, dims);
    std::string variant = text(name_of(type), " ", api::text_of(dims));
    for (const Option* option : chosen) {
      if (!concerns(*option, p)) return;
      option->apply(p);
      if (!name) variant += text(", ", option->name);
    }
    if (name) variant += text(", ", name);
    ++set.problems;
    const std::vector<api::GpuPlan> plans = api::gpu_plans(p, cuda::target_named(architecture));
    bool taken = false;
    for (const api::GpuPlan& plan : plans) {
      if (!plan.reason.empty() || !concerns(rungs, plan)) continue;
      if (rungs == Rungs::best && (taken || plan.by_name)) continue;
      taken = true;
      for (const cuda::NamedUnit& unit : plan.units) add_unit(unit, variant);
    }
    if (!taken)
      set.refused.push_back(text(architecture, ", ", pass == Pass::forward ? "forward" : "backward", ", ", variant,
                                 ": ", refusal(rungs, plans)));
  }

  // Of every rung, also of one that sums in any order.
  void plain(const char* architecture, Pass pass, Type type, HeadDims dims) {
    add(Rungs::all, architecture, pass, type, dims, {});
    add(Rungs::all, architecture, pass, type, dims, {&any_order});
  }

  void alone(const char* architecture, Pass pass, Type type, HeadDims dims) {
    for (const Option& option : options) add(Rungs::best, architecture, pass, type, dims, {&option});
  }

  void pairs(const char* architecture, Pass pass, Type type, HeadDims dims) {
    for (const Option* a = options; a != std::end(options); ++a)
      for (const Option* b = a + 1; b != std::end(options); ++b)
        add(Rungs::best, architecture, pass, type, dims, {a, b});
  }

  // With wide loads and without.
  void together(Rungs rungs, const char* architecture, Pass pass, Type type, HeadDims dims) {
    std::vector<const Option*> all, aligned;
    for (const Option& option : options) {
      if (!option.together || !concerns(option, api::plain_problem(pass, type, dims))) continue;
      all.push_back(&option);
      if (option.name != std::string("narrow")) aligned.push_back(&option);
    }
    add(rungs, architecture, pass, type, dims, all, "all options");
    add(rungs, architecture, pass, type, dims, aligned, "all options, aligned");
  }

  // `hopper`, which takes every problem that is aligned and in 16 bits.
  void hopper(Pass pass, Type type, HeadDims dims, const std::vector<std::string>& names) {
    std::vector<const Option*> chosen;
    for (const std::string& name : names) chosen.push_back(option_named(name));
    add(Rungs::hopper, newest_architecture, pass, type, dims, chosen);
  }
  void hopper_together(Pass pass, Type type, HeadDims dims, const std::vector<std::string>& with = {}) {
    for (const char* bias : {"bias", "f32 bias"}) {
      std::vector<std::string> names{"softcap", "alibi", "mask", "dropout", bias};
      names.insert(names.end(), with.begin(), with.end());
      hopper(pass, type, dims, names);
    }
  }
  void hopper_pairs(Pass pass, Type type, HeadDims dims) {
    for (const std::string first : hopper_options)
      for (const std::string second : hopper_options) hopper(pass, type, dims, {first, second});
  }
  // Without all gradients there is no one pass for them, and one of dK and dV has other tiles than both.
  void hopper_some_gradients(Type type, HeadDims dims) {
    for (const char* missing : {"no dQ", "no dK", "no dV"}) hopper(Pass::backward, type, dims, {missing});
  }
  // `mma`, which takes every problem in 16 bits up to D = 256.
  void mma(const char* architecture, Pass pass, Type type, HeadDims dims, const std::vector<std::string>& names) {
    std::vector<const Option*> chosen;
    for (const std::string& name : names) chosen.push_back(option_named(name));
    add(Rungs::mma, architecture, pass, type, dims, chosen);
  }
  void mma_pairs(const char* architecture, Pass pass, Type type, HeadDims dims) {
    for (const std::string first : mma_options)
      for (const std::string second : mma_options) mma(architecture, pass, type, dims, {first, second});
    for (const char* bias : {"bias", "f32 bias"}) {
      mma(architecture, pass, type, dims, {"softcap", "alibi", "mask", "dropout", bias});
      mma(architecture, pass, type, dims, {"softcap", "alibi", "mask", "dropout", bias, "pages"});
    }
  }

  // `decode`, which takes few rows in 16 bits up to D = 256.
  void decode(const char* architecture, Type type, HeadDims dims, const std::vector<std::string>& names) {
    std::vector<const Option*> chosen;
    for (const std::string& name : names) chosen.push_back(option_named(name));
    add(Rungs::decode, architecture, Pass::forward, type, dims, chosen);
  }

  // With every one and every two of its options, and with every three.
  void decode_options_of(const char* architecture, Type type, HeadDims dims, std::vector<std::string> names) {
    const auto with = [&](const char* option) {
      return names.push_back(option), decode(architecture, type, dims, names);
    };
    for (const char* const* a = decode_options; a != std::end(decode_options); ++a, names.pop_back()) {
      with(*a);
      for (const char* const* b = a + 1; b != std::end(decode_options); ++b, names.pop_back()) {
        with(*b);
        for (const char* const* c = b + 1; c != std::end(decode_options); ++c, names.pop_back()) with(*c);
      }
    }
  }

  void calls(const char* architecture) {
    add_unit({"append", "every type", {gpu::append_unit_text(), architecture}}, "every type");
    add_unit({"merge", "every type", {gpu::merge_unit_text(), architecture}}, "every type");
    add_unit({"read", "bytes", {cuda::read_unit_text(), architecture}}, "bytes");
  }

  void hopper_subsets(Pass pass, Type type, HeadDims dims) {
    const std::vector<std::string> others{"softcap", "alibi", "mask", "dropout"};
    for (const char* bias : {"", "bias", "f32 bias"})
      for (unsigned subset = 0; subset < 1u << others.size(); ++subset) {
        std::vector<std::string> names;
        for (std::size_t n = 0; n < others.size(); ++n)
          if (subset >> n & 1) names.push_back(others[n]);
        if (*bias) names.push_back(bias);
        hopper(pass, type, dims, names);
      }
    hopper(pass, type, dims, {"scale"});
  }

 private:
  void add_unit(const cuda::NamedUnit& unit, const std::string& variant) {
    if (!known.insert({unit.unit.architecture, unit.unit.text}).second) return;
    set.units.push_back({{unit.kernel, variant, unit.unit}, may_spill(unit.kernel)});
  }

  std::set<std::pair<std::string, std::string>> known;
};

constexpr HeadDims usual{64, 64};

}  // namespace

// Asking the planners is cheap, so there are many: every class of head dims without options, with each of them and all
// together, in every type, on every rung, for three generations of GPUs; pairs of options at one head dim; for `hopper`
// every set of options, for `mma` pairs of them in every class; for `decode` every number of rows with any three
// options, and with each over few keys and over many.
UnitSet known_units() {
  Collector c;
  for (const Pass pass : passes) {
    for (const char* architecture : architectures)
      for (const Type type : types) {
        for (const HeadDims dims : dim_classes) {
          c.plain(architecture, pass, type, dims);
          c.together(Rungs::best, architecture, pass, type, dims);
        }
        c.together(Rungs::all, architecture, pass, type, usual);
        for (const HeadDims dims : {usual, HeadDims{128, 128}, HeadDims{256, 256}})
          c.alone(architecture, pass, type, dims);
        c.pairs(architecture, pass, type, usual);
      }
    c.plain(old_architecture, pass, Type::f32, usual);
    for (const Type type : {Type::f32, Type::f16})
      for (const HeadDims dims : dim_classes) {
        c.add(Rungs::best, old_architecture, pass, type, dims, {});
        c.together(Rungs::best, old_architecture, pass, type, dims);
      }
  }
  for (const HeadDims dims : hopper_dims)
    for (const Type type : hopper_types) {
      for (const Pass pass : passes) {
        c.hopper_subsets(pass, type, dims);
        c.hopper_pairs(pass, type, dims);
        c.hopper_together(pass, type, dims, {"f32 out"});
        c.hopper_together(pass, type, dims, {"parts"});
      }
      c.hopper_some_gradients(type, dims);
      for (const char* missing : {"no dK", "no dV"}) c.hopper_together(Pass::backward, type, dims, {missing});
    }
  // sm_75 multiplies no bf16.
  for (const Type type : hopper_types)
    for (const HeadDims dims : mma_dims)
      for (const Pass pass : passes) {
        const auto multiplies = [&](const char* architecture) {
          return type == Type::f16 || architecture != std::string("sm_75");
        };
        for (const char* architecture : mma_architectures)
          if (multiplies(architecture)) c.mma(architecture, pass, type, dims, {});
        for (const char* architecture : mma_classes) {
          if (!multiplies(architecture)) continue;
          c.mma_pairs(architecture, pass, type, dims);
          for (const char* bytes : {"e4m3", "i8"}) {
            c.mma(architecture, pass, type, dims, {"pages", bytes});
            c.mma(architecture, pass, type, dims, {"pages", bytes, "head scales"});
            c.mma(architecture, pass, type, dims, {"pages", bytes, "head scales", "softcap", "alibi"});
          }
          for (const char* other : {"no dQ", "no dK", "no dV", "any order"})
            c.mma(architecture, pass, type, dims, {other});
        }
      }
  for (const Type type : hopper_types)
    for (const HeadDims dims : decode_dims)
      for (const char* architecture : decode_architectures)
        for (const std::string rows : decode_rows) {
          c.decode(architecture, type, dims, {rows});
          c.decode_options_of(architecture, type, dims, {rows});
          for (const std::string keys : decode_lengths) {
            c.decode(architecture, type, dims, {rows, keys});
            for (const char* option : decode_options) c.decode(architecture, type, dims, {rows, keys, option});
          }
        }
  for (const Type type : hopper_types)
    for (const char* architecture : decode_architectures) {
      for (const HeadDims dims : latent_dims)
        for (const std::string rows : {"one query", "16 rows"}) {
          c.decode(architecture, type, dims, {rows, "qv"});
          c.decode_options_of(architecture, type, dims, {rows, "qv"});
        }
      c.decode(architecture, type, {576, 512}, {"one query", "pages"});
    }
  for (const char* architecture : call_architectures) c.calls(architecture);
  return std::move(c.set);
}

}  // namespace tessera::gate
