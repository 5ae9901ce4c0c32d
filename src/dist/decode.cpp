// SPDX-License-Identifier: Apache-2.0
// Decoding over several ranks; see decode.hpp.
//
// The tree: its leaves are groups, and a node is a residue class of them, (level, r) for all g = r modulo 2^level. Node
// (level, r) is the merge of (level + 1, r) and (level + 1, r + 2^level). If the number of ranks is a power of two, the
// groups of a rank are one node, so one partial result travels from each.
#include "dist/decode.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "dist/inputs.hpp"
#include "dist/rows.hpp"
#include "math/softmax.hpp"

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

[[noreturn]] void invalid(const std::string& sentence) { throw Error(TESSERA_INVALID_ARGUMENT, sentence); }

std::string text(Int64 x) { return std::to_string(x); }

UInt64 mixed(UInt64 x, UInt64 word) {
  x = (x ^ word) * 0xff51afd7ed558ccdu;
  return x ^ x >> 31;
}

void require_shape(const char* name, const Tensor& t, std::initializer_list<Int64> shape) {
  bool same = t.ndim == static_cast<int>(shape.size());
  std::string is, wanted;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const Int64 want = shape.begin()[i];
    same &= t.shape[i] == want;
    wanted.append(i ? "," : "").append(text(want));
  }
  for (int i = 0; i < std::clamp(t.ndim, 0, 4); ++i) is.append(i ? "," : "").append(text(t.shape[index(i)]));
  if (!same) invalid(std::string(name) + ": has the shape [" + is + "]; must have [" + wanted + "]");
  if (t.device.type != DeviceType::cpu) invalid(std::string(name) + ": must be in the CPU's memory");
  if (t.elements() > 0 && t.data == nullptr) invalid(std::string(name) + ": has no data");
}

}  // namespace

// O and LSE of all queries over some of the keys: f64, so that what is merged is rounded once, in the end.
struct Decoder::Partial {
  int level = 0, residue = 0;
  Int64 B = 0, Nq = 0, Hq = 0, Dv = 0;
  std::vector<double> numbers;  // O [B,Nq,Hq,Dv], then LSE [B,Hq,Nq]

  Partial(int level, int residue, Int64 B, Int64 Nq, Int64 Hq, Int64 Dv) :
      level(level), residue(residue), B(B), Nq(Nq), Hq(Hq), Dv(Dv), numbers(index(B * Nq * Hq * (Dv + 1))) {}

  Outputs views() {
    Outputs out;
    out.o = Tensor(numbers.data(), Type::f64, {B, Nq, Hq, Dv});
    out.lse = Tensor(numbers.data() + B * Nq * Hq * Dv, Type::f64, {B, Hq, Nq});
    return out;
  }

  // From a state of the softmax (docs/algorithm.md, "Carried state"), in f64.
  void finish(std::span<const float> o, std::span<const float> m, std::span<const double> l) {
    double* const lse = numbers.data() + o.size();
    for (Int64 row = 0; row < B * Nq * Hq; ++row) {  // of O
      const Int64 at = (row / Hq / Nq * Hq + row % Hq) * Nq + row / Hq % Nq;
      const double sum = l[index(at)];
      for (Int64 d = row * Dv; d < (row + 1) * Dv; ++d) numbers[index(d)] = sum == 0 ? 0 : double(o[index(d)]) / sum;
      lse[at] = log_sum_exp(double(m[index(at)]), sum, [](double x) { return std::log2(x); }) * ln2<double>;
    }
  }
};

Dealing::Place Dealing::place(Int64 position, int ranks) const {
  const Int64 j = position / block, g = j % groups;
  const int rank = static_cast<int>(g % ranks);
  const Int64 each = (groups - rank + ranks - 1) / ranks;  // groups of that rank
  return {rank, (j / groups * each + g / ranks) * block + position % block};
}

