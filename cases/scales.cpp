// SPDX-License-Identifier: Apache-2.0
// Scales of K and V: how they lie in memory, their numbers, and what the scaled elements mean. Part of tessera_cases;
// see case.hpp. Implements docs/algorithm.md, "Types and scales of keys and values", as data.
#include <cmath>

#include "cases/case.hpp"
#include "cases/generator.hpp"

namespace tessera::cases {

namespace {

Layout layout_of(const Case& c, std::size_t rank) {
  if (c.style == Style::contiguous) return {};
  Layout layout{.gap = 2, .step = 3, .shift = 1, .nonsense = true};
  if (c.style == Style::broadcast) layout.broadcast = rank >= 3 ? 2U : 1U;  // one for all keys, or heads, or sequences
  return layout;
}

// Of dims with a scale of their own.
std::int64_t groups_of(Scales scales, std::int64_t width) {
  return scales == Scales::per_group ? (width + 127) / 128 : 1;
}

bool has_own(Scales scales) { return scales == Scales::per_key || scales == Scales::per_group; }  // each key

Shape shape_of(const Case& c, Scales scales, std::int64_t width) {
  switch (scales) {
    case Scales::per_head:
      return {c.Hk};
    case Scales::per_sequence:
      return {c.batches(), c.Hk};
    case Scales::per_key:
      return c.packed() ? Shape{1, c.tokens_k(), c.Hk} : Shape{c.B, c.Nk, c.Hk};
    case Scales::per_group:
      return c.packed() ? Shape{1, c.tokens_k(), c.Hk, groups_of(scales, width)}
                        : Shape{c.B, c.Nk, c.Hk, groups_of(scales, width)};
    default:
      return {1};
  }
}

// The numbers of K or V times their scales. Of keys beyond the used length there is none.
std::vector<double> scaled(const CaseData& data, const Cached& cached, const Buffer& numbers, const Buffer& scale) {
  const Case& c = data.spec;
  std::vector<double> all = numbers.values();
  const std::int64_t width = numbers.size(numbers.tensor().ndim - 1), groups = groups_of(cached.scales, width);
  for (std::size_t b = 0; b < data.sequences.size() && scale; ++b)
    for (std::int64_t j = 0; j < data.sequences[b].Nk; ++j)
      for (std::int64_t h = 0; h < c.Hk; ++h) {
        const std::int64_t row = (data.sequences[b].row_k + j) * c.Hk + h;
        const std::int64_t element = has_own(cached.scales)                  ? row * groups
                                     : cached.scales == Scales::per_sequence ? static_cast<std::int64_t>(b) * c.Hk + h
                                     : cached.scales == Scales::per_head     ? h
                                                                             : 0;
        for (std::int64_t d = 0; d < width; ++d)
          all[static_cast<std::size_t>(row * width + d)] *= scale.get(element + (groups > 1 ? d / 128 : 0));
      }
  return all;
}

Buffer made(const CaseData& data, const Cached& cached, Type type, std::int64_t width, unsigned stream) {
  const Case& c = data.spec;
  if (cached.scales == Scales::none) return {};
  const Shape shape = shape_of(c, cached.scales, width);
  Buffer scale(Type::f32, shape, layout_of(c, shape.size()));
  Generator random(c.seed, stream);
  const double size = cached.size / (type == Type::i8 ? 32 : 1);
  const auto next = [&] { return size * std::exp2(2 * random.uniform() - 1) * (random.chance(0.1) ? -1 : 1); };
  if (!has_own(cached.scales)) {
    for (std::int64_t e = 0; e < scale.elements(); ++e) scale.set(e, next());
    return scale;
  }
  const std::int64_t row = c.Hk * groups_of(cached.scales, width);
  for (const Sequence& s : data.sequences)  // those of unused keys stay NaN
    for (std::int64_t e = s.row_k * row; e < (s.row_k + s.Nk) * row; ++e) scale.set(e, next());
  return scale;
}

}  // namespace

void build_scales(CaseData& data) {
  const Case& c = data.spec;
  data.k_scale = made(data, c.cached_k, c.k_type(), c.D, 40);
  data.v_scale = made(data, c.cached_v, c.v_type(), c.dim_v(), 41);
}

std::vector<double> CaseData::keys() const { return scaled(*this, spec.cached_k, k, k_scale); }
std::vector<double> CaseData::values() const { return scaled(*this, spec.cached_v, v, v_scale); }

}  // namespace tessera::cases
