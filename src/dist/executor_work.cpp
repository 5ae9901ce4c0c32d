// SPDX-License-Identifier: Apache-2.0
// The executor's calls of the library: attention of a query piece with some keys, forward and backward, and what is
// made of the parts; see executor.hpp.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "dist/executor.hpp"

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

// More than this many operations in one call, and messages would wait for it: it is then cut by heads and by keys. Not
// on a device, whose calls return at once.
constexpr double most_operations = 2e8;

}  // namespace

// Query heads of one call each, as many as belong to whole key heads.
std::vector<Range> Executor::head_groups(const Work& job) const {
  const double operations =
      2.0 * double(piece(job.query).rows.rows()) * double(job.keys.size()) * double(hq.size()) * double(p.D + p.Dv);
  if (operations <= most_operations || !memory.is_host()) return {{0, hq.size()}};
  std::vector<Range> groups;
  const Int64 ratio = p.Hq / p.Hk;
  for (Int64 h = 0; h < hq.size(); h += ratio) groups.push_back({h, h + ratio});
  return groups;
}

// The keys of one call each, cut on multiples of the grain, which leave the forward pass its bits. How many does not
// depend on the number of slices.
std::vector<Work> Executor::key_groups(const Work& job) const {
  if ((s.settings.segment > 0 && s.settings.pass == Pass::backward) || !memory.is_host()) return {job};
  const double each = 2.0 * double(piece(job.query).rows.rows()) * double(p.Hq / p.Hk) * double(p.D + p.Dv);
  const Int64 grain = s.settings.grain, blocks = greater(1, Int64(most_operations / each) / grain);
  std::vector<Work> out;
  for (Int64 begin = job.keys.begin; begin < job.keys.end;) {
    const Int64 end = lesser(job.keys.end, (begin / grain + blocks) * grain);
    out.push_back({job.query, {begin, end}, job.at + begin - job.keys.begin});
    begin = end;
  }
  return out;
}

Options Executor::options_of(const Work& job, Int64 head) const {
  Options options = p.options;
  options.alignment = Alignment::offset, options.diagonal_offset = s.mask.offset;
  options.row0 = piece(job.query).rows.begin, options.col0 = job.keys.begin;
  options.head0 = hq.begin + head, options.batch0 = piece(job.query).rows.sequence;
  return options;
}

Tensor Executor::pairs_of(const RowView& view, const Work& job, Range heads) const {
  const Int64 n = piece(job.query).rows.rows(), head = view.heads == 1 ? 0 : heads.begin;
  const bool one = view.width == 1;  // for all keys
  Tensor t(view.at(piece(job.query).at, head) + (one ? 0 : job.keys.begin * element_bytes(view.type)), view.type,
           {1, view.heads == 1 ? 1 : heads.size(), n, one ? 1 : job.keys.size()}, memory.device());
  t.strides = {0, view.head_stride, view.row_stride, 1};
  return t;
}

Inputs Executor::inputs_of(const Work& job, Range heads) const {
  const Piece& query = piece(job.query);
  const Int64 ratio = p.Hk == 0 ? 1 : p.Hq / p.Hk;
  const Range kv{heads.begin / ratio, heads.end / ratio};
  Inputs in;
  in.q = q.rows.tokens(query.at, query.rows.rows(), heads);
  in.k = k.rows.tokens(job.at, job.keys.size(), kv);
  in.v = v.rows.tokens(job.at, job.keys.size(), kv);
  if (bias.rows.view.data) in.bias = pairs_of(bias.rows.view, job, heads);
  if (mask.rows.view.data) in.mask = pairs_of(mask.rows.view, job, heads);
  if (slopes) {
    const Int64 row = slopes.ndim == 2 ? query.rows.sequence * slopes.strides[0] : 0;
    const Int64 stride = slopes.strides[slopes.ndim == 2 ? 1 : 0];
    in.slopes = Tensor(static_cast<float*>(slopes.data) + row + (hq.begin + heads.begin) * stride, Type::f32,
                       {heads.size()}, memory.device());
    in.slopes.strides[0] = stride;
  }
  return in;
}

