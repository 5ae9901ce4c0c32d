// Every rule for the caller's arguments, and its sentence; see check.hpp.
#include "core/check.hpp"

#include <cmath>
#include <string>

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "math/philox.hpp"

namespace tessera {
namespace {

constexpr std::int64_t max_head_dim = 576, max_value_dim = 512;
using Shape = std::initializer_list<std::int64_t>;

std::string shape_text(Shape shape) {
  std::string out;
  for (auto n : shape) out += text(out.empty() ? "[" : ",", n);
  return out + "]";
}

std::int64_t dim(const Tensor& t, int i) { return t.shape[static_cast<std::size_t>(i)]; }

// --- one tensor ------------------------------------------------------------------------------------------------------

void check_given(const char* name, const Tensor& t) {
  if (!t) invalid(name, ": is missing; it is required");
}

// Holds for every tensor, whatever its part.
void check_view(const char* name, const Tensor& t, Device device) {
  if (t.ndim < 1 || t.ndim > 4) invalid(name, ": has ", t.ndim, " dimensions; tensors have 1 to 4");
  if (size_of(t.type) == 0) invalid(name, ": type code ", static_cast<int>(t.type), " is not one of tessera_type");
  std::int64_t elements = 1;
  for (int i = 0; i < t.ndim; ++i) {
    if (dim(t, i) < 0) invalid(name, ": has shape ", shape_text(t), "; sizes must not be negative");
    if (__builtin_mul_overflow(elements, dim(t, i) == 0 ? 1 : dim(t, i), &elements))
      invalid(name, ": has shape ", shape_text(t), "; its element count must fit 64 bits");
  }
  if (t.device != device)
    invalid(name, ": is on ", name_of(t.device), " but the call runs on ", name_of(device),
            "; all tensors must be there");
}

void check_ndim(const char* name, const Tensor& t, int ndim, const char* layout) {
  if (t.ndim != ndim)
    invalid(name, ": has shape ", shape_text(t), ", ", t.ndim, " dimensions; expected ", ndim, ", ", layout);
}

void check_shape(const char* name, const Tensor& t, Shape expected, const char* meaning) {
  bool same = t.ndim == static_cast<int>(expected.size());
  int i = 0;
  for (auto n : expected) same = same && dim(t, i++) == n;
  if (!same) invalid(name, ": has shape ", shape_text(t), "; must be ", meaning, " = ", shape_text(expected));
}

void check_rows(const char* name, const Tensor& t) {
  const int last = t.ndim - 1;
  if (dim(t, last) > 1 && t.strides[static_cast<std::size_t>(last)] != 1)
    invalid(name, ": last dimension has stride ", t.strides[static_cast<std::size_t>(last)], "; it must be 1");
}

void check_writable(const char* name, const Tensor& t) {
  for (int i = 0; i < t.ndim; ++i)
    if (dim(t, i) > 1 && t.strides[static_cast<std::size_t>(i)] == 0)
      invalid(name, ": dimension ", i, " of shape ", shape_text(t),
              " has stride 0; outputs must not overlap themselves");
}

// Tensors that follow another one's type, or are f32.
void check_follows(const char* name, Type type, const char* leader, Type leader_type) {
  if (type == leader_type || type == Type::f32) return;
  invalid(name, ": has type ", name_of(type), "; must be ", name_of(leader_type), " like ", leader, ", or f32");
}

// Tensors that are always f32 (or f64 beside f64 inputs, so that the oracle has no f32 in it).
void check_single(const char* name, const Tensor& t, Type q_type) {
  if (t.type == Type::f32 || (t.type == Type::f64 && q_type == Type::f64)) return;
  invalid(name, ": has type ", name_of(t.type), "; must be f32", q_type == Type::f64 ? " or f64" : "");
}

void check_type(const char* name, const Tensor& t, Type expected) {
  if (t.type != expected) invalid(name, ": has type ", name_of(t.type), "; must be ", name_of(expected));
}

// --- options
// -----------------------------------------------------------------------------------------------------------

void check_window(const char* name, std::int64_t width) {
  if (width < -1) invalid(name, ": is ", width, "; must be -1 (no bound) or at least 0");
}

void check_dropout(const Options& o, const Tensor& rng) {
  if (!(o.dropout >= 0 && o.dropout < 1)) invalid("dropout: is ", o.dropout, "; must be in [0, 1)");
  if (dropout_threshold(o.dropout) > 65535)
    invalid("dropout: is ", o.dropout, "; rounded to 1/65536 it drops everything; use a smaller one");
  if (!rng) return;
  check_type("rng", rng, Type::i64);
  check_shape("rng", rng, {2}, "[seed, offset]");
  if (o.seed != 0 || o.seed_offset != 0)
    invalid("seed: is ", o.seed, " with offset ", o.seed_offset, " while rng is given; use one or the other");
}

void check_options(const Options& o, const Tensor& rng) {
  if (!std::isfinite(o.scale)) invalid("scale: is ", o.scale, "; must be finite");
  if (!(o.softcap >= 0 && std::isfinite(o.softcap)))
    invalid("softcap: is ", o.softcap, "; must be 0 (none) or a positive finite number");
  if (o.alignment != Alignment::bottom_right && o.alignment != Alignment::top_left && o.alignment != Alignment::offset)
    invalid("alignment: is ", static_cast<int>(o.alignment), "; must be 0 (bottom right), 1 (top left) or 2 (offset)");
  if (o.alignment != Alignment::offset && o.diagonal_offset != 0)
    invalid("diagonal_offset: is ", o.diagonal_offset, " but alignment is not offset; it would be ignored");
  check_window("window_left", o.window_left);
  check_window("window_right", o.window_right);
  check_window("max_seqlen_q", o.max_seqlen_q);
  check_window("max_seqlen_k", o.max_seqlen_k);
  check_dropout(o, rng);
}

void check_execution(const Execution& e, Device device) {
  if (e.threads < 0) invalid("threads: is ", e.threads, "; must be 0 (all) or positive");
  if (e.device.type != DeviceType::any && e.device != device)
    invalid("device: is ", name_of(e.device), " but q is on ", name_of(device), "; they must agree");
}

// --- the parts of a call
// -------------------------------------------------------------------------------------------------

void check_attention_type(const char* name, Type type) {
  if (type == Type::e4m3 || type == Type::e5m2)
    throw Failure(TESSERA_UNSUPPORTED, text(name, ": type ", name_of(type), " is reserved; use f32, f16 or bf16"));
  if (!is_float(type))
    invalid(name, ": has type ", name_of(type), "; must be f32, f16, bf16, or f64 for the reference");
}

// Layout and sizes of q, k, v.
void check_qkv(const Inputs& in, Problem& p) {
  check_given("q", in.q), check_given("k", in.k), check_given("v", in.v);
  p.device = in.q.device;
  if (p.device.type != DeviceType::cpu && p.device.type != DeviceType::cuda)
    invalid("q: is on ", name_of(p.device), "; must be on cpu or cuda");
  for (const auto& [name, t] : {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}}) {
    check_view(name, *t, p.device);
    check_attention_type(name, t->type);
  }
  p.q_type = in.q.type, p.kv_type = in.k.type;
  if (in.k.type != in.q.type)
    invalid("k: has type ", name_of(in.k.type), " but q has ", name_of(in.q.type), "; they must agree");
  if (in.v.type != in.k.type)
    invalid("v: has type ", name_of(in.v.type), " but k has ", name_of(in.k.type), "; they must agree");

