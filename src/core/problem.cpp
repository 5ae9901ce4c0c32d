// SPDX-License-Identifier: Apache-2.0
// Problem's derived numbers and its text form; see problem.hpp.
#include "core/problem.hpp"

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "math/philox.hpp"

namespace tessera {

static std::int64_t longest(std::int64_t tokens, std::int64_t hint) {
  return hint >= 0 ? lesser(tokens, hint) : tokens;
}

std::int64_t Problem::longest_q() const { return packed ? longest(Nq, options.max_seqlen_q) : Nq; }
std::int64_t Problem::longest_k() const { return packed || pages ? longest(Nk, options.max_seqlen_k) : Nk; }

ScoreOptions Problem::score_options() const {
  return {.softcap = options.softcap > 0,
          .alibi = slopes != 0,
          .bias = bias.has_value(),
          .mask = mask.has_value(),
          .dropout = dropout_threshold(options.dropout) > 0};
}

ScoreParameters<double> Problem::score_parameters() const { return {.softcap = options.softcap}; }

bool has_plain_keys(const Problem& p) {
  return p.k_type == p.q_type && p.v_type == p.q_type && p.k_scale == 0 && p.v_scale == 0;
}

std::string score_option_text(const Problem& p) {
  const ScoreOptions on = p.score_options();
  if (on.softcap) return text("softcap is ", p.options.softcap);
  if (on.dropout) return text("dropout is ", p.options.dropout);
  if (on.alibi) return "ALiBi slopes are given";
  if (on.bias) return "a bias is given";
  return "";
}

std::string part_text(const Problem& p) {
  std::string out;
  const auto add = [&](bool on, const char* words) { out += on ? text(out.empty() ? "" : ", ", words) : ""; };
  add(p.state_in, "from a state");
  add(p.state_out, "to a state");
  add(p.seq_row0 || p.seq_col0 || p.seq_batch0, "positions of each sequence");
  add(p.options.part_invariant, "part-invariant");
  if (p.options.segment_rows > 0) out += text(" in segments of ", p.options.segment_rows, " queries");
  return out;
}

static std::string shape(const Broadcast& b) {
  return text(name_of(b.type), " [", b.shape[0], ",", b.shape[1], ",", b.shape[2], ",", b.shape[3], "]");
}

static std::string mask_text(const Problem& p) {
  std::string out;
  if (p.options.causal) out += ", causal";
  if (p.options.window_left >= 0 || p.options.window_right >= 0)
    out += text(", window (", p.options.window_left, ",", p.options.window_right, ")");
  if (!out.empty() || p.slopes) {
    if (p.options.alignment == Alignment::bottom_right) out += ", bottom right";
    if (p.options.alignment == Alignment::top_left) out += ", top left";
    if (p.options.alignment == Alignment::offset) out += text(", diagonal at ", p.options.diagonal_offset);
  }
  if (p.mask) out += ", mask " + shape(*p.mask);
  if (p.tree_words) out += text(", a tree mask of ", p.tree_words, " words a row");
  if (p.positions) out += ", positions";
  return out;
}

static std::string pages_text(const Pages& pages) {
  std::string out = text(", ", pages.count, " pages of ", pages.size, " keys, ", pages.entries, " table entries");
  if (pages.indptr) out += " by indptr";
  if (pages.v_table) out += text(", a table of v for ", pages.v_count, " pages");
  if (pages.leftpad) out += ", left padding";
  return pages.status ? out + ", status" : out;
}

// Types that differ from q's, and scales.
static std::string keys_text(const char* name, Type type, int scale, Type q_type) {
  constexpr const char* forms[] = {"", " per head", " per sequence and head", " per key and head",
                                   " per key, head and 128 dims"};
  std::string out = type != q_type ? text(", ", name, " ", name_of(type)) : "";
  return scale ? out + text(", scales of ", name, forms[scale]) : out;
}

std::string text_of(const Problem& p) {
  std::string out = p.pass == Pass::forward ? "forward, " : "backward, ";
  out += text(name_of(p.device), ", ", name_of(p.q_type));
  out += keys_text("K", p.k_type, p.k_scale, p.q_type) + keys_text("V", p.v_type, p.v_scale, p.q_type);
  out += text(p.packed ? ", packed B=" : ", B=", p.B, p.packed ? " Tq=" : " Nq=", p.Nq);
  out += text(p.packed && !p.pages ? " Tk=" : " Nk=", p.Nk);
  out += text(" Hq=", p.Hq, " Hk=", p.Hk, " D=", p.D, " Dv=", p.Dv, ", scale ", p.options.scale);
  if (p.qv) out += ", Qv";
  if (p.pages) out += pages_text(*p.pages);
  out += mask_text(p);
  if (p.seqused_q || p.seqused_k) out += ", used lengths";
  if (p.options.softcap > 0) out += text(", softcap ", p.options.softcap);
  if (p.slopes) out += ", ALiBi";
  if (p.bias) out += ", bias " + shape(*p.bias);
  if (p.options.dropout > 0) out += text(", dropout ", p.options.dropout);
  if (p.sinks) out += ", sinks";
  if (p.d_lse) out += ", dLSE";
  if (const std::string part = part_text(p); !part.empty()) out += ", " + part;
  if (p.pass == Pass::forward && !p.state_out) out += text(", O ", name_of(p.o_type), p.lse ? ", LSE" : "");
  if (p.pass == Pass::backward) {
    out += ", gradients:";
    if (p.dq) out += text(" dQ ", name_of(*p.dq));
    if (p.dk) out += text(" dK ", name_of(*p.dk));
    if (p.dv) out += text(" dV ", name_of(*p.dv));
    if (p.dbias) out += text(" dBias ", name_of(*p.dbias));
    if (p.dsinks) out += text(" dSink ", name_of(*p.dsinks));
    if (p.options.accumulate) out += " (accumulated)";
  }
  out += text(", aligned to ", p.alignment, " bytes");
  return p.far_strides ? out + ", strides below 0 or from 2^40 bytes on" : out;
}

}  // namespace tessera