Tensor Executor::sinks_of(Range heads) const {
  Tensor t(static_cast<float*>(sinks.data) + (hq.begin + heads.begin) * sinks.strides[0], Type::f32, {heads.size()},
           memory.device());
  t.strides[0] = sinks.strides[0];
  return t;
}

State Executor::state_of(const Piece& query, Range heads) const {
  const Int64 n = query.rows.rows();
  return {state_o.tokens(query.at, n, heads), state_m.numbers(query.at, n, heads), state_l.numbers(query.at, n, heads)};
}

// The state is carried from job to job; who starts it counts the sink.
Inputs Executor::continued(const Work& job, Range heads) {
  Inputs in = inputs_of(job, heads);
  if (begun.contains({job.query, heads.begin}))
    in.state = state_of(piece(job.query), heads);
  else if (sinks)
    in.sinks = sinks_of(heads);
  for (Int64 h = heads.begin; h < heads.end; ++h) begun.insert({job.query, h});
  return in;
}

void Executor::work_forward(const Work& job, Range heads) {
  Outputs out;
  out.state = state_of(piece(job.query), heads);
  memory.forward(continued(job, heads), out, options_of(job, heads.begin), sharing.execution());
}

void Executor::finish_forward(const Outputs& outputs) {
  Rows final_o = memory.rows(outputs.o.type, rows, hq.size(), p.Dv);
  Rows final_lse = memory.rows(Type::f32, rows, hq.size(), 1);
  for (std::size_t i = 0; i < s.pieces.size(); ++i) {
    if (s.pieces[i].node != node) continue;
    const Work none{.query = static_cast<int>(i)};
    const Range heads{0, hq.size()};
    Outputs out;
    out.o = final_o.tokens(s.pieces[i].at, s.pieces[i].rows.rows(), heads);
    out.lse = final_lse.numbers(s.pieces[i].at, s.pieces[i].rows.rows(), heads);
    memory.forward(continued(none, heads), out, options_of(none, 0), sharing.execution());
  }
  give(token_rows(outputs.o), Kind::query, std::move(final_o));
  if (outputs.lse) give(number_rows(outputs.lse), Kind::query, std::move(final_lse));
}

// --- backward

void Executor::work_backward(const Work& job, Range heads) {
  const Piece& query = piece(job.query);
  const Int64 n = query.rows.rows(), ratio = p.Hq / p.Hk, keys = job.keys.size();
  const Range kv{heads.begin / ratio, heads.end / ratio};
  Options options = options_of(job, heads.begin);
  options.accumulate = true;
  Saved saved{
      o.rows.tokens(query.at, n, heads), lse.rows.numbers(query.at, n, heads), d_o.rows.tokens(query.at, n, heads), {}};
  if (d_lse.rows.view.data) saved.d_lse = d_lse.rows.numbers(query.at, n, heads);
  Gradients gradients{sum_dq.tokens(query.at, n, heads), {}, {}, {}, {}};
  if (sum_dbias.view.data) gradients.dbias = pairs_of(sum_dbias.view, job, heads);
  if (s.settings.segment == 0) {
    gradients.dk = sum_dk.tokens(job.at, keys, kv), gradients.dv = sum_dv.tokens(job.at, keys, kv);
  } else {  // a leaf of the tree
    if (heads.begin == 0) {
      leaf_dk = memory.rows(Type::f32, keys, hk.size(), p.D);
      leaf_dv = memory.rows(Type::f32, keys, hk.size(), p.Dv);
    }
    gradients.dk = leaf_dk.tokens(0, keys, kv), gradients.dv = leaf_dv.tokens(0, keys, kv);
  }
  memory.backward(inputs_of(job, heads), saved, gradients, options, sharing.execution());
  if (s.settings.segment == 0 || heads.end < hq.size()) return;
  Share share{query.leaf, query.leaf + 1, job.keys, std::vector<float>(index(keys * hk.size() * (p.D + p.Dv)))};
  std::byte* at = reinterpret_cast<std::byte*>(share.sums.data());
  for (const Rows* leaf : {&leaf_dk, &leaf_dv}) at = memory.pack(at, leaf->view, 0, keys, {0, hk.size()});
  memory.wait();
  shares_of[piece_at(s, query.rows.sequence, job.keys.begin)].push_back(std::move(share));
}