  if (bool(in.cu_seqlens_q) != bool(in.cu_seqlens_k))
    invalid(in.cu_seqlens_q ? "cu_seqlens_k" : "cu_seqlens_q", ": is missing; packed input needs both cu_seqlens");
  p.packed = bool(in.cu_seqlens_q);
  const int token_dim = p.packed ? 0 : 1, ndim = p.packed ? 3 : 4;
  const char* layout = p.packed ? "[tokens, heads, dim] since cu_seqlens are given" : "[batch, tokens, heads, dim]";
  check_ndim("q", in.q, ndim, layout), check_ndim("k", in.k, ndim, layout), check_ndim("v", in.v, ndim, layout);
  p.B = p.packed ? 0 : dim(in.q, 0);
  p.Nq = dim(in.q, token_dim), p.Hq = dim(in.q, token_dim + 1), p.D = dim(in.q, token_dim + 2);
  p.Nk = dim(in.k, token_dim), p.Hk = dim(in.k, token_dim + 1);
  p.Dv = dim(in.v, token_dim + 2);

  if (p.D < 1 || p.D > max_head_dim) invalid("q: head_dim is ", p.D, "; must be from 1 to ", max_head_dim);
  if (p.Dv < 1 || p.Dv > max_value_dim) invalid("v: head_dim is ", p.Dv, "; must be from 1 to ", max_value_dim);
  if (dim(in.k, token_dim + 2) != p.D)
    invalid("k: head_dim is ", dim(in.k, token_dim + 2), " but q has ", p.D, "; q and k must agree in head_dim");
  if (!p.packed && dim(in.k, 0) != p.B)
    invalid("k: batch is ", dim(in.k, 0), " but q has ", p.B, "; q, k and v must agree in batch");
  if (!p.packed && dim(in.v, 0) != p.B)
    invalid("v: batch is ", dim(in.v, 0), " but q has ", p.B, "; q, k and v must agree in batch");
  if (dim(in.v, token_dim) != p.Nk)
    invalid("v: has ", dim(in.v, token_dim), " tokens but k has ", p.Nk, "; k and v must agree in tokens");
  if (dim(in.v, token_dim + 1) != p.Hk)
    invalid("v: has ", dim(in.v, token_dim + 1), " heads but k has ", p.Hk, "; k and v must agree in heads");
  if (p.Hk == 0 ? p.Hq != 0 : p.Hq % p.Hk != 0)
    invalid("q: has ", p.Hq, " heads but k has ", p.Hk, "; q's must be a multiple of k's");
  check_rows("q", in.q), check_rows("k", in.k), check_rows("v", in.v);
}

void check_lengths(const Inputs& in, Problem& p) {
  if (p.packed) {
    check_ndim("cu_seqlens_q", in.cu_seqlens_q, 1, "[batch + 1]");
    if (dim(in.cu_seqlens_q, 0) < 1) invalid("cu_seqlens_q: has shape [0]; must be [batch + 1]");
    p.B = dim(in.cu_seqlens_q, 0) - 1;
  }
  for (const auto& [name, t, count] : {std::tuple{"cu_seqlens_q", &in.cu_seqlens_q, p.B + 1},
                                       {"cu_seqlens_k", &in.cu_seqlens_k, p.B + 1},
                                       {"seqused_q", &in.seqused_q, p.B},
                                       {"seqused_k", &in.seqused_k, p.B}}) {
    if (!*t) continue;
    check_view(name, *t, p.device);
    check_type(name, *t, Type::i32);
    check_shape(name, *t, {count}, count == p.B ? "[batch]" : "[batch + 1]");
  }
  p.seqused_q = bool(in.seqused_q), p.seqused_k = bool(in.seqused_k);
}

// bias and mask: each dimension 1 or full. For packed input the last two need only hold every sequence: an upper bound,
// so at least the longest length that is known without reading lengths.
std::optional<Broadcast> check_broadcast(const char* name, const Tensor& t, const Problem& p) {
  if (!t) return {};
  check_view(name, t, p.device);
  check_ndim(name, t, 4, "[batch|1, heads|1, queries|1, keys|1]");
  const char* names[] = {"batch", "heads", "queries", "keys"};
  const std::int64_t full[] = {p.B, p.Hq, p.Nq, p.Nk};
  for (int i = 0; i < 4; ++i) {
    if (dim(t, i) == 1 || dim(t, i) == full[i] || (p.packed && i >= 2)) continue;
    invalid(name, ": has shape ", shape_text(t), "; its ", names[i], " must be 1 or ", full[i]);
  }
  return Broadcast{t.type, t.shape};
}

void check_extras(const Inputs& in, Problem& p) {
  p.bias = check_broadcast("bias", in.bias, p);
  if (p.bias) check_follows("bias", p.bias->type, "q", p.q_type);
  p.mask = check_broadcast("mask", in.mask, p);
  if (p.mask) check_type("mask", in.mask, Type::u8);
  if (in.slopes) {
    check_view("slopes", in.slopes, p.device);
    check_single("slopes", in.slopes, p.q_type);
    if (in.slopes.ndim == 2) check_shape("slopes", in.slopes, {p.B, p.Hq}, "[batch, heads]");
    if (in.slopes.ndim != 2) check_shape("slopes", in.slopes, {p.Hq}, "[heads] or [batch, heads]");
    p.slopes = in.slopes.ndim;
  }
  if (in.sinks) {
    check_view("sinks", in.sinks, p.device);
    check_single("sinks", in.sinks, p.q_type);
    check_shape("sinks", in.sinks, {p.Hq}, "[heads]");
    p.sinks = true;
  }
  if (in.rng) check_view("rng", in.rng, p.device);
  p.rng = bool(in.rng);
}

Problem check_inputs(Pass pass, const Inputs& in, const Options& options, const Execution& execution) {
  Problem p{.pass = pass};
  check_qkv(in, p);
  check_lengths(in, p);
  check_extras(in, p);
  check_options(options, in.rng);
  check_execution(execution, p.device);
  p.options = options;
  p.options.seed = p.options.seed_offset = 0;
  if (options.scale == default_scale) p.options.scale = 1.0 / std::sqrt(static_cast<double>(p.D));
  return p;
}

// A tensor with one row of `width` per query (or key) and head, in the layout of q, k, v.
void check_token_tensor(const char* name, const Tensor& t, const Problem& p, bool keys, std::int64_t width) {
  check_view(name, t, p.device);
  const std::int64_t tokens = keys ? p.Nk : p.Nq, heads = keys ? p.Hk : p.Hq;
  if (p.packed) check_shape(name, t, {tokens, heads, width}, "[tokens, heads, dim]");
  if (!p.packed) check_shape(name, t, {p.B, tokens, heads, width}, "[batch, tokens, heads, dim]");
  check_rows(name, t);
}

void check_lse(const char* name, const Tensor& t, const Problem& p) {
  check_view(name, t, p.device);
  check_single(name, t, p.q_type);
  if (p.packed) check_shape(name, t, {p.Hq, p.Nq}, "[heads, tokens]");
  if (!p.packed) check_shape(name, t, {p.B, p.Hq, p.Nq}, "[batch, heads, queries]");
}

int common_alignment(std::initializer_list<const Tensor*> tensors) {
  int alignment = 16;
  for (const Tensor* t : tensors)
    if (*t) alignment = std::min(alignment, alignment_of(*t));
  return alignment;
}

}  // namespace