Int64 Dealing::rows(Int64 length, int rank, int ranks) const {
  if (rank >= groups) return 0;
  const Int64 blocks = (length + block - 1) / block, rest = blocks % groups;
  const Int64 each = (groups - rank + ranks - 1) / ranks, more = rest > rank ? (rest - rank + ranks - 1) / ranks : 0;
  return (blocks / groups * each + more) * block;
}

Decoder::Decoder(std::shared_ptr<Communicator> communicator, const DecodeProblem& problem, double timeout,
                 int threads) :
    line(std::move(communicator), timeout),
    p(problem), threads(threads) {
  agree();
}

std::optional<Error> Decoder::complaint() const {
  const Options& o = p.options;
  try {
    if (p.dealing.block < 1) invalid("block: is " + text(p.dealing.block) + "; must be positive");
    if (p.dealing.groups < 1 || !std::has_single_bit(static_cast<unsigned>(p.dealing.groups)))
      invalid("groups: is " + text(p.dealing.groups) + "; must be a power of two");
    if (p.Hk < 1 || p.Hq < 1 || p.Hq % p.Hk != 0)
      invalid("Hq: is " + text(p.Hq) + "; must be a positive multiple of Hk, " + text(p.Hk));
    if (o.row0 != 0 || o.col0 != 0 || o.head0 != 0 || o.batch0 != 0)
      invalid("row0, col0, head0 and batch0: must be 0; the decoder knows where each part lies");
    if (o.alignment != Alignment::bottom_right)
      invalid("alignment: must be bottom_right: queries are the last positions");
    if (o.dropout != 0) invalid("dropout: must be 0 in decoding");
    Inputs in;
    in.q = Tensor(nullptr, p.type, {1, 1, p.Hq, p.D});
    in.k = Tensor(nullptr, p.type, {1, 1, p.Hk, p.D}), in.v = Tensor(nullptr, p.type, {1, 1, p.Hk, p.Dv});
    Outputs out;
    out.o = Tensor(nullptr, Type::f32, {1, 1, p.Hq, p.Dv});
    tessera::Plan::forward(in, out, o, {.threads = threads});
  } catch (const Error& error) {
    return error;
  }
  return {};
}

void Decoder::agree() {
  const Options& o = p.options;
  const std::pair<const char*, UInt64> mine[] = {
      {"Hq", UInt64(p.Hq)},
      {"Hk", UInt64(p.Hk)},
      {"D", UInt64(p.D)},
      {"Dv", UInt64(p.Dv)},
      {"type", UInt64(p.type)},
      {"scale", std::bit_cast<UInt64>(o.scale)},
      {"softcap", std::bit_cast<UInt64>(o.softcap)},
      {"causal", UInt64(o.causal)},
      {"window_left", UInt64(o.window_left)},
      {"window_right", UInt64(o.window_right)},
      {"block", UInt64(p.dealing.block)},
      {"groups", UInt64(p.dealing.groups)},
      {"deterministic", UInt64(o.deterministic)},
      {"part_invariant", UInt64(o.part_invariant)},
      {"segment_rows", UInt64(o.segment_rows)},
  };
  constexpr std::size_t count = std::size(mine), sentence = 256;
  std::optional<Error> wrong;
  std::vector<Bytes> all;
  line.together([&] {
    Bytes record(count * 8 + sentence);
    for (std::size_t i = 0; i < count; ++i) std::memcpy(record.data() + 8 * i, &mine[i].second, 8);
    wrong = complaint();
    if (wrong) std::memcpy(record.data() + 8 * count, wrong->what(), strnlen(wrong->what(), sentence - 1));
    all = line.gather(record);
  });
  for (std::size_t i = 0; i < count; ++i)
    for (int r = 1; r < line.size(); ++r)
      if (std::memcmp(all[0].data() + 8 * i, all[index(r)].data() + 8 * i, 8) != 0)
        throw Error(TESSERA_COMMUNICATION_ERROR,
                    std::string(mine[i].first) + " differs between rank 0 and rank " + text(r));
  if (wrong) throw *wrong;
  for (int r = 0; r < line.size(); ++r)
    if (const char* theirs = reinterpret_cast<const char*>(all[index(r)].data() + 8 * count); *theirs)
      throw Error(TESSERA_COMMUNICATION_ERROR, "rank " + text(r) + ": " + theirs);
}