// Rows of the memory for keys.
void Executor::add_gradients(Int64 row, Int64 n, const float* sums) {
  for (const Rows* sum : {&sum_dk, &sum_dv}) {
    memory.add(sum->view, row, n, sums);
    sums += n * hk.size() * sum->view.width;
  }
}

// The least power of two that holds the leaves of a sequence.
Int64 Executor::tree_of(Int64 sequence) const {
  const Int64 length = s.lengths[index(sequence)], segment = s.settings.segment;
  return segment == 0 ? 0 : static_cast<Int64>(std::bit_ceil(static_cast<UInt64>((length + segment - 1) / segment)));
}

// The sum for some rows over leaves first to last as a binary tree, of which some nodes are there already. Empty:
// nothing.
std::vector<float> Executor::folded(const std::vector<Share>& shares, Int64 first, Int64 last, Range rows) const {
  bool any = false;
  for (const Share& x : shares) {
    if (x.rows.begin > rows.begin || x.rows.end < rows.end) continue;
    if (x.first == first && x.last == last) {
      std::vector<float> out;
      const float* from = x.sums.data();
      for (const Int64 width : {hk.size() * p.D, hk.size() * p.Dv}) {
        const float* begin = from + (rows.begin - x.rows.begin) * width;
        out.insert(out.end(), begin, begin + rows.size() * width);
        from += x.rows.size() * width;
      }
      return out;
    }
    any |= x.first < last && first < x.last;
  }
  if (!any || last - first == 1) return {};
  std::vector<float> left = folded(shares, first, (first + last) / 2, rows);
  std::vector<float> right = folded(shares, (first + last) / 2, last, rows);
  if (left.empty()) return right;
  for (std::size_t i = 0; i < right.size(); ++i) left[i] += right[i];
  return left;
}

// Shares that have left and are summed elsewhere.
void Executor::drop_sent(const Step& step) {
  for (const Transfer& x : step.group)
    if (x.what == What::gradients && x.send) {
      const int key = piece_at(s, x.rows.sequence, x.rows.begin);
      if (!kept.contains(key)) shares_of.erase(key);
    }
}

void Executor::finish_backward(const Gradients& gradients) {
  for (auto& [key, shares] : shares_of) {
    const Span& rows = piece(key).rows;
    if (piece(key).node != node) continue;
    std::set<Int64> cuts{rows.end};
    for (const Share& x : shares) cuts.insert(x.rows.begin), cuts.insert(x.rows.end);
    Int64 begin = rows.begin;
    for (const Int64 end : cuts) {
      const std::vector<float> sums = folded(shares, 0, tree_of(rows.sequence), {begin, end});
      const Int64 at = row_in(k, rows) + begin - rows.begin;
      if (!sums.empty()) add_gradients(at, end - begin, sums.data());
      begin = end;
    }
  }
  give(token_rows(gradients.dq), Kind::query, rounded(sum_dq, gradients.dq.type));
  give(token_rows(gradients.dk), Kind::key, own_rows(sum_dk, gradients.dk.type));
  give(token_rows(gradients.dv), Kind::key, own_rows(sum_dv, gradients.dv.type));
  if (gradients.dbias)
    give(pair_rows(gradients.dbias, s.partition.rows(rank)), bias.kind, rounded(sum_dbias, gradients.dbias.type));
}

