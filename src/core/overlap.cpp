// SPDX-License-Identifier: Apache-2.0
// See core/overlap.hpp. Whether two views share a byte is whether a sum of steps, each taken a bounded number of times,
// can be a given number: a bounded linear equation. Strides of real layouts nest (each is at least the extent of all
// smaller ones), and then a search from the largest step down tries two or three numbers per dimension.
#include "core/overlap.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "core/failure.hpp"
#include "core/tensor.hpp"

namespace tessera {
namespace {

__extension__ typedef __int128 Wide;  // sums of any strides times any sizes

constexpr std::int64_t far = std::int64_t{1} << 60;  // no address space is larger
constexpr int most_tries = 1 << 14;                  // of the search; less than a millisecond

struct Step {
  std::int64_t step;  // positive
  std::int64_t last;  // taken 0 to `last` times
};

// At most four dimensions of each of two views, and their elements' bytes.
struct Steps {
  std::array<Step, 9> list{};
  std::size_t count = 0;

  void add(std::int64_t step, std::int64_t last) {
    if (last > 0) list[count++] = {step, last};
  }
  Step* begin() { return list.data(); }
  Step* end() { return list.data() + count; }
};

// Can the steps sum to `target`? All sums of them must fit 64 bits.
class Search {
 public:
  explicit Search(Steps s) {
    std::sort(s.begin(), s.end(), [](const Step& a, const Step& b) { return a.step > b.step; });
    // Two views of one buffer have the same strides: one unknown each.
    for (const Step& x : s)
      if (steps.count > 0 && steps.list[steps.count - 1].step == x.step)
        steps.list[steps.count - 1].last += x.last;
      else
        steps.list[steps.count++] = x;
    for (std::size_t k = steps.count; k-- > 0;) {
      reach[k] = reach[k + 1] + steps.list[k].step * steps.list[k].last;
      divisor[k] = std::gcd(divisor[k + 1], steps.list[k].step);
    }
  }

  bool finds(std::int64_t target, std::size_t k = 0) {
    if (target < 0 || target > reach[k]) return false;
    if (k == steps.count) return true;
    // Counted before the divisor's test: a loop over numbers that all fail it may be as long as a tensor.
    if (++tries > most_tries) return true;
    if (target % divisor[k] != 0) return false;
    const auto [step, last] = steps.list[k];
    const std::int64_t least = std::max<std::int64_t>(0, (target - reach[k + 1] + step - 1) / step);
    for (std::int64_t x = least; x <= std::min(last, target / step); ++x)
      if (finds(target - x * step, k + 1)) return true;
    return false;
  }

 private:
  Steps steps;
  std::array<std::int64_t, 10> reach{};  // the largest sum of the steps from k on
  std::array<std::int64_t, 10> divisor{};
  int tries = 0;
};

std::uint64_t product(std::uint64_t a, std::uint64_t b) {
  std::uint64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<std::uint64_t>::max() : result;
}

std::uint64_t sum(std::uint64_t a, std::uint64_t b) {
  std::uint64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? std::numeric_limits<std::uint64_t>::max() : result;
}

// Does every dimension step over all that lie behind it, as in a contiguous tensor and its slices? Most outputs do, and
// the answer takes no sorting.
bool rows_nest(const Tensor& t) {
  std::uint64_t below = 0;
  for (int i = t.ndim; i-- > 0;) {
    const auto last = static_cast<std::uint64_t>(t.shape[static_cast<std::size_t>(i)] - 1);
    if (last == 0) continue;
    const std::int64_t step = stride(t, i);
    if (step <= 0 || static_cast<std::uint64_t>(step) <= below) return false;
    below = sum(below, product(static_cast<std::uint64_t>(step), last));
  }
  return true;
}

// A view as its lowest address and positive steps from there, in bytes.
struct Region {
  Wide first;
  std::int64_t size;  // of an element
  Wide extent;        // from the first byte to the last
  Steps steps;