void Decoder::check(const Inputs& in, std::span<const Int64> lengths, const Outputs& out) const {
  const auto B = static_cast<Int64>(lengths.size());
  const Int64 Nq = in.q.ndim == 4 ? in.q.shape[1] : 0;
  require_shape("q", in.q, {B, Nq, p.Hq, p.D});
  if (in.q.type != p.type) invalid("q: has another type than the problem");
  require_shape("o", out.o, {B, Nq, p.Hq, p.Dv});
  if (out.lse) require_shape("lse", out.lse, {B, p.Hq, Nq});
  if (in.sinks) require_shape("sinks", in.sinks, {p.Hq});
  const Int64 block = p.dealing.block;
  Int64 rows = in.k.ndim == 4 ? in.k.shape[1] : 0;
  if (in.block_table) {
    const Int64 pages = in.k.ndim == 4 ? in.k.shape[0] : 0;
    require_shape("k", in.k, {pages, rows, p.Hk, p.D});
    require_shape("v", in.v, {pages, rows, p.Hk, p.Dv});
    require_shape("block_table", in.block_table, {B, in.block_table.shape[1]});
    if (rows < 1 || block % rows != 0)
      invalid("page_size: is " + text(rows) + "; must divide a block of " + text(block) + " keys");
    rows *= in.block_table.shape[1];
  } else {
    require_shape("k", in.k, {B, rows, p.Hk, p.D});
    require_shape("v", in.v, {B, rows, p.Hk, p.Dv});
  }
  if (rows % block != 0)
    invalid("k: has room for " + text(rows) + " keys of a sequence; must be a multiple of a block, " + text(block));
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] < 0)
      invalid("lengths: of sequence " + text(Int64(b)) + " is " + text(lengths[b]) + "; must not be negative");
    if (const Int64 needed = p.dealing.rows(lengths[b], line.rank(), line.size()); needed > rows)
      invalid("k: has room for " + text(rows) + " keys of a sequence; sequence " + text(Int64(b)) + " needs " +
              text(needed) + " on this rank");
  }
  if (const char* name = first_besides(in, {&in.q, &in.k, &in.v, &in.slopes, &in.sinks, &in.block_table}))
    invalid(std::string(name) + ": is given; decoding over several ranks does not take it");
}

