// SPDX-License-Identifier: Apache-2.0
// Partitions; see partition.hpp.
#include "dist/partition.hpp"

#include <algorithm>
#include <numeric>
#include <queue>
#include <string>
#include <utility>

namespace tessera::dist {
namespace {

// Sum of clamp(x, 0, top) over all integers x below n.
double sum_below(Int64 n, Int64 top) {
  if (n <= 0) return 0;
  const double inside = double(lesser(n, top));
  return inside * (inside - 1) / 2 + (n > top ? double(top) * double(n - top) : 0);
}

// Sum of clamp(i + shift, 0, top) over i from begin to end.
double clamped_sum(Int64 begin, Int64 end, Int64 shift, Int64 top) {
  const Int64 held = clamp(shift, -end, top);  // beyond these every term is 0, or top
  return sum_below(end + held, top) - sum_below(begin + held, top);
}

// Where part n of `parts` begins: on a multiple of align, or at the end.
Int64 cut(Int64 length, Int64 n, Int64 parts, Int64 align) {
  if (n >= parts) return length;
  const Int64 blocks = ceil_div(length, align);
  const Int64 before = blocks / parts * n + blocks % parts * n / parts;  // blocks * n / parts, which may be too large
  return lesser(before * align, length);
}

void give(std::vector<Span>& to, const Span& span) {
  if (span.rows() > 0) to.push_back(span);
}

void give_zigzag(Partition& p, Int64 sequence, Int64 length, Int64 align) {
  const int ranks = p.ranks();
  for (int r = 0; r < ranks; ++r)
    for (const Int64 n : {Int64(r), Int64(2 * ranks - 1 - r)})
      give(p.of[static_cast<std::size_t>(r)],
           {sequence, cut(length, n, 2 * ranks, align), cut(length, n + 1, 2 * ranks, align)});
}

Partition of_ranks(int ranks) {
  Partition p;
  p.of.resize(static_cast<std::size_t>(ranks));
  return p;
}

// By sequence and position, neighbours joined.
std::vector<Span> joined(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::pair(a.sequence, a.begin) < std::pair(b.sequence, b.begin);
  });
  std::vector<Span> out;
  for (const Span& s : spans) {
    if (!out.empty() && out.back().sequence == s.sequence && out.back().end == s.begin)
      out.back().end = s.end;
    else
      out.push_back(s);
  }
  return out;
}

// The rank with the least work so far, the first of several.
class LeastLoaded {
 public:
  explicit LeastLoaded(const std::vector<double>& loads) {
    for (std::size_t r = 0; r < loads.size(); ++r) heap.push({loads[r], r});
  }
  double load() const { return heap.top().first; }
  std::size_t add(double work) {
    const auto [load, rank] = heap.top();
    heap.pop();
    heap.push({load + work, rank});
    return rank;
  }
  std::vector<double> loads() {
    std::vector<double> out(heap.size());
    for (; !heap.empty(); heap.pop()) out[heap.top().second] = heap.top().first;
    return out;
  }

 private:
  using Entry = std::pair<double, std::size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
};

struct Job {
  double work;
  Span span;
};

void most_work_first(std::vector<Job>& jobs) {
  std::stable_sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.work > b.work; });
}

}  // namespace

BandMask Mask::band(Int64 length) const { return band_mask(length, length, causal, left, right, offset, 0, 0); }

double visible_pairs(const BandMask& band, Int64 begin, Int64 end) {
  if (end <= begin) return 0;
  return clamped_sum(begin, end, band.high + 1, band.keys) - clamped_sum(begin, end, band.low, band.keys);
}

Int64 Partition::rows(int rank) const {
  Int64 n = 0;
  for (const Span& s : of[static_cast<std::size_t>(rank)]) n += s.rows();
  return n;
}

Partition contiguous(const std::vector<Int64>& lengths, int ranks, Int64 align) {
  Partition p = of_ranks(ranks);
  const Int64 total = std::accumulate(lengths.begin(), lengths.end(), Int64(0));
  Int64 before = 0;  // rows of earlier sequences
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    Int64 at = 0;
    for (int r = 0; r < ranks; ++r) {
      const Int64 end = round_up(greater(cut(total, r + 1, ranks, 1) - before, 0), align);
      const Int64 stop = r + 1 == ranks ? lengths[b] : clamp(end, at, lengths[b]);
      give(p.of[static_cast<std::size_t>(r)], {Int64(b), at, stop});
      at = stop;
    }
    before += lengths[b];
  }
  return p;
}

Partition zigzag(const std::vector<Int64>& lengths, int ranks, Int64 align) {
  Partition p = of_ranks(ranks);
  for (std::size_t b = 0; b < lengths.size(); ++b) give_zigzag(p, Int64(b), lengths[b], align);
  return p;
}