Problem check_forward(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution) {
  Problem p = check_inputs(Pass::forward, in, options, execution);
  check_given("o", out.o);
  check_token_tensor("o", out.o, p, false, p.Dv);
  check_follows("o", out.o.type, "q", p.q_type);
  check_writable("o", out.o);
  p.o_type = out.o.type;
  if (out.lse) {
    check_lse("lse", out.lse, p);
    check_writable("lse", out.lse);
    p.lse = true;
  }
  p.alignment = common_alignment({&in.q, &in.k, &in.v, &out.o});
  return p;
}

Problem check_backward(const Inputs& in, const Saved& saved, const Gradients& g, const Options& options,
                       const Execution& execution) {
  Problem p = check_inputs(Pass::backward, in, options, execution);
  check_given("o", saved.o), check_given("lse", saved.lse), check_given("d_o", saved.d_o);
  check_token_tensor("o", saved.o, p, false, p.Dv);
  check_follows("o", saved.o.type, "q", p.q_type);
  check_token_tensor("d_o", saved.d_o, p, false, p.Dv);
  check_follows("d_o", saved.d_o.type, "q", p.q_type);
  check_lse("lse", saved.lse, p);
  if (saved.d_lse) check_lse("d_lse", saved.d_lse, p);
  p.o_type = saved.o.type, p.d_o = saved.d_o.type, p.lse = true, p.d_lse = bool(saved.d_lse);

  const auto gradient = [&](const char* name, const Tensor& t, const char* leader, Type type) -> std::optional<Type> {
    if (!t) return {};
    check_follows(name, t.type, leader, type);
    check_writable(name, t);
    if (options.accumulate && t.type != Type::f32 && t.type != Type::f64)
      invalid(name, ": has type ", name_of(t.type), " while accumulate is set; accumulating needs f32");
    return t.type;
  };
  if (g.dq) check_token_tensor("dq", g.dq, p, false, p.D);
  if (g.dk) check_token_tensor("dk", g.dk, p, true, p.D);
  if (g.dv) check_token_tensor("dv", g.dv, p, true, p.Dv);
  p.dq = gradient("dq", g.dq, "q", p.q_type);
  p.dk = gradient("dk", g.dk, "k", p.kv_type);
  p.dv = gradient("dv", g.dv, "v", p.kv_type);
  if (g.dbias) {
    if (!p.bias) invalid("dbias: is given but bias is not; there is nothing to differentiate");
    check_view("dbias", g.dbias, p.device);
    const auto& s = p.bias->shape;
    check_shape("dbias", g.dbias, {s[0], s[1], s[2], s[3]}, "bias's shape");
    p.dbias = gradient("dbias", g.dbias, "bias", p.bias->type);
  }
  if (g.dsinks) {
    if (!p.sinks) invalid("dsinks: is given but sinks is not; there is nothing to differentiate");
    check_view("dsinks", g.dsinks, p.device);
    check_shape("dsinks", g.dsinks, {p.Hq}, "[heads]");
    p.dsinks = gradient("dsinks", g.dsinks, "sinks", in.sinks.type);
  }
  p.alignment = common_alignment({&in.q, &in.k, &in.v, &saved.o, &saved.d_o, &g.dq, &g.dk, &g.dv});
  return p;
}

