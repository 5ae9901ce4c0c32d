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
  if (count > 0) std::memcpy(to, from, count * sizeof(float));
  return to + count * sizeof(float);
}

}  // namespace

Executor::Executor(Line& line, const Problem& problem, const Sharing& sharing, const Schedule& schedule,
                   UInt64 number) :
    line(line),
    p(problem), sharing(sharing), s(schedule), number(number), rank(line.rank()), node(s.node_of(rank)),
    slice(s.slice_of(rank)), hq(heads_of(Kind::query, slice)), hk(heads_of(Kind::key, slice)), memory(*sharing.memory),
    slots(s.of[index(rank)].slot_rows), spans(node_rows(s.partition, node)) {
  for (const Span& span : spans) span_rows.push_back(rows), rows += span.rows();
  for (std::size_t i = 0; i < s.pieces.size(); ++i)
    if (s.pieces[i].node == node) kept.insert(static_cast<int>(i));
  for (const Step& step : s.of[index(rank)].steps)
    for (const Transfer& x : step.group)
      if (x.what == What::sums && x.send) kept.insert(piece_at(s, x.rows.sequence, x.rows.begin));
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

// Where it begins in a tensor of the node: keys lie in the memory for keys.
Int64 Executor::row_in(const Field& field, const Span& span) const {
  const Int64 row = node_row(span);
  if (field.kind != Kind::key) return row;
  const auto at =
      static_cast<std::size_t>(std::upper_bound(span_rows.begin(), span_rows.end(), row) - span_rows.begin() - 1);
  return s.of[index(rank)].home[at] + row - span_rows[at];
}

void Executor::take(Field& field, const RowView& user, Kind kind, Int64 room) {
  field.user = user, field.kind = kind;
  const Range heads = heads_of(kind, slice);
  field.rows = memory.rows(user.type, room, heads.size(), user.width);
  fields.push_back(&field);
  Int64 row = 0;
  for (const Span& span : s.partition.of[index(rank)]) {
    memory.move(user, row, span.rows(), heads, field.rows.view, row_in(field, span));
    row += span.rows();
  }
}

void Executor::take_inputs(const Inputs& in) {
  const Int64 tokens = s.partition.rows(rank);
  take(q, token_rows(in.q), Kind::query, rows);
  take(k, token_rows(in.k), Kind::key, slots);
  take(v, token_rows(in.v), Kind::key, slots);
  const auto pairs = [&](Field& field, const Tensor& t) {
    if (t) take(field, pair_rows(t, tokens), t.shape[1] == 1 ? Kind::shared : Kind::query, rows);
  };
  pairs(bias, in.bias);
  pairs(mask, in.mask);
  slopes = in.slopes, sinks = in.sinks;
}

void Executor::forward(const Inputs& inputs, const Outputs& outputs) {
  take_inputs(inputs);
  state_o = memory.rows(Type::f32, rows, hq.size(), p.Dv);
  state_m = memory.rows(Type::f32, rows, hq.size(), 1);
  state_l = memory.rows(Type::f64, rows, hq.size(), 1);
  run();
  finish_forward(outputs);
  exchange_results();
  write_results();
}

void Executor::backward(const Inputs& inputs, const Saved& saved, const Gradients& gradients) {
  take_inputs(inputs);
  take(o, token_rows(saved.o), Kind::query, rows);
  take(d_o, token_rows(saved.d_o), Kind::query, rows);
  take(lse, number_rows(saved.lse), Kind::query, rows);
  if (saved.d_lse) take(d_lse, number_rows(saved.d_lse), Kind::query, rows);
  want_dsinks = static_cast<bool>(gradients.dsinks);
  sum_dq = memory.rows(Type::f32, rows, hq.size(), p.D);
  sum_dk = memory.rows(Type::f32, slots, hk.size(), p.D);
  sum_dv = memory.rows(Type::f32, slots, hk.size(), p.Dv);
  if (gradients.dbias) sum_dbias = memory.rows(Type::f32, rows, bias.rows.view.heads, bias.rows.view.width);
  run();
  finish_backward(gradients);
  const std::vector<float> dsinks = want_dsinks ? sum_sinks() : std::vector<float>();
  exchange_results();
  write_results();
  if (!dsinks.empty())  // as rows of one number
    memory.unpack(
        reinterpret_cast<const std::byte*>(dsinks.data()),
        {static_cast<std::byte*>(gradients.dsinks.data), Type::f32, p.Hq, 1, 1, gradients.dsinks.strides[0], 1}, 0,
        p.Hq, {0, 1});
}

// All steps but the last exchange of results, which needs them finished.
void Executor::run() {
  const std::vector<Step>& steps = s.of[index(rank)].steps;
  const std::size_t end = steps.size() - (s.partition.slices > 1 ? 1 : 0);
  for (std::size_t t = 0; t < end; ++t) {
    read_until(t + 1 - std::min(t + 1, index(s.ahead)));
    start(t);
    do_work(steps[t]);
  }
  read_until(end);
}

void Executor::do_work(const Step& step) {
  for (const Work& job : step.work)
    for (const Range& heads : head_groups(job))
      for (const Work& part : key_groups(job)) {
        s.settings.pass == Pass::forward ? work_forward(part, heads) : work_backward(part, heads);
        line.poll();
      }
}

void Executor::exchange_results() {
  if (s.partition.slices == 1) return;
  const std::size_t last = s.of[index(rank)].steps.size() - 1;
  start(last);
  read_until(last + 1);
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
    return packed_bytes(k.rows.view, t.rows.rows(), {0, hk.size()}) +
           packed_bytes(v.rows.view, t.rows.rows(), {0, hk.size()});
  if (t.what == What::gradients || t.what == What::sums)
    return t.rows.rows() * hk.size() * (p.D + p.Dv) * Int64(sizeof(float));
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
  const Int64 n = t.rows.rows();
  if (t.what == What::keys) {
    at = memory.pack(at, k.rows.view, t.at, n, {0, hk.size()});
    return memory.pack(at, v.rows.view, t.at, n, {0, hk.size()});
  }
  if (t.what == What::gradients || t.what == What::sums) {
    if (s.settings.segment == 0) {  // what is sent is cleared: the memory may be used again
      for (Rows* sum : {&sum_dk, &sum_dv}) {
        at = memory.pack(at, sum->view, t.at, n, {0, hk.size()});
        memory.clear(sum->view, t.at, n);
      }
      return at;
    }
    const int key = piece_at(s, t.rows.sequence, t.rows.begin);
    const Int64 last = t.what == What::sums ? tree_of(t.rows.sequence) : t.last;
    const std::vector<float> sums = folded(shares_of.at(key), t.first, last, {t.rows.begin, t.rows.end});
    return put_floats(at, sums.data(), sums.size());
  }
  if (t.what == What::heads) {
    for (const Field* f : fields)
      at = memory.pack(at, f->user, 0, s.partition.rows(rank), heads_of(f->kind, s.slice_of(t.peer)));
    return at;
  }
  for (const Field& f : results)
    for (const Span& span : s.partition.of[index(t.peer)])
      at =
          (f.rows.on_host() ? host : memory).pack(at, f.rows.view, node_row(span), span.rows(), {0, f.rows.view.heads});
  return at;
}

const std::byte* Executor::read(const std::byte* at, const Transfer& t) {
  const Int64 n = t.rows.rows();
  if (t.what == What::keys) {
    at = memory.unpack(at, k.rows.view, t.at, n, {0, hk.size()});
    return memory.unpack(at, v.rows.view, t.at, n, {0, hk.size()});
  }
  if (t.what == What::gradients || t.what == What::sums) {
    const auto count = index(bytes_of(t)) / sizeof(float);
    const Int64 last = t.what == What::sums ? tree_of(t.rows.sequence) : t.last;
    Share share{t.first, last, {t.rows.begin, t.rows.end}, std::vector<float>(count)};
    std::memcpy(share.sums.data(), at, count * sizeof(float));
    if (s.settings.segment == 0)
      add_gradients(t.at, n, share.sums.data());
    else
      shares_of[piece_at(s, t.rows.sequence, t.rows.begin)].push_back(std::move(share));
    return at + count * sizeof(float);
  }
  for (Field* f : fields)
    for (const Span& span : s.partition.of[index(t.peer)])
      at = memory.unpack(at, f->rows.view, row_in(*f, span), span.rows(), {0, f->rows.view.heads});
  return at;
}

// All transfers between two ranks in a step are one message, in the order of the schedule.
std::vector<const Transfer*> Executor::transfers_of(std::size_t step, int peer, bool send) const {
  std::vector<const Transfer*> out;
  for (const Transfer& x : s.of[index(rank)].steps[step].group)
    if (x.peer == peer && x.send == send) out.push_back(&x);
  return out;
}

void Executor::start(std::size_t t) {
  const Step& step = s.of[index(rank)].steps[t];
  std::map<std::pair<int, bool>, std::vector<const Transfer*>> links;
  for (const Transfer& x : step.group) links[{x.peer, x.send}].push_back(&x);
  std::vector<Message> messages;
  Group group{0, t, {}};
  for (const auto& [link, transfers] : links) {
    const auto [peer, send] = link;
    Int64 bytes = 0;
    for (const Transfer* x : transfers) bytes += bytes_of(*x);
    const auto room = std::make_shared<Bytes>(index(bytes) + seal_bytes);
    if (send) {
      std::byte* at = room->data();
      for (const Transfer* x : transfers) at = fill(at, *x);
      memory.wait();
      seal(*room, number_of(t, rank, peer));
    }
    messages.push_back({peer, send, room});
    if (!send) group.received.push_back(messages.back());
  }
  if (s.settings.segment > 0) drop_sent(step);
  group.number = line.start(std::move(messages));
  unread.push_back(std::move(group));
}

// Reads, in order, what the groups of steps before `end` have brought.
void Executor::read_until(std::size_t end) {
  for (; !unread.empty() && unread.front().step < end; unread.pop_front()) {
    const Group& group = unread.front();
    line.wait(group.number);
    for (const Message& message : group.received) {
      require_sealed(*message.bytes, number_of(group.step, message.peer, rank), message.peer, group.step);
      const std::vector<const Transfer*> transfers = transfers_of(group.step, message.peer, false);
      if (transfers[0]->what == What::results) {
        arrived.emplace_back(message.peer, message.bytes);
        continue;
      }
      const std::byte* at = message.bytes->data();
      for (const Transfer* x : transfers) at = read(at, *x);
    }
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
      if (whole_node && !f.rows.on_host()) {
        RowView to = f.user;
        to.data = to.at(0, heads.begin), to.heads = heads.size();
        memory.move(f.rows.view, node_row(span), span.rows(), {0, heads.size()}, to, row);
      } else {
        const std::byte* source = whole_node ? f.rows.view.at(node_row(span), 0) : at;
        at = memory.unpack(source, f.user, row, span.rows(), heads);
      }
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
