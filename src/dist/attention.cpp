// SPDX-License-Identifier: Apache-2.0
// Plans over several ranks: what each must have right by itself, and what all must agree on; see attention.hpp.
#include "dist/attention.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <utility>

#include "dist/executor.hpp"
#include "dist/inputs.hpp"

namespace tessera::dist {
namespace {

[[noreturn]] void invalid(const std::string& sentence) { throw Error(TESSERA_INVALID_ARGUMENT, sentence); }

std::string text(Int64 x) { return std::to_string(x); }

Mask mask_of(const Options& o) {
  return {o.causal, o.window_left, o.window_right, o.alignment == Alignment::offset ? o.diagonal_offset : 0};
}

// What a rank asks for, number by number, with a name for each. Of a hash one can only say that it differs.
struct Question {
  const char* name;
  enum Kind { whole, real, hashed } kind;
  UInt64 bits;
};

std::string shown(Question::Kind kind, UInt64 bits) {
  char out[32];
  if (kind == Question::real)
    std::snprintf(out, sizeof out, "%g", std::bit_cast<double>(bits));
  else
    std::snprintf(out, sizeof out, "%lld", static_cast<long long>(bits));
  return out;
}

UInt64 hash(UInt64 seed, std::span<const Int64> numbers) {
  for (const Int64 x : numbers) seed = (seed ^ static_cast<UInt64>(x)) * 0xff51afd7ed558ccdu, seed ^= seed >> 31;
  return seed;
}

std::vector<Question> questions(const Problem& p, const Sharing& s) {
  std::vector<Question> out;
  const auto whole = [&](const char* name, Int64 x) { out.push_back({name, Question::whole, static_cast<UInt64>(x)}); };
  const auto real = [&](const char* name, double x) {
    out.push_back({name, Question::real, std::bit_cast<UInt64>(x)});
  };
  const auto hashed = [&](const char* name, UInt64 x) { out.push_back({name, Question::hashed, x}); };
  const Options& o = p.options;
  whole("Hq", p.Hq), whole("Hk", p.Hk), whole("D", p.D), whole("Dv", p.Dv), whole("type", Int64(p.type));
  whole("sequences", Int64(p.lengths.size())), hashed("lengths", hash(1, p.lengths));
  real("scale", o.scale), real("softcap", o.softcap), whole("causal", o.causal);
  const Mask mask = mask_of(o);
  whole("diagonal_offset", mask.offset), whole("window_left", o.window_left), whole("window_right", o.window_right);
  real("dropout", o.dropout), whole("seed", Int64(o.seed)), whole("seed_offset", Int64(o.seed_offset));
  whole("slices", s.partition.slices);
  UInt64 rows = 1;
  for (const std::vector<Span>& spans : s.partition.of) {
    rows = hash(rows, std::vector<Int64>{Int64(spans.size())});
    for (const Span& x : spans) rows = hash(rows, std::vector<Int64>{x.sequence, x.begin, x.end});
  }
  hashed("partition", rows), whole("scheme", Int64(s.scheme)), whole("segment", s.segment);
  whole("grain", s.grain), whole("deterministic", o.deterministic);
  whole("part_invariant", o.part_invariant), whole("segment_rows", o.segment_rows);
  return out;
}

constexpr std::size_t complaint_bytes = 256;

// Tensors of a rank.
struct Checker {
  const Problem& p;
  Int64 rows;
  Device device;

  void shape(const char* name, const Tensor& t, const std::vector<Int64>& shape, std::vector<Type> types) const {
    const auto listed = [](const Int64* sizes, std::size_t count) {
      std::string out;
      for (std::size_t i = 0; i < count; ++i) out.append(i ? "," : "").append(text(sizes[i]));
      return out;
    };
    const std::string wanted = listed(shape.data(), shape.size());
    std::vector<Int64> sizes(t.shape.begin(), t.shape.begin() + std::clamp(t.ndim, 0, 4));
    const std::string is = listed(sizes.data(), sizes.size());
    if (is != wanted || t.ndim != static_cast<int>(shape.size()))
      invalid(std::string(name) + ": has the shape [" + is + "]; must have [" + wanted + "], the rows of this rank");
    if (t.device != device)
      invalid(std::string(name) + (device.type == DeviceType::cpu
                                       ? ": must be in the CPU's memory"
                                       : ": must be in the memory of cuda:" + text(device.id) + ", the plan's device"));
    if (device.type != DeviceType::cpu && t.ndim > 2 && sizes.back() > 1 && t.strides[sizes.size() - 1] != 1)
      invalid(std::string(name) + ": its last dimension has stride " + text(t.strides[sizes.size() - 1]) +
              "; must be 1 on a device");
    if (std::find(types.begin(), types.end(), t.type) == types.end())
      invalid(std::string(name) + ": has another type than the problem");
    if (t.elements() > 0 && t.data == nullptr) invalid(std::string(name) + ": has no data");
  }