// --- what only a run needs
// -------------------------------------------------------------------------------------------------

namespace {

void check_data(const char* name, const Tensor& t) {
  if (!t || t.elements() == 0) return;
  if (!t.data)
    invalid(name, ": data is null but its shape is ", shape_text(t), "; null is allowed only without elements");
  if (reinterpret_cast<std::uintptr_t>(t.data) % static_cast<std::uintptr_t>(size_of(t.type)) != 0)
    invalid(name, ": data is not aligned to its elements of ", size_of(t.type), " bytes");
}

std::int32_t entry(const Tensor& t, std::int64_t i) {
  return static_cast<const std::int32_t*>(t.data)[i * stride(t, 0)];
}

// Lengths of the sequences of one side (q or k), in host memory.
void check_host_lengths(const char* cu_name, const Tensor& cu, const char* used_name, const Tensor& used,
                        const char* hint_name, std::int64_t hint, const Problem& p, std::int64_t tokens) {
  for (std::int64_t b = 0; b < p.B; ++b) {
    std::int64_t length = tokens;
    if (cu) {
      const std::int64_t begin = entry(cu, b), end = entry(cu, b + 1);
      if (b == 0 && begin < 0) invalid(cu_name, ": entry 0 is ", begin, "; must not be negative");
      if (end < begin)
        invalid(cu_name, ": entry ", b + 1, " is ", end, " after ", begin, "; entries must not decrease");
      if (end > tokens) invalid(cu_name, ": entry ", b + 1, " is ", end, " but there are only ", tokens, " tokens");
      length = end - begin;
      if (hint >= 0 && length > hint)
        invalid(hint_name, ": is ", hint, " but sequence ", b, " has length ", length, "; it must be an upper bound");
    }
    if (used && (entry(used, b) < 0 || entry(used, b) > length))
      invalid(used_name, ": entry ", b, " is ", entry(used, b), "; must be from 0 to the sequence's length ", length);
  }
}

// Packed bias and mask are indexed inside each sequence: they must reach the longest.
void check_host_broadcast(const char* name, const Tensor& t, const Inputs& in, const Problem& p) {
  if (!t || !p.packed) return;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const std::int64_t nq = entry(in.cu_seqlens_q, b + 1) - entry(in.cu_seqlens_q, b);
    const std::int64_t nk = entry(in.cu_seqlens_k, b + 1) - entry(in.cu_seqlens_k, b);
    if ((dim(t, 2) != 1 && dim(t, 2) < nq) || (dim(t, 3) != 1 && dim(t, 3) < nk))
      invalid(name, ": has shape ", shape_text(t), " but sequence ", b, " has ", nq, " queries and ", nk,
              " keys; its last two dimensions must be 1 or at least every length");
  }
}

}  // namespace