// The blocks of a group, which all lie on this rank: each by itself, and merged. A block's LSE as f32 would be a larger
// error than all others of f32, so the kernel gives its state instead.
Decoder::Partial Decoder::group_partial(const Inputs& in, std::span<const Int64> lengths, int group) const {
  const auto B = static_cast<Int64>(lengths.size());
  const Int64 Nq = in.q.shape[1], block = p.dealing.block, longest = *std::max_element(lengths.begin(), lengths.end());
  const int leaves = std::countr_zero(static_cast<unsigned>(p.dealing.groups));
  const Int64 numbers = B * Nq * p.Hq;
  std::vector<float> o(index(numbers * p.Dv)), m(index(numbers));
  std::vector<double> l(index(numbers));
  std::vector<Partial> blocks;
  for (Int64 j = group; j == group || j * block < longest; j += p.dealing.groups) {
    std::vector<std::int32_t> used(index(B));
    std::vector<Int64> row0(index(B)), col0(index(B), j * block);
    for (std::size_t b = 0; b < used.size(); ++b) {
      used[b] = static_cast<std::int32_t>(clamp(lengths[b] - j * block, 0, block));
      row0[b] = lengths[b] - Nq;
    }
    Inputs call;
    call.q = in.q, call.k = in.k, call.v = in.v, call.slopes = in.slopes;
    if (j == 0) call.sinks = in.sinks;  // counted once
    const Int64 row = p.dealing.place(j * block, line.size()).row;
    const Int64 rows = in.block_table ? in.k.shape[1] * in.block_table.shape[1] : in.k.shape[1];
    if (row + block > rows) {  // no sequence has keys there
      call.k.shape[0] = call.v.shape[0] = B, call.k.shape[1] = call.v.shape[1] = 0;
    } else if (in.block_table) {
      call.block_table = in.block_table;
      const Int64 entry = row / in.k.shape[1];
      call.block_table.data = static_cast<std::int32_t*>(in.block_table.data) + entry * in.block_table.strides[1];
      call.block_table.shape[1] = block / in.k.shape[1];
    } else {
      const auto moved = [&](const Tensor& t) {
        Tensor part = t;
        part.data = static_cast<std::byte*>(t.data) + row * t.strides[1] * element_bytes(t.type);
        part.shape[1] = block;
        return part;
      };
      call.k = moved(in.k), call.v = moved(in.v);
    }
    call.seqused_k = Tensor(used.data(), Type::i32, {B});
    call.seq_row0 = Tensor(row0.data(), Type::i64, {B}), call.seq_col0 = Tensor(col0.data(), Type::i64, {B});
    Options options = p.options;
    options.alignment = Alignment::offset, options.diagonal_offset = 0;
    Outputs out;
    out.state = {Tensor(o.data(), Type::f32, {B, Nq, p.Hq, p.Dv}), Tensor(m.data(), Type::f32, {B, p.Hq, Nq}),
                 Tensor(l.data(), Type::f64, {B, p.Hq, Nq})};
    tessera::forward(call, out, options, {.threads = threads});
    blocks.emplace_back(leaves, group, B, Nq, p.Hq, p.Dv).finish(o, m, l);
  }
  return merged(std::move(blocks), leaves, group);
}

Decoder::Partial Decoder::merged(std::vector<Partial> partials, int level, int residue) const {
  Partial& first = partials.front();
  first.level = level, first.residue = residue;
  if (partials.size() == 1) return std::move(first);
  std::vector<Outputs> views;
  for (Partial& x : partials) views.push_back(x.views());
  Partial out(level, residue, first.B, first.Nq, first.Hq, first.Dv);
  tessera::merge(views, out.views(), {.threads = threads});
  return out;
}

// The largest nodes whose groups all lie on one rank, below the given one; the same list on every rank.
void Decoder::list_nodes(std::vector<Node>& nodes, int level, int residue, int groups) const {
  if (residue >= groups) return;
  const int step = 1 << level, rank = residue % line.size();
  bool one_rank = true;
  for (int g = residue; g < groups; g += step) one_rank &= g % line.size() == rank;
  if (one_rank) {
    nodes.push_back({level, residue, rank});
    return;
  }
  list_nodes(nodes, level + 1, residue, groups);
  list_nodes(nodes, level + 1, residue + step, groups);
}

// A node from those below it: leaf(level, residue) gives those that are there. Groups without keys are left out.
template <class Leaf>
Decoder::Partial Decoder::fold(int level, int residue, int groups, const Leaf& leaf) const {
  if (std::optional<Partial> known = leaf(level, residue)) return std::move(*known);
  std::vector<Partial> halves;
  halves.push_back(fold(level + 1, residue, groups, leaf));
  if (residue + (1 << level) < groups) halves.push_back(fold(level + 1, residue + (1 << level), groups, leaf));
  return merged(std::move(halves), level, residue);
}

