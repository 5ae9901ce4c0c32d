// SPDX-License-Identifier: Apache-2.0
// The executor's steps and messages; see executor.hpp. Its calls of the library are in executor_work.cpp.
#include "dist/executor.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

std::byte* put_floats(std::byte* to, const float* from, std::size_t count) {
  std::memcpy(to, from, count * sizeof(float));
  return to + count * sizeof(float);
}

}  // namespace

Executor::Executor(Line& line, const Problem& problem, const Sharing& sharing, const Schedule& schedule,
                   UInt64 number) :
    line(line),
    p(problem), sharing(sharing), s(schedule), number(number), rank(line.rank()), node(s.node_of(rank)),
    slice(s.slice_of(rank)), hq(heads_of(Kind::query, slice)), hk(heads_of(Kind::key, slice)),
    memory(s.of[index(rank)].slot_rows), spans(node_rows(s.partition, node)) {
  for (const Span& span : spans) span_rows.push_back(rows), rows += span.rows();
  for (const Step& step : s.of[index(rank)].steps)
    for (const Work& w : step.work) slot_of[w.key] = w.slot;
}

Range Executor::heads_of(Kind kind, int u) const {
  if (kind == Kind::shared) return {0, 1};
  const Range kv = key_heads(p.Hk, u, s.partition.slices);
  if (kind == Kind::key) return kv;
  const Int64 ratio = p.Hk == 0 ? 0 : p.Hq / p.Hk;
  return {kv.begin * ratio, kv.end * ratio};
}

// Where a span of one of the node's ranks begins among the node's rows.
Int64 Executor::node_row(const Span& span) const {
  const auto after = std::upper_bound(spans.begin(), spans.end(), span, [](const Span& a, const Span& b) {
    return std::pair(a.sequence, a.begin) < std::pair(b.sequence, b.begin);
  });
  const auto at = static_cast<std::size_t>(after - spans.begin()) - 1;
  return span_rows[at] + span.begin - spans[at].begin;
}

void Executor::take(Field& field, const RowView& user, Kind kind, Int64 room) {
  field.user = user, field.kind = kind;
  field.rows = Rows(user.type, room, heads_of(kind, slice).size(), user.width);
  fields.push_back(&field);
  Int64 row = 0;
  Bytes packed;
  for (const Span& span : s.partition.of[index(rank)]) {
    const Range heads = heads_of(kind, slice);
    packed.resize(index(packed_bytes(user, span.rows(), heads)));
    pack(packed.data(), user, row, span.rows(), heads);
    unpack(packed.data(), field.rows.view, node_row(span), span.rows(), {0, heads.size()});
    row += span.rows();
  }
}

void Executor::take_inputs(const Inputs& in) {
  const Int64 tokens = s.partition.rows(rank);
  take(q, token_rows(in.q), Kind::query, rows);
  take(k, token_rows(in.k), Kind::key, memory);
  take(v, token_rows(in.v), Kind::key, memory);
  const auto pairs = [&](Field& field, const Tensor& t) {
    if (t) take(field, pair_rows(t, tokens), t.shape[1] == 1 ? Kind::shared : Kind::query, rows);
  };
  pairs(bias, in.bias);
  pairs(mask, in.mask);
  slopes = in.slopes, sinks = in.sinks;
}

void Executor::forward(const Inputs& inputs, const Outputs& outputs) {
  take_inputs(inputs);
  state_o = Rows(Type::f32, rows, hq.size(), p.Dv);
  state_m = Rows(Type::f32, rows, hq.size(), 1);
  state_l = Rows(Type::f64, rows, hq.size(), 1);
  run();
  finish_forward(outputs);
  if (s.partition.slices > 1) do_step(s.of[index(rank)].steps.back(), s.of[index(rank)].steps.size() - 1);
  write_results();
}