void check_run(const Problem& p, const Call& call) {
  const auto& in = call.inputs;
  for (const auto& [name, t] : {std::pair{"q", &in.q},
                                {"k", &in.k},
                                {"v", &in.v},
                                {"bias", &in.bias},
                                {"mask", &in.mask},
                                {"slopes", &in.slopes},
                                {"sinks", &in.sinks},
                                {"cu_seqlens_q", &in.cu_seqlens_q},
                                {"cu_seqlens_k", &in.cu_seqlens_k},
                                {"seqused_q", &in.seqused_q},
                                {"seqused_k", &in.seqused_k},
                                {"rng", &in.rng},
                                {"o", p.pass == Pass::forward ? &call.outputs.o : &call.saved.o},
                                {"lse", p.pass == Pass::forward ? &call.outputs.lse : &call.saved.lse},
                                {"d_o", &call.saved.d_o},
                                {"d_lse", &call.saved.d_lse},
                                {"dq", &call.gradients.dq},
                                {"dk", &call.gradients.dk},
                                {"dv", &call.gradients.dv},
                                {"dbias", &call.gradients.dbias},
                                {"dsinks", &call.gradients.dsinks}})
    check_data(name, *t);
  if (p.device.type != DeviceType::cpu) return;
  check_host_lengths("cu_seqlens_q", in.cu_seqlens_q, "seqused_q", in.seqused_q, "max_seqlen_q", p.options.max_seqlen_q,
                     p, p.Nq);
  check_host_lengths("cu_seqlens_k", in.cu_seqlens_k, "seqused_k", in.seqused_k, "max_seqlen_k", p.options.max_seqlen_k,
                     p, p.Nk);
  check_host_broadcast("bias", in.bias, in, p);
  check_host_broadcast("mask", in.mask, in, p);
}