// Every rank's nodes to every rank.
std::vector<Decoder::Partial> Decoder::exchange(const std::vector<Node>& nodes, std::vector<Partial> mine,
                                                const Partial& like, UInt64 call, UInt64 agreed) {
  const auto number = [&](int from, int to) { return mixed(mixed(call, UInt64(from)), UInt64(to)); };
  const std::size_t each = like.numbers.size() * sizeof(double);
  const auto size_from = [&](int rank) {
    return 8 + each * index(std::count_if(nodes.begin(), nodes.end(), [&](const Node& n) { return n.rank == rank; })) +
           seal_bytes;
  };
  std::vector<Message> messages;
  std::map<int, std::shared_ptr<Bytes>> arriving;
  for (int r = 0; r < line.size(); ++r) {
    if (r == line.rank()) continue;
    const auto sent = std::make_shared<Bytes>(size_from(line.rank()));
    std::memcpy(sent->data(), &agreed, 8);
    for (std::size_t i = 0; i < mine.size(); ++i)
      std::memcpy(sent->data() + 8 + i * each, mine[i].numbers.data(), each);
    seal(*sent, number(line.rank(), r));
    messages.push_back({r, true, sent});
    arriving[r] = std::make_shared<Bytes>(size_from(r));
    messages.push_back({r, false, arriving[r]});
  }
  line.wait(line.start(std::move(messages)));
  std::vector<Partial> all = std::move(mine);
  for (const auto& [r, bytes] : arriving) {
    if (!is_sealed(*bytes, number(r, line.rank())))
      throw Error(TESSERA_COMMUNICATION_ERROR,
                  "a message from rank " + text(r) + " arrived damaged, or belongs to another call");
    if (std::memcmp(bytes->data(), &agreed, 8) != 0)
      throw Error(TESSERA_COMMUNICATION_ERROR,
                  "lengths differ between rank " + text(line.rank()) + " and rank " + text(r));
    const std::byte* at = bytes->data() + 8;
    for (const Node& node : nodes) {
      if (node.rank != r) continue;
      all.emplace_back(node.level, node.residue, like.B, like.Nq, like.Hq, like.Dv);
      std::memcpy(all.back().numbers.data(), at, each);
      at += each;
    }
  }
  return all;
}

void Decoder::forward(const Inputs& in, std::span<const Int64> lengths, const Outputs& out) {
  line.together([&] {
    check(in, lengths, out);
    const auto B = static_cast<Int64>(lengths.size());
    const Int64 Nq = in.q.shape[1];
    if (B == 0 || Nq == 0) return;
    const Int64 longest = *std::max_element(lengths.begin(), lengths.end()), block = p.dealing.block;
    const int groups = static_cast<int>(clamp((longest + block - 1) / block, 1, p.dealing.groups));
    const int leaves = std::countr_zero(static_cast<unsigned>(p.dealing.groups));
    const UInt64 given = UInt64(bool(in.slopes)) | UInt64(bool(in.sinks)) << 1;
    const UInt64 call = mixed(mixed(mixed(++calls, 0x6465636f), line.plan()), given);
    UInt64 agreed = mixed(UInt64(B), UInt64(Nq));
    for (const Int64 n : lengths) agreed = mixed(agreed, UInt64(n));
    std::vector<Node> nodes;
    list_nodes(nodes, 0, 0, groups);
    std::vector<Partial> mine;
    for (const Node& node : nodes)
      if (node.rank == line.rank())
        mine.push_back(fold(node.level, node.residue, groups, [&](int level, int residue) {
          line.poll();
          return level == leaves ? std::optional(group_partial(in, lengths, residue)) : std::nullopt;
        }));
    const Partial like(0, 0, B, Nq, p.Hq, p.Dv);
    std::vector<Partial> all = exchange(nodes, std::move(mine), like, call, agreed);
    Partial root = fold(0, 0, groups, [&](int level, int residue) -> std::optional<Partial> {
      for (Partial& x : all)
        if (x.level == level && x.residue == residue) return std::move(x);
      return {};
    });
    tessera::merge({root.views()}, out, {.threads = threads});
  });
}

}  // namespace tessera::dist