  void inputs(const Inputs& in) const {
    shape("q", in.q, {rows, p.Hq, p.D}, {p.type});
    shape("k", in.k, {rows, p.Hk, p.D}, {p.type});
    shape("v", in.v, {rows, p.Hk, p.Dv}, {p.type});
    pairs("bias", in.bias, {p.type, Type::f32});
    pairs("mask", in.mask, {Type::u8});
    if (in.slopes && in.slopes.ndim == 2)
      shape("slopes", in.slopes, {Int64(p.lengths.size()), p.Hq}, {Type::f32});
    else if (in.slopes)
      shape("slopes", in.slopes, {p.Hq}, {Type::f32});
    if (in.sinks) shape("sinks", in.sinks, {p.Hq}, {Type::f32});
    if (const char* name = first_besides(in, {&in.q, &in.k, &in.v, &in.bias, &in.mask, &in.slopes, &in.sinks}))
      invalid(std::string(name) +
              ": is given; over several ranks there are q, k, v, bias, mask, slopes and sinks, and "
              "lengths, seed and offset are the plan's");
  }

  // Each number is of pairs that one rank works on; sums over rows or heads of several are not made.
  void bias_gradient(const Tensor& bias, const Tensor& dbias, int slices) const {
    if (!bias) invalid("dbias: is given without bias");
    if (bias.shape[2] != rows)
      invalid("dbias: is given, and bias is the same for all rows; over several ranks it must have each of the " +
              text(rows) + " rows of this rank");
    if (bias.shape[1] != p.Hq && slices > 1)
      invalid("dbias: is given, and bias is the same for all heads; where " + text(slices) +
              " slices share the heads it must have each of the " + text(p.Hq));
    shape("dbias", dbias, {1, bias.shape[1], rows, bias.shape[3]}, {bias.type, Type::f32});
  }