// --- merge and the dropout mask
// ----------------------------------------------------------------------------------------------

namespace {

void check_cpu(const char* name, const Tensor& t, const Execution& execution) {
  if (t.device.type != DeviceType::cpu)
    throw Failure(TESSERA_UNSUPPORTED,
                  text(name, ": is on ", name_of(t.device), "; this call runs on cpu tensors only"));
  check_execution(execution, t.device);
}

void check_partial(const std::string& name, const Outputs& part, const Tensor& like) {
  const std::string o = name + "o", lse = name + "lse";
  check_given(o.c_str(), part.o), check_given(lse.c_str(), part.lse);
  check_view(o.c_str(), part.o, like.device), check_view(lse.c_str(), part.lse, like.device);
  if (!is_float(part.o.type)) invalid(o, ": has type ", name_of(part.o.type), "; must be f64, f32, f16 or bf16");
  check_single(lse.c_str(), part.lse, part.o.type);
  if (part.o.ndim != 3 && part.o.ndim != 4)
    invalid(o, ": has shape ", shape_text(part.o), "; must be [batch, tokens, heads, dim] or [tokens, heads, dim]");
  if (part.o.ndim != like.ndim || part.o.shape != like.shape)
    invalid(o, ": has shape ", shape_text(part.o), " but the merged o has ", shape_text(like), "; all must agree");
  check_rows(o.c_str(), part.o);
  if (like.ndim == 4)
    check_shape(lse.c_str(), part.lse, {dim(like, 0), dim(like, 2), dim(like, 1)}, "[batch, heads, queries]");
  if (like.ndim == 3) check_shape(lse.c_str(), part.lse, {dim(like, 1), dim(like, 0)}, "[heads, tokens]");
  check_data(o.c_str(), part.o), check_data(lse.c_str(), part.lse);
}

}  // namespace

void check_merge(std::span<const Outputs> partials, const Outputs& merged, const Execution& execution) {
  if (partials.empty()) invalid("n: is 0; merging needs at least one partial result");
  check_given("merged.o", merged.o);
  check_cpu("merged.o", merged.o, execution);
  Outputs with_lse = merged;  // the merged lse is optional; a partial's is not
  if (!merged.lse) with_lse.lse = partials[0].lse;
  check_partial("merged.", with_lse, merged.o);
  check_writable("merged.o", merged.o);
  if (merged.lse) check_writable("merged.lse", merged.lse);
  for (std::size_t i = 0; i < partials.size(); ++i) check_partial(text("partials[", i, "]."), partials[i], merged.o);
}

void check_dropout_mask(const Tensor& mask, const Tensor& rng, const Options& options, const Execution& execution) {
  check_given("mask", mask);
  check_cpu("mask", mask, execution);
  check_view("mask", mask, mask.device);
  check_ndim("mask", mask, 4, "[batch, heads, queries, keys]");
  check_type("mask", mask, Type::u8);
  check_writable("mask", mask);
  check_data("mask", mask);
  if (rng) {
    check_view("rng", rng, mask.device);
    check_data("rng", rng);
  }
  check_dropout(options, rng);
}

}  // namespace tessera
