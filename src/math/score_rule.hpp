// SPDX-License-Identifier: Apache-2.0
// The rule of scores: from the scaled product q.k to the number that enters the softmax, and its derivative. Part of a
// namespace, so it includes nothing and has no guard: math/score.hpp includes it for scalars, and cpu/isa/region.hpp
// once more inside each instruction set's target region, since a template belongs to the region that defines it.
// Implements docs/algorithm.md, equations (2), (3) and (12).
//
// Math brings the number type and its operations, so that every backend keeps its own rounding: f64, f32 with explicit
// FMAs, vectors of f32. The numbers of a head are scalars, which Math::set turns into Math's numbers. Element answers
// for one element (i, j), or for those of a vector: distance() is j - i - shift, which is 0 on the diagonal, and bias()
// the bias's number. Each is asked only if its option is on. The mask is no number: kernels hide what it hides, and
// what lies outside the band (math/mask.hpp), in their own way.
template <class Math>
struct ScoreRule {
  using Number = typename Math::Number;

  // d score / d (scaled product), where t is s_cap / cap, the tanh of the argument.
  template <class Numbers, class Element>
  TESSERA_ALWAYS_INLINE static Number derivative_of(const ScoreOptions& options, const Numbers&, Number t,
                                                    const Element&) {
    return options.softcap ? Math::negative_multiply_add(t, t, Math::set(1)) : Math::set(1);
  }

  // s_cap: all that depends on the product. `derivative`, if given, is written if options.need_derivative().
  template <class Numbers, class Element>
  TESSERA_ALWAYS_INLINE static Number capped(const ScoreOptions& options, const Numbers& numbers, Number argument,
                                             const Element& element, Number* derivative = nullptr) {
    const Number t = options.softcap ? Math::tanh(argument) : argument;
    if (derivative && options.need_derivative()) *derivative = derivative_of(options, numbers, t, element);
    return options.softcap ? Math::multiply(t, Math::set(numbers.cap)) : t;
  }

  // What comes on top of s_cap and depends on the element's place alone.
  template <class Numbers, class Element>
  TESSERA_ALWAYS_INLINE static Number placed(const ScoreOptions& options, const Numbers& numbers, Number s_cap,
                                             const Element& element) {
    Number s = s_cap;
    if (options.alibi) s = Math::negative_multiply_add(Math::set(numbers.slope), Math::abs(element.distance()), s);
    if (options.bias) s = Math::multiply_add(element.bias(), Math::set(numbers.unit), s);
    return s;
  }

  template <class Numbers, class Element>
  TESSERA_ALWAYS_INLINE static Number score(const ScoreOptions& options, const Numbers& numbers, Number argument,
                                            const Element& element, Number* derivative = nullptr) {
    return placed(options, numbers, capped(options, numbers, argument, element, derivative), element);
  }
};