// Of the memory for keys, the node's own rows.
Rows Executor::own_rows(const Rows& sums, Type type) {
  Rows own(Type::f32, rows, hk.size(), sums.view.width);
  for (std::size_t i = 0; i < spans.size(); ++i)
    memory.pack(own.view.at(span_rows[i], 0), sums.view, s.of[index(rank)].home[i], spans[i].rows(), {0, hk.size()});
  memory.wait();
  return converted(own, type, rows);
}

// The node's rows in the type of the result, on the host.
Rows Executor::rounded(const Rows& sums, Type type) {
  if (sums.on_host()) return converted(sums, type, rows);
  Rows own(Type::f32, rows, sums.view.heads, sums.view.width);
  memory.pack(own.view.data, sums.view, 0, rows, {0, sums.view.heads});
  memory.wait();
  return converted(own, type, rows);
}

// dSink is a sum over all rows of all ranks: each piece's part in f32 goes to everybody, who adds them in the order of
// pieces.
std::vector<float> Executor::sum_sinks() {
  const auto parts_of = [&](int r) {
    const Int64 heads = heads_of(Kind::query, s.slice_of(r)).size();
    return heads *
           std::count_if(s.pieces.begin(), s.pieces.end(), [&](const Piece& x) { return x.node == s.node_of(r); });
  };
  const auto bytes = [&](int r) { return std::make_shared<Bytes>(index(parts_of(r)) * sizeof(float) + seal_bytes); };
  std::vector<std::shared_ptr<Bytes>> all;
  for (int r = 0; r < line.size(); ++r) all.push_back(bytes(r));
  std::byte* part = all[index(rank)]->data();
  for (std::size_t i = 0; i < s.pieces.size(); ++i) {
    if (s.pieces[i].node != node) continue;
    const Range heads{0, hq.size()};
    const Work none{.query = static_cast<int>(i)};
    const Int64 at = s.pieces[i].at, n = s.pieces[i].rows.rows();
    Inputs in = inputs_of(none, heads);
    in.bias = in.mask = {};
    in.sinks = sinks_of(heads);
    Saved saved{o.rows.tokens(at, n, heads), lse.rows.numbers(at, n, heads), d_o.rows.tokens(at, n, heads), {}};
    if (d_lse.rows.view.data) saved.d_lse = d_lse.rows.numbers(at, n, heads);
    const Rows numbers = memory.rows(Type::f32, 1, hq.size(), 1);
    memory.backward(in, saved, {{}, {}, {}, {}, Tensor(numbers.view.data, Type::f32, {hq.size()}, memory.device())},
                    options_of(none, 0), sharing.execution());
    part = memory.pack(part, numbers.view, 0, 1, heads);
  }
  memory.wait();
  const std::size_t step = s.of[index(rank)].steps.size();
  seal(*all[index(rank)], number_of(step, rank, rank));
  std::vector<Message> messages;
  for (int r = 0; r < line.size(); ++r)
    if (r != rank) messages.push_back({r, true, all[index(rank)]}), messages.push_back({r, false, all[index(r)]});
  line.wait(line.start(messages));
  std::vector<double> sums(index(p.Hq));
  std::vector<std::size_t> read(index(line.size()));
  for (int r = 0; r < line.size(); ++r) require_sealed(*all[index(r)], number_of(step, r, r), r, step);
  for (const Piece& x : s.pieces)
    for (int u = 0; u < s.partition.slices; ++u) {
      const int from = s.rank_of(x.node, u);
      const auto* numbers = reinterpret_cast<const float*>(all[index(from)]->data());
      const Range heads = heads_of(Kind::query, u);
      for (Int64 h = heads.begin; h < heads.end; ++h) sums[index(h)] += double(numbers[read[index(from)]++]);
    }
  return {sums.begin(), sums.end()};
}

}  // namespace tessera::dist
