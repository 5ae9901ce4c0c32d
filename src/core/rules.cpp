// SPDX-License-Identifier: Apache-2.0
// Rules for one tensor, the options and the execution; see rules.hpp.
#include "core/rules.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"
#include "math/philox.hpp"

namespace tessera {
namespace {

// Kernels compute in f32: products and quotients of scale and softcap must stay inside its range.
constexpr double largest_number = 1e18;

std::string shape_text(Shape shape) {
  std::string out;
  for (auto n : shape) out += text(out.empty() ? "[" : ",", n);
  return out + "]";
}

// From the first byte of the elements to the last, whatever the signs of the strides. A size of 0 counts as 1: the
// strides beside it must be sensible too.
std::int64_t bytes_spanned(const Tensor& t) {
  std::int64_t bytes = size_of(t.type);
  for (int i = 0; i < t.ndim; ++i) {
    const std::int64_t step = stride(t, i), distance = step < -most_bytes ? most_bytes : std::abs(step);
    bytes = sum({bytes, product({std::max<std::int64_t>(dim(t, i), 1) - 1, distance, size_of(t.type)})});
  }
  return bytes;
}

}  // namespace

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
  if (bytes_spanned(t) > most_bytes)
    invalid(name, ": has shape ", shape_text(t), " and strides ", strides_text(t),
            "; its elements must lie within 2^56 bytes");
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

void check_token_tensor(const char* name, const Tensor& t, const Problem& p, bool keys, std::int64_t width) {
  check_view(name, t, p.device);
  const std::int64_t tokens = keys ? p.Nk : p.Nq, heads = keys ? p.Hk : p.Hq;
  if (p.packed) check_shape(name, t, {tokens, heads, width}, "[tokens, heads, dim]");
  if (!p.packed) check_shape(name, t, {p.B, tokens, heads, width}, "[batch, tokens, heads, dim]");
  check_rows(name, t);
}

void check_row_numbers(const char* name, const Tensor& t, const Problem& p) {
  check_view(name, t, p.device);
  if (p.packed) check_shape(name, t, {p.Hq, p.Nq}, "[heads, tokens]");
  if (!p.packed) check_shape(name, t, {p.B, p.Hq, p.Nq}, "[batch, heads, queries]");
}

void check_type(const char* name, const Tensor& t, Type expected) {
  if (t.type != expected) invalid(name, ": has type ", name_of(t.type), "; must be ", name_of(expected));
}

void check_head_dim(const char* name, std::int64_t dims, std::int64_t most) {
  if (dims < 1 || dims > most) invalid(name, ": head_dim is ", dims, "; must be from 1 to ", most);
}

void check_count(const char* name, std::int64_t count, const char* what, std::int64_t most) {
  if (count > most) invalid(name, ": has ", count, " ", what, "; at most ", most, " are allowed");
}

static void check_position(const char* name, std::int64_t position) {
  if (position < -furthest_position || position > furthest_position)
    invalid(name, ": is ", position, "; must be from -2^48 to 2^48");
}

void check_positions(const Options& o) {
  check_position("row0", o.row0), check_position("col0", o.col0);
  check_position("head0", o.head0), check_position("batch0", o.batch0);
}

static void check_window(const char* name, std::int64_t width) {
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
  if (o.scale != default_scale && !(std::fabs(o.scale) <= largest_number))
    invalid("scale: is ", o.scale, "; must be a finite number of size 1e18 at most");
  if (o.softcap != 0 && !(o.softcap >= 1 / largest_number && o.softcap <= largest_number))
    invalid("softcap: is ", o.softcap, "; must be 0 (none) or a positive number from 1e-18 to 1e18");
  if (o.alignment != Alignment::bottom_right && o.alignment != Alignment::top_left && o.alignment != Alignment::offset)
    invalid("alignment: is ", static_cast<int>(o.alignment), "; must be 0 (bottom right), 1 (top left) or 2 (offset)");
  if (o.alignment != Alignment::offset && o.diagonal_offset != 0)
    invalid("diagonal_offset: is ", o.diagonal_offset, " but alignment is not offset; it would be ignored");
  check_position("diagonal_offset", o.diagonal_offset);
  check_positions(o);
  check_window("window_left", o.window_left);
  check_window("window_right", o.window_right);
  check_window("max_seqlen_q", o.max_seqlen_q);
  check_window("max_seqlen_k", o.max_seqlen_k);
  check_dropout(o, rng);
  if (o.segment_rows < 0) invalid("segment_rows: is ", o.segment_rows, "; must be 0 (none) or positive");
  if (o.segment_rows > 0 && !o.part_invariant)
    invalid("segment_rows: is ", o.segment_rows, " but part_invariant is not set; it would be ignored");
}

void check_execution(const Execution& e, Device device) {
  if (e.threads < 0) invalid("threads: is ", e.threads, "; must be 0 (all) or positive");
  if (e.sm_margin < 0) invalid("sm_margin: is ", e.sm_margin, "; must be 0 (none) or positive");
  if (e.sm_margin > 0 && device.type != DeviceType::cuda)
    invalid("sm_margin: is ", e.sm_margin, " but q is on ", name_of(device), "; only GPUs have multiprocessors");
  if (e.device.type != DeviceType::any && e.device != device)
    invalid("device: is ", name_of(e.device), " but q is on ", name_of(device), "; they must agree");
}

void check_cpu(const char* name, const Tensor& t, const Execution& execution) {
  if (t.device.type != DeviceType::cpu)
    throw Failure(TESSERA_UNSUPPORTED,
                  text(name, ": is on ", name_of(t.device), "; this call runs on cpu tensors only"));
  check_execution(execution, t.device);
}

void check_cpu_or_cuda(const char* name, const Tensor& t, const Execution& execution) {
  if (t.device.type != DeviceType::cpu && t.device.type != DeviceType::cuda)
    throw Failure(TESSERA_UNSUPPORTED,
                  text(name, ": is on ", name_of(t.device), "; this call runs on cpu and cuda tensors"));
  check_execution(execution, t.device);
}

void check_host_offsets(const char* name, const Tensor& offsets, std::int64_t n, std::int64_t count, const char* what) {
  for (std::int64_t b = 0; b < n; ++b) {
    const std::int64_t begin = entry(offsets, b), end = entry(offsets, b + 1);
    if (b == 0 && begin < 0) invalid(name, ": entry 0 is ", begin, "; must not be negative");
    if (end < begin) invalid(name, ": entry ", b + 1, " is ", end, " after ", begin, "; entries must not decrease");
    if (end > count) invalid(name, ": entry ", b + 1, " is ", end, " but there are only ", count, " ", what);
  }
}

void check_host_bound(const char* name, std::int64_t bound, std::int64_t sequence, std::int64_t length) {
  if (bound >= 0 && length > bound)
    invalid(name, ": is ", bound, " but sequence ", sequence, " has length ", length, "; it must be an upper bound");
}

void check_data(const char* name, const Tensor& t) {
  if (!t || t.elements() == 0) return;
  if (!t.data)
    invalid(name, ": data is null but its shape is ", shape_text(t), "; null is allowed only without elements");
  if (reinterpret_cast<std::uintptr_t>(t.data) % static_cast<std::uintptr_t>(size_of(t.type)) != 0)
    invalid(name, ": data is not aligned to its elements of ", size_of(t.type), " bytes");
}

}  // namespace tessera
