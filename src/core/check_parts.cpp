// SPDX-License-Identifier: Apache-2.0
// Rules for parts of a problem; see check_parts.hpp.
#include "core/check_parts.hpp"

#include <tuple>
#include <utility>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/overlap.hpp"
#include "core/rules.hpp"
#include "core/sequence.hpp"

namespace tessera {

void check_places(const Inputs& in, Problem& p) {
  for (const auto& [name, t] :
       {std::pair{"seq_row0", &in.seq_row0}, {"seq_col0", &in.seq_col0}, {"seq_batch0", &in.seq_batch0}}) {
    if (!*t) continue;
    check_view(name, *t, p.device);
    check_type(name, *t, Type::i64);
    check_shape(name, *t, {p.B}, "[batch]");
  }
  p.seq_row0 = bool(in.seq_row0), p.seq_col0 = bool(in.seq_col0), p.seq_batch0 = bool(in.seq_batch0);
}

// Names of a state's tensors, in the order of its members.
using StateNames = const char* const[3];
static constexpr StateNames state_in{"inputs.state_o", "inputs.state_m", "inputs.state_l"};
static constexpr StateNames state_out{"outputs.state_o", "outputs.state_m", "outputs.state_l"};

static void check_state(StateNames& names, const State& state, const Problem& p) {
  const Tensor* tensors[] = {&state.o, &state.m, &state.l};
  for (int n = 0; n < 3; ++n)
    if (!*tensors[n]) invalid(names[n], ": is missing; a state is state_o, state_m and state_l");
  check_token_tensor(names[0], state.o, p, false, p.Dv);
  check_single(names[0], state.o, p.q_type);
  check_row_numbers(names[1], state.m, p);
  check_single(names[1], state.m, p.q_type);
  check_row_numbers(names[2], state.l, p);
  check_type(names[2], state.l, Type::f64);
}

void check_states(const Inputs& in, const Outputs& out, Problem& p) {
  p.state_in = bool(in.state), p.state_out = bool(out.state);
  if (p.state_in) check_state(state_in, in.state, p);
  if (p.state_in && p.sinks)
    invalid("sinks: are given beside inputs.state_o; the call that starts without a state counts them");
  if (!p.state_out) return;
  check_state(state_out, out.state, p);
  if (out.o) invalid("o: is given beside outputs.state_o; a call ends with O or with its state");
  if (out.lse) invalid("lse: is given beside outputs.state_o; the call that ends with O writes it");
  check_writable(state_out[0], out.state.o);
  check_writable(state_out[1], out.state.m);
  check_writable(state_out[2], out.state.l);
}

void check_host_places(const Problem& p, const Inputs& in) {
  for (const auto& [name, t] :
       {std::pair{"seq_row0", &in.seq_row0}, {"seq_col0", &in.seq_col0}, {"seq_batch0", &in.seq_batch0}})
    for (std::int64_t b = 0; *t && b < p.B; ++b)
      if (const std::int64_t x = place_entry(*t, b); x < -furthest_position || x > furthest_position)
        invalid(name, ": entry ", b, " is ", x, "; must be from -2^48 to 2^48");
}

void check_cuts(const Problem& p, const Call& call, const CutTiles& tiles) {
  if (!p.options.part_invariant) return;
  // Lengths on a device cannot be read here; sequences share their positions there.
  if (p.device.type != DeviceType::cpu) {
    for (const auto& [name, at, rows, tile] : {std::tuple{"row0", p.options.row0, p.Nq, tiles.queries},
                                               std::tuple{"col0", p.options.col0, p.Nk, tiles.keys}})
      if (rows > 0 && at % tile != 0)
        invalid(name, ": is ", at, "; with part_invariant it must be a multiple of ", tile);
    return;
  }
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = sequence_of(p, call, b);
    if (s.nq > 0 && s.row0 % tiles.queries != 0)
      invalid("row0: sequence ", b, " begins at query ", s.row0, "; with part_invariant it must be a multiple of ",
              tiles.queries);
    if (s.nk > 0 && s.col0 % tiles.keys != 0)
      invalid("col0: sequence ", b, " begins at key ", s.col0, "; with part_invariant it must be a multiple of ",
              tiles.keys);
    if (p.options.segment_rows > 0 && s.row0 < 0)
      invalid("row0: sequence ", b, " begins at query ", s.row0, "; with segment_rows it must not be negative");
  }
}

}  // namespace tessera
