// SPDX-License-Identifier: Apache-2.0
// See cpu/decode.hpp.
#include "cpu/decode.hpp"

#include <algorithm>
#include <cstddef>
#include <new>

#include "core/limits.hpp"
#include "cpu/head_job.hpp"

namespace tessera::cpu {
namespace {

// Query heads of one KV head that a task takes at once: as many as its rows have room for.
Int64 heads_at_once(const Problem& p, Int64 nq) { return clamp(decode_rows / nq, 1, p.heads_per_kv()); }

// Pass number `pass` of a chunk: some query heads of KV head pass / passes.
DecodeJob decode_job(const Problem& p, const Call& call, const Decoding& d, Int64 chunk, Int64 pass) {
  const Sequence& s = *d.sequence;
  const Int64 heads = heads_at_once(p, s.nq), kv = pass / d.passes;
  const Int64 begin = kv * p.heads_per_kv() + pass % d.passes * heads;
  const Int64 row = p.Dv + 2;
  DecodeJob job;
  job.count = lesser(begin + heads, (kv + 1) * p.heads_per_kv()) - begin;
  job.partials = d.partials + (begin * s.nq * d.chunks + chunk) * row;
  job.row_stride = d.chunks * row;
  for (Int64 h = 0; h < job.count; ++h) job.heads[h] = head_job(p, call, s, begin + h);
  return job;
}

// Decoding is memory-bound: threads are counted from the bytes that are read, a microsecond for some 20 KB.
int useful_readers(const Problem& p, const std::vector<Decoding>& list, int threads) {
  double bytes = 0;
  for (const Decoding& d : list)
    bytes += double(p.Hk) * double(d.keys.size()) * double(p.D * size_of(p.k_type) + p.Dv * size_of(p.v_type));
  return static_cast<int>(std::clamp(bytes / 128e3, 1.0, static_cast<double>(threads)));
}

}  // namespace

// Chunks follow from the keys of a call, so the bits of a part would not be those of the whole; and they begin empty.
static bool may_decode(const Problem& p) {
  const bool part = p.state_in || p.options.part_invariant;
  return p.pass == Pass::forward && !p.bias && !p.mask && p.options.dropout == 0 && !part;
}

bool is_decoding(const Problem& p, const Sequence& s) { return s.nq > 0 && s.nq <= decode_queries && may_decode(p); }

Int64 decode_bytes(const Problem& p) {
  if (!may_decode(p)) return 0;
  // A padded sequence may use fewer rows than it has, down to those of this path.
  const Int64 short_rows = product({p.B, lesser(decode_queries, p.longest_q())});
  const Int64 rows = p.packed ? lesser(short_rows, p.Nq) : short_rows;
  const bool may_be_short = p.packed || p.seqused_q || p.Nq <= decode_queries;
  if (!may_be_short) return 0;
  return product({rows, p.Hq, most_chunks(p.longest_k()), p.Dv + 2, sizeof(float)});
}

Decode::Decode(const Problem& p, const Isa& isa, const WorkspaceLayout& layout, const Call& call,
               const std::vector<Sequence>& sequences) :
    p(p),
    isa(isa), layout(layout), call(call) {
  auto* partials = reinterpret_cast<float*>(static_cast<char*>(call.execution.workspace) + layout.partials);
  for (const Sequence& s : sequences) {
    const Range keys = visible_keys(s.mask, {0, s.nq});
    const Int64 chunks = greater(1, ceil_div(keys.size(), decode_chunk(keys.size())));
    const Int64 passes = ceil_div(p.heads_per_kv(), heads_at_once(p, s.nq));
    list.push_back({&s, keys, chunks, passes, partials});
    partials += s.nq * p.Hq * chunks * (p.Dv + 2);
  }
  thread_count = useful_readers(p, list, layout.threads);
  // As many passes side by side as leave every thread several tasks. Their results do not depend on each other.
  Int64 chunks = 0;
  for (const Decoding& d : list) chunks += d.chunks * p.Hk * d.passes;
  while (beside > 1 && chunks < beside * 2 * thread_count) beside /= 2;
  for (const Decoding& d : list) first.push_back(first.back() + d.chunks * ceil_div(p.Hk * d.passes, beside));
}

std::vector<Step> Decode::steps() const {
  return {{first.back(), [this](Int64 index, int worker) { read_chunk(index, worker); }},
          {Int64(list.size()) * p.Hq, [this](Int64 index, int) { merge_chunks(index); }}};
}

void Decode::read_chunk(Int64 index, int worker) const {
  const auto at = static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), index) - first.begin()) - 1;
  const Decoding& d = list[at];
  const Int64 all = p.Hk * d.passes, groups = ceil_div(all, beside);
  const Int64 chunk = (index - first[at]) / groups, begin = (index - first[at]) % groups * beside;
  const Int64 count = lesser(beside, all - begin);
  // On the stack: there is no way to fail any more. Only those that are there are written.
  alignas(DecodeJob) std::byte room[decode_jobs * sizeof(DecodeJob)];
  auto* jobs = reinterpret_cast<DecodeJob*>(room);
  for (Int64 n = 0; n < count; ++n) new (jobs + n) DecodeJob(decode_job(p, call, d, chunk, begin + n));
  isa.decode(jobs, count, d.chunk(chunk), scratch_of(call, layout, worker));
}

void Decode::merge_chunks(Int64 index) const {
  const Decoding& d = list[static_cast<std::size_t>(index / p.Hq)];
  const Sequence& s = *d.sequence;
  const Int64 h = index % p.Hq;
  const ForwardJob job{.head = head_job(p, call, s, h),
                       .o = head_rows(token_rows(call.outputs.o, p, s.b, s.q_begin), h),
                       .lse = head_numbers(row_numbers(call.outputs.lse, p, s), h),
                       .to = head_state(call.outputs.state, p, s, h)};
  isa.finish_decode(job, d.partials + h * s.nq * d.chunks * (p.Dv + 2), d.chunks);
}

}  // namespace tessera::cpu