void Executor::backward(const Inputs& inputs, const Saved& saved, const Gradients& gradients) {
  take_inputs(inputs);
  take(o, token_rows(saved.o), Kind::query, rows);
  take(d_o, token_rows(saved.d_o), Kind::query, rows);
  take(lse, number_rows(saved.lse), Kind::query, rows);
  if (saved.d_lse) take(d_lse, number_rows(saved.d_lse), Kind::query, rows);
  want_dsinks = static_cast<bool>(gradients.dsinks);
  sum_dq = Rows(Type::f32, rows, hq.size(), p.D);
  sum_dk = Rows(Type::f32, memory, hk.size(), p.D);
  sum_dv = Rows(Type::f32, memory, hk.size(), p.Dv);
  run();
  finish_backward(gradients);
  const std::vector<float> dsinks = want_dsinks ? sum_sinks() : std::vector<float>();
  if (s.partition.slices > 1) do_step(s.of[index(rank)].steps.back(), s.of[index(rank)].steps.size() - 1);
  write_results();
  for (std::size_t h = 0; h < dsinks.size(); ++h)
    static_cast<float*>(gradients.dsinks.data)[Int64(h) * gradients.dsinks.strides[0]] = dsinks[h];
}

// All steps but the last exchange of results, which needs them finished.
void Executor::run() {
  const std::vector<Step>& steps = s.of[index(rank)].steps;
  const std::size_t end = steps.size() - (s.partition.slices > 1 ? 1 : 0);
  for (std::size_t t = 0; t < end; ++t) do_step(steps[t], t);
}

// --- messages

UInt64 Executor::number_of(std::size_t step, int from, int to) const {
  UInt64 x = number;
  for (const UInt64 part : {UInt64(step), UInt64(from), UInt64(to)}) x = (x ^ (part + 1)) * 0xff51afd7ed558ccdu;
  return x;
}

void Executor::require_sealed(const Bytes& message, UInt64 number, int from, std::size_t step) {
  if (!is_sealed(message, number))
    throw Error(TESSERA_COMMUNICATION_ERROR, "a message from rank " + std::to_string(from) + " in step " +
                                                 std::to_string(step) + " arrived damaged, or belongs to another call");
}

Int64 Executor::bytes_of(const Transfer& t) const {
  if (t.what == What::keys)
    return packed_bytes(k.rows.view, piece(t.piece).rows.rows(), {0, hk.size()}) +
           packed_bytes(v.rows.view, piece(t.piece).rows.rows(), {0, hk.size()});
  if (t.what == What::gradients) return piece(t.piece).rows.rows() * hk.size() * (p.D + p.Dv) * Int64(sizeof(float));
  // Rows of the rank that needs them, or that they come from, and heads of the other one.
  const bool mine = t.send == (t.what == What::heads);
  const int owner = mine ? rank : t.peer, other = mine ? t.peer : rank;
  Int64 bytes = 0;
  const auto add = [&](const Field& f) {
    bytes += packed_bytes(f.user, s.partition.rows(owner), heads_of(f.kind, s.slice_of(other)));
  };
  if (t.what == What::heads)
    for (const Field* f : fields) add(*f);
  else
    for (const Field& f : results) add(f);
  return bytes;
}

std::byte* Executor::fill(std::byte* at, const Transfer& t) {
  if (t.what == What::keys) {
    const Int64 row = s.of[index(rank)].slot_row[index(t.slot)], n = piece(t.piece).rows.rows();
    at = pack(at, k.rows.view, row, n, {0, hk.size()});
    return pack(at, v.rows.view, row, n, {0, hk.size()});
  }
  if (t.what == What::gradients) {
    if (s.settings.segment == 0) {  // what is sent is cleared: the slot will be used again
      const Int64 row = s.of[index(rank)].slot_row[index(slot_of.at(t.piece))];
      for (Rows* sum : {&sum_dk, &sum_dv}) {
        const auto count = index(piece(t.piece).rows.rows() * hk.size() * sum->view.width);
        at = put_floats(at, sum->floats(row), count);
        std::fill_n(sum->floats(row), count, 0.f);
      }
      return at;
    }
    const std::vector<float> sums = folded(shares_of.at(t.piece), t.first, t.last);
    return put_floats(at, sums.data(), sums.size());
  }
  if (t.what == What::heads) {
    for (const Field* f : fields)
      at = pack(at, f->user, 0, s.partition.rows(rank), heads_of(f->kind, s.slice_of(t.peer)));
    return at;
  }
  for (const Field& f : results)
    for (const Span& span : s.partition.of[index(t.peer)])
      at = pack(at, f.rows.view, node_row(span), span.rows(), {0, f.rows.view.heads});
  return at;
}