  void pairs(const char* name, const Tensor& t, std::vector<Type> types) const {
    if (!t) return;
    Int64 longest = 0;
    for (const Int64 n : p.lengths) longest = greater(longest, n);
    const auto either = [&](std::size_t i, Int64 n) { return t.ndim == 4 && t.shape[i] == 1 ? 1 : n; };
    const Int64 keys = t.ndim == 4 ? greater(t.shape[3], longest) : longest;
    shape(name, t, {1, either(1, p.Hq), either(2, rows), either(3, keys)}, std::move(types));
  }
};

// Which inputs are given, as a part of what distinguishes a call's messages.
UInt64 flags_of(const Inputs& in) {
  return UInt64(bool(in.bias)) << 1 | UInt64(bool(in.mask)) << 2 | UInt64(bool(in.slopes)) << 6 |
         UInt64(bool(in.sinks)) << 7;
}

}  // namespace

Range key_heads(Int64 Hk, int slice, int slices) { return {Hk * slice / slices, Hk * (slice + 1) / slices}; }

Plan::Plan(std::shared_ptr<Communicator> communicator, Problem asked, Sharing how) :
    line(std::move(communicator), how.timeout), problem(std::move(asked)), sharing(std::move(how)) {
  agree();
  const Mask mask = mask_of(problem.options);
  const auto make = [&](Pass pass) {
    return make_schedule(problem.lengths, mask, sharing.partition,
                         {sharing.scheme, pass, sharing.segment, sharing.grain});
  };
  line.together([&] { forward_schedule = make(Pass::forward), backward_schedule = make(Pass::backward); });
}

// What is wrong with this rank's question, whatever the others ask.
std::optional<Error> Plan::complaint() const {
  const Options& o = problem.options;
  try {
    const Partition& partition = sharing.partition;
    if (partition.ranks() != line.size())
      invalid("partition: is for " + text(partition.ranks()) + " ranks; the communicator has " + text(line.size()));
    if (partition.slices < 1 || partition.ranks() % partition.slices != 0)
      invalid("partition: has " + text(partition.slices) + " slices; must divide the " + text(partition.ranks()) +
              " ranks");
    if (partition.slices > problem.Hk)
      invalid("partition: has " + text(partition.slices) + " slices; there are " + text(problem.Hk) +
              " key heads to share out");
    if (problem.type != Type::f32 && problem.type != Type::f16 && problem.type != Type::bf16)
      invalid("type: must be f32, f16 or bf16");
    if (o.row0 != 0 || o.col0 != 0 || o.head0 != 0 || o.batch0 != 0)
      invalid("row0, col0, head0 and batch0: must be 0; the plan knows where each part lies");
    if (o.accumulate) invalid("accumulate: is 1; must be 0 over several ranks");
    if (sharing.segment < 0) invalid("segment: is " + text(sharing.segment) + "; must be 0 (none) or positive");
    if (sharing.grain < 1) invalid("grain: is " + text(sharing.grain) + "; must be positive");
    if (const std::string fault = fault_of(partition, problem.lengths); !fault.empty()) invalid(fault);
    make_schedule(problem.lengths, mask_of(o), partition,
                  {sharing.scheme, Pass::forward, sharing.segment, sharing.grain});
    // The rules for one device are the library's.
    const Range kv = key_heads(problem.Hk, 0, partition.slices);
    Inputs in;
    in.q = Tensor(nullptr, problem.type, {1, 1, problem.Hq / problem.Hk * kv.size(), problem.D});
    in.k = Tensor(nullptr, problem.type, {1, 1, kv.size(), problem.D});
    in.v = Tensor(nullptr, problem.type, {1, 1, kv.size(), problem.Dv});
    if (problem.Hq % problem.Hk != 0)
      invalid("Hq: is " + text(problem.Hq) + "; must be a multiple of Hk, " + text(problem.Hk));
    const Int64 hq = problem.Hq / problem.Hk * kv.size();
    const Device device = sharing.memory->device();
    for (Tensor* t : {&in.q, &in.k, &in.v}) t->device = device;
    Outputs out;
    out.state = {Tensor(nullptr, Type::f32, {1, 1, hq, problem.Dv}, device),
                 Tensor(nullptr, Type::f32, {1, hq, 1}, device), Tensor(nullptr, Type::f64, {1, hq, 1}, device)};
    sharing.memory->plan(in, out, o, sharing.execution());
    return {};
  } catch (const Error& error) {
    return error;
  }
}

void Plan::agree() {
  std::vector<Question> mine;
  std::optional<Error> wrong;
  std::vector<Bytes> all;
  line.together([&] {
    mine = questions(problem, sharing), wrong = complaint();
    Bytes record(mine.size() * sizeof(UInt64) + complaint_bytes);
    for (std::size_t i = 0; i < mine.size(); ++i) std::memcpy(record.data() + 8 * i, &mine[i].bits, 8);
    if (wrong)  // the others hear its beginning
      std::memcpy(record.data() + 8 * mine.size(), wrong->what(), strnlen(wrong->what(), complaint_bytes - 1));
    all = line.gather(record);
  });

  const auto bits = [&](int r, std::size_t i) {
    UInt64 x;
    std::memcpy(&x, all[static_cast<std::size_t>(r)].data() + 8 * i, 8);
    return x;
  };
  for (std::size_t i = 0; i < mine.size(); ++i)
    for (int r = 1; r < line.size(); ++r) {
      if (bits(r, i) == bits(0, i)) continue;
      const auto value = [&](int of) { return shown(mine[i].kind, bits(of, i)); };
      const std::string pair = mine[i].kind == Question::hashed
                                   ? " between rank 0 and rank " + text(r)
                                   : ": rank 0 has " + value(0) + ", rank " + text(r) + " has " + value(r);
      throw Error(TESSERA_COMMUNICATION_ERROR, std::string(mine[i].name) + " differs" + pair);
    }
  if (wrong) throw *wrong;
  for (int r = 0; r < line.size(); ++r) {
    const char* theirs = reinterpret_cast<const char*>(all[static_cast<std::size_t>(r)].data() + 8 * mine.size());
    if (*theirs) throw Error(TESSERA_COMMUNICATION_ERROR, "rank " + text(r) + ": " + theirs);
  }
}

Problem Plan::with(const std::optional<Seed>& seed) const {
  Problem now = problem;
  if (seed) now.options.seed = seed->seed, now.options.seed_offset = seed->offset;
  return now;
}

// Distinguishes the messages of a call from those of another plan's, and of a call with other arguments. Seeds that
// nothing uses may differ.
UInt64 Plan::call_number(const Problem& now, UInt64 flags, Type written) {
  const Options& o = now.options;
  const UInt64 seed = o.dropout > 0 ? o.seed : 0, offset = o.dropout > 0 ? o.seed_offset : 0;
  return hash(++calls,
              std::vector<Int64>{Int64(flags), Int64(written), Int64(seed), Int64(offset), Int64(line.plan())});
}

void refuse(std::shared_ptr<Communicator> communicator, std::exception_ptr why) {
  Line(std::move(communicator), 0).together([&] { std::rethrow_exception(why); });
  std::rethrow_exception(why);  // not reached: what a body throws, together() throws
}

void Plan::forward(const Inputs& in, const Outputs& out, std::optional<Seed> seed) {
  line.together([&] {
    const Problem now = with(seed);
    const Int64 rows = sharing.partition.rows(line.rank());
    const Checker check{problem, rows, sharing.memory->device()};
    check.inputs(in);
    check.shape("o", out.o, {rows, problem.Hq, problem.Dv}, {problem.type, Type::f32});
    if (out.lse) check.shape("lse", out.lse, {problem.Hq, rows}, {Type::f32});
    const UInt64 flags = flags_of(in) | UInt64(bool(out.lse));
    Executor(line, now, sharing, forward_schedule, call_number(now, flags, out.o.type)).forward(in, out);
  });
}

void Plan::backward(const Inputs& in, const Saved& saved, const Gradients& g, std::optional<Seed> seed) {
  line.together([&] {
    const Problem now = with(seed);
    const Int64 rows = sharing.partition.rows(line.rank());
    const Checker check{problem, rows, sharing.memory->device()};
    check.inputs(in);
    check.shape("o", saved.o, {rows, problem.Hq, problem.Dv}, {problem.type, Type::f32});
    check.shape("d_o", saved.d_o, {rows, problem.Hq, problem.Dv}, {problem.type, Type::f32});
    check.shape("lse", saved.lse, {problem.Hq, rows}, {Type::f32});
    if (saved.d_lse) check.shape("d_lse", saved.d_lse, {problem.Hq, rows}, {Type::f32});
    if (!g.dq || !g.dk || !g.dv) invalid("dq, dk and dv: must all be given over several ranks");
    if (g.dbias) check.bias_gradient(in.bias, g.dbias, sharing.partition.slices);
    check.shape("dq", g.dq, {rows, problem.Hq, problem.D}, {problem.type, Type::f32});
    check.shape("dk", g.dk, {rows, problem.Hk, problem.D}, {problem.type, Type::f32});
    check.shape("dv", g.dv, {rows, problem.Hk, problem.Dv}, {problem.type, Type::f32});
    if (g.dsinks && !in.sinks) invalid("dsinks: is given without sinks");
    if (g.dsinks) check.shape("dsinks", g.dsinks, {problem.Hq}, {Type::f32});
    const UInt64 flags = flags_of(in) | UInt64(bool(saved.d_lse)) | UInt64(bool(g.dsinks)) << 3 | UInt64(1) << 4 |
                         UInt64(bool(g.dbias)) << 5;
    Executor(line, now, sharing, backward_schedule, call_number(now, flags, g.dq.type)).backward(in, saved, g);
  });
}

}  // namespace tessera::dist