Partition balanced(const std::vector<Int64>& lengths, const Mask& mask, int ranks, Int64 align) {
  Partition p = of_ranks(ranks);
  std::vector<Job> whole, blocks;
  std::vector<double> loads(static_cast<std::size_t>(ranks));
  const auto pairs = [&](const Span& s) {
    return visible_pairs(mask.band(lengths[static_cast<std::size_t>(s.sequence)]), s.begin, s.end);
  };
  const auto add_blocks = [&](const Span& s) {
    for (Int64 at = s.begin; at < s.end; at += align) {
      const Span block{s.sequence, at, lesser(at + align, s.end)};
      blocks.push_back({pairs(block), block});
    }
  };
  double total = 0, largest_block = 0;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    const Span all{Int64(b), 0, lengths[b]};
    if (all.rows() == 0) continue;
    whole.push_back({pairs(all), all}), total += whole.back().work;
    for (Int64 at = 0; at < all.rows(); at += align)
      largest_block = std::max(largest_block, pairs({all.sequence, at, lesser(at + align, all.rows())}));
  }
  const double share = total / ranks;
  most_work_first(whole);
  std::vector<Job> small;
  for (const Job& job : whole) {
    // Chunks of equal length; what is left at the end goes the way of blocks.
    const Int64 chunks = 2 * ranks, even = job.span.rows() / align / chunks * chunks * align;
    Partition cut = of_ranks(ranks);
    give_zigzag(cut, job.span.sequence, even, align);
    std::vector<double> with = loads;
    for (std::size_t r = 0; r < with.size(); ++r)
      for (const Span& s : cut.of[r]) with[r] += pairs(s);
    if (job.work <= share || even == 0 || *std::max_element(with.begin(), with.end()) > share + largest_block) {
      small.push_back(job);
      continue;
    }
    loads = std::move(with);
    for (std::size_t r = 0; r < p.of.size(); ++r) p.of[r].insert(p.of[r].end(), cut.of[r].begin(), cut.of[r].end());
    add_blocks({job.span.sequence, even, job.span.rows()});
  }
  LeastLoaded documents(loads);
  for (const Job& job : small) {
    if (documents.load() + job.work <= share) {
      give(p.of[documents.add(job.work)], job.span);
      continue;
    }
    add_blocks(job.span);
  }
  most_work_first(blocks);
  LeastLoaded ranks_left(documents.loads());
  for (const Job& job : blocks) give(p.of[ranks_left.add(job.work)], job.span);
  for (std::vector<Span>& spans : p.of) spans = joined(std::move(spans));
  return p;
}

Partition two_level(const Partition& nodes, int slices, Int64 align) {
  Partition p = of_ranks(nodes.ranks() * slices);
  p.slices = slices;
  for (std::size_t node = 0; node < nodes.of.size(); ++node)
    for (const Span& s : nodes.of[node])
      for (int u = 0; u < slices; ++u)
        give(p.of[node * static_cast<std::size_t>(slices) + static_cast<std::size_t>(u)],
             {s.sequence, s.begin + cut(s.rows(), u, slices, align), s.begin + cut(s.rows(), u + 1, slices, align)});
  return p;
}

bool is_empty(const Span& span, const std::vector<Int64>& lengths) {
  return span.begin == span.end && span.begin >= 0 && span.sequence >= 0 &&
         span.sequence < static_cast<Int64>(lengths.size()) &&
         span.end <= lengths[static_cast<std::size_t>(span.sequence)];
}

std::string fault_of(const Partition& partition, const std::vector<Int64>& lengths) {
  std::vector<Span> all;
  const auto named = [](const Span& s) {
    return "rows " + std::to_string(s.begin) + " to " + std::to_string(s.end) + " of sequence " +
           std::to_string(s.sequence);
  };
  for (const std::vector<Span>& spans : partition.of)
    for (const Span& s : spans) {
      if (s.sequence < 0 || s.sequence >= static_cast<Int64>(lengths.size()) || s.begin < 0 || s.end <= s.begin ||
          s.end > lengths[static_cast<std::size_t>(s.sequence)])
        return "partition: holds " + named(s) + ", which are no rows of the sequences";
      all.push_back(s);
    }
  std::sort(all.begin(), all.end(), [](const Span& a, const Span& b) {
    return std::pair(a.sequence, a.begin) < std::pair(b.sequence, b.begin);
  });
  auto next = all.begin();
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    Int64 at = 0;
    for (; next != all.end() && next->sequence == static_cast<Int64>(b); at = (next++)->end)
      if (next->begin != at)
        return "partition: holds row " + std::to_string(lesser(at, next->begin)) + " of sequence " + std::to_string(b) +
               (next->begin < at ? " twice" : " not at all") + "; every row must be held once";
    if (at != lengths[b])
      return "partition: holds row " + std::to_string(at) + " of sequence " + std::to_string(b) +
             " not at all; every row must be held once";
  }
  return {};
}

std::vector<Span> node_rows(const Partition& partition, int node) {
  std::vector<Span> spans;
  for (int u = 0; u < partition.slices; ++u) {
    const std::vector<Span>& more = partition.of[static_cast<std::size_t>(node * partition.slices + u)];
    spans.insert(spans.end(), more.begin(), more.end());
  }
  return joined(std::move(spans));
}

}  // namespace tessera::dist