const std::byte* Executor::read(const std::byte* at, const Transfer& t) {
  if (t.what == What::keys) {
    const Int64 row = s.of[index(rank)].slot_row[index(t.slot)], n = piece(t.piece).rows.rows();
    at = unpack(at, k.rows.view, row, n, {0, hk.size()});
    return unpack(at, v.rows.view, row, n, {0, hk.size()});
  }
  if (t.what == What::gradients) {
    const auto count = index(bytes_of(t)) / sizeof(float);
    Share share{t.first, t.last, std::vector<float>(count)};
    std::memcpy(share.sums.data(), at, count * sizeof(float));
    if (s.settings.segment == 0)
      add_gradients(t.piece, share.sums.data());
    else
      shares_of[t.piece].push_back(std::move(share));
    return at + count * sizeof(float);
  }
  for (Field* f : fields)
    for (const Span& span : s.partition.of[index(t.peer)])
      at = unpack(at, f->rows.view, node_row(span), span.rows(), {0, f->rows.view.heads});
  return at;
}

// All transfers between two ranks in a step are one message, in the order of the schedule.
void Executor::do_step(const Step& step, std::size_t t) {
  std::map<std::pair<int, bool>, std::vector<const Transfer*>> links;
  for (const Transfer& x : step.group) links[{x.peer, x.send}].push_back(&x);
  std::vector<Message> messages;
  for (const auto& [link, transfers] : links) {
    const auto [peer, send] = link;
    Int64 bytes = 0;
    for (const Transfer* x : transfers) bytes += bytes_of(*x);
    const auto room = std::make_shared<Bytes>(index(bytes) + seal_bytes);
    if (send) {
      std::byte* at = room->data();
      for (const Transfer* x : transfers) at = fill(at, *x);
      seal(*room, number_of(t, rank, peer));
    }
    messages.push_back({peer, send, room});
  }
  line.start(messages);
  for (const Job& job : jobs_of(step))
    for (const Range& heads : head_groups(job)) {
      s.settings.pass == Pass::forward ? work_forward(job, heads) : work_backward(job, heads);
      line.poll();
    }
  line.wait();
  for (const Message& message : messages) {
    if (message.send) continue;
    require_sealed(*message.bytes, number_of(t, message.peer, rank), message.peer, t);
    const std::vector<const Transfer*>& transfers = links[{message.peer, false}];
    if (transfers[0]->what == What::results) {
      arrived.emplace_back(message.peer, message.bytes);
      continue;
    }
    const std::byte* at = message.bytes->data();
    for (const Transfer* x : transfers) at = read(at, *x);
  }
}

// --- results

void Executor::give(const RowView& user, Kind kind, Rows r) { results.push_back({user, kind, std::move(r)}); }

// Nothing here fails: everything has arrived.
void Executor::write_results() {
  const auto write = [&](const std::byte* at, const Field& f, int from, bool whole_node) {
    Int64 row = 0;
    for (const Span& span : s.partition.of[index(rank)]) {
      const Range heads = heads_of(f.kind, s.slice_of(from));
      const std::byte* source = whole_node ? f.rows.view.at(node_row(span), 0) : at;
      at = unpack(source, f.user, row, span.rows(), heads);
      row += span.rows();
    }
    return at;
  };
  for (const Field& f : results) write(nullptr, f, rank, true);
  for (const auto& [peer, bytes] : arrived) {
    const std::byte* at = bytes->data();
    for (const Field& f : results) at = write(at, f, peer, false);
  }
}

}  // namespace tessera::dist