  explicit Region(const Tensor& t) :
      first(static_cast<Wide>(reinterpret_cast<std::uintptr_t>(t.data))), size(size_of(t.type)), extent(size) {
    for (int i = 0; i < t.ndim; ++i) {
      const Wide step = std::clamp<Wide>(static_cast<Wide>(stride(t, i)) * size, -far, far);
      const std::int64_t last = t.shape[static_cast<std::size_t>(i)] - 1;
      if (step < 0) first += step * last;
      const Wide length = step < 0 ? -step : step;
      if (length > 0) steps.add(static_cast<std::int64_t>(length), last);
      extent += length * last;
    }
  }
};

}  // namespace

Reach reach_of(const Tensor& t) {
  if (t.elements() == 0) return {};
  const auto size = static_cast<std::uint64_t>(size_of(t.type));
  std::uint64_t down = 0, up = size - 1;
  for (int i = 0; i < t.ndim; ++i) {
    const std::int64_t step = stride(t, i);
    if (step == 0) continue;
    const std::uint64_t length = step < 0 ? 0 - static_cast<std::uint64_t>(step) : static_cast<std::uint64_t>(step);
    const auto last = static_cast<std::uint64_t>(t.shape[static_cast<std::size_t>(i)] - 1);
    std::uint64_t& side = step < 0 ? down : up;
    side = sum(side, product(product(length, last), size));
  }
  const std::uint64_t address = reinterpret_cast<std::uintptr_t>(t.data);
  return {address - std::min(address, down), sum(address, up)};
}

bool overlaps_itself(const Tensor& t) {
  if (t.elements() == 0 || rows_nest(t)) return false;
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[static_cast<std::size_t>(i)] > 1 && stride(t, i) == 0) return true;
  Region r(t);
  std::sort(r.steps.begin(), r.steps.end(), [](const Step& a, const Step& b) { return a.step < b.step; });
  Wide below = 0;
  bool nested = true;
  for (const Step& x : r.steps) nested = nested && x.step > below, below += static_cast<Wide>(x.step) * x.last;
  if (nested) return false;
  if (below > far) return true;  // no memory is that large
  // Two elements differ by `difference` in each dimension, not zero in all. Dimension k is the first where it is not,
  // positive there without loss of generality, and anything of either sign in those behind.
  for (std::size_t k = 0; k < r.steps.count; ++k) {
    const Step first = r.steps.list[k];
    Steps difference;
    difference.add(first.step, first.last - 1);
    std::int64_t target = -first.step;
    for (std::size_t other = k + 1; other < r.steps.count; ++other) {
      const Step x = r.steps.list[other];
      difference.add(x.step, 2 * x.last), target += x.step * x.last;
    }
    if (Search(difference).finds(target)) return true;
  }
  return false;
}

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.elements() == 0 || b.elements() == 0 || !touch(reach_of(a), reach_of(b))) return false;
  const Region x(a), y(b);
  if (x.extent > far || y.extent > far) return true;
  // first_x + steps_x + byte_x = first_y + steps_y + byte_y. Counting y's from its end makes every term positive.
  Steps all = x.steps;
  for (std::size_t k = 0; k < y.steps.count; ++k) all.add(y.steps.list[k].step, y.steps.list[k].last);
  all.add(1, x.size + y.size - 2);
  return Search(all).finds(static_cast<std::int64_t>(y.first + y.extent - 1 - x.first));
}

bool same_view(const Tensor& a, const Tensor& b) {
  bool equal = a.data == b.data && a.type == b.type && a.device == b.device && a.ndim == b.ndim && a.shape == b.shape;
  for (int i = 0; equal && i < a.ndim; ++i) equal = stride(a, i) == stride(b, i);
  return equal;
}

void check_writable(const char* name, const Tensor& t) {
  if (overlaps_itself(t))
    invalid(name, ": elements of shape ", shape_text(t), " with strides ", strides_text(t),
            " share memory; outputs must not overlap themselves");
}

void check_apart(const char* name, const Tensor& output, const char* other_name, const Tensor& other) {
  if (overlap(output, other))
    invalid(name, ": shares memory with ", other_name, "; outputs must not overlap inputs or each other");
}

}  // namespace tessera
