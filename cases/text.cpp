// SPDX-License-Identifier: Apache-2.0
// Cases and reports as text: one line per case, the command that repeats it, the table of worst errors.
// Part of tessera_cases; see case.hpp and suite.hpp.
// Implements the printed side of docs/numerics.md.
#include <algorithm>
#include <cstdio>
#include <sstream>

#include "cases/random.hpp"
#include "cases/suite.hpp"

namespace tessera::cases {

namespace {

std::string list(const std::vector<std::int32_t>& lengths) {
  std::string text;
  for (std::int32_t n : lengths) {
    if (!text.empty()) text += ',';
    text += std::to_string(n);
  }
  return text;
}

std::string dims(const Dims& d) {
  return std::string("[") + (d.b ? "B" : "1") + (d.h ? ",H" : ",1") + (d.i ? ",Nq" : ",1") + (d.j ? ",Nk]" : ",1]");
}

void shapes(std::ostream& out, const Case& c) {
  out << name_of(c.type);
  if (c.packed()) {
    out << " packed q=" << list(c.packed_q) << " k=" << list(c.packed_k);
    if (c.front_q || c.front_k) out << " front=" << c.front_q << "," << c.front_k;
    if (c.tail_q || c.tail_k) out << " tail=" << c.tail_q << "," << c.tail_k;
  } else {
    out << " B=" << c.B << " Nq=" << c.Nq << " Nk=" << c.Nk;
  }
  out << " H=" << c.Hq << "/" << c.Hk << " D=" << c.D;
  if (c.dim_v() != c.D) out << " Dv=" << c.dim_v();
  if (!c.used_q.empty()) out << " seqused_q=" << list(c.used_q);
  if (!c.used_k.empty()) out << " seqused_k=" << list(c.used_k);
  if (c.endless_k > 0) out << " endless_k=" << c.endless_k;
}

void options(std::ostream& out, const Options& o) {
  if (o.scale != default_scale) out << " scale=" << o.scale;
  if (o.softcap != 0) out << " softcap=" << o.softcap;
  if (o.causal) out << " causal";
  if (o.window_left >= 0 || o.window_right >= 0) out << " window=" << o.window_left << "," << o.window_right;
  if (o.alignment == Alignment::top_left) out << " top_left";
  if (o.alignment == Alignment::offset) out << " offset=" << o.diagonal_offset;
  if (o.dropout > 0) out << " dropout=" << o.dropout << "(" << o.seed << "," << o.seed_offset << ")";
  if (o.row0 || o.col0 || o.head0 || o.batch0)
    out << " at=" << o.row0 << "," << o.col0 << "," << o.head0 << "," << o.batch0;
  if (o.max_seqlen_q >= 0 || o.max_seqlen_k >= 0) out << " max_seqlen=" << o.max_seqlen_q << "," << o.max_seqlen_k;
  if (o.accumulate) out << " accumulate";
}

constexpr const char* sinks[] = {"", " sinks", " sinks(-inf)", " sinks(high)"};

void cached(std::ostream& out, const char* name, const Cached& keys) {
  constexpr const char* forms[] = {"", "[1]", "[H]", "[B,H]", "[B,N,H]", "[B,N,H,D/128]"};
  if (keys.type) out << " " << name << "=" << name_of(*keys.type);
  if (keys.scales != Scales::none)
    out << " " << name << "_scale" << forms[static_cast<std::size_t>(keys.scales)] << "*" << keys.size;
}

void tensors(std::ostream& out, const Case& c) {
  cached(out, "k", c.cached_k), cached(out, "v", c.cached_v);
  constexpr const char* trees[] = {"", " tree(chain)", " tree(star)", " tree(random)", " tree(blind)"};
  if (c.qv) out << " qv";
  out << trees[static_cast<std::size_t>(c.tree)] << (c.positions ? " positions" : "");
  if (c.bias) out << " bias" << dims(c.bias_dims) << (c.bias_f32 ? "f32" : "");
  if (c.masked_bias > 0) out << " bias_inf=" << c.masked_bias;
  if (c.mask) out << " mask" << dims(c.mask_dims) << c.mask_density;
  if (c.slopes != Slopes::none) out << (c.slopes == Slopes::per_head ? " slopes[H]" : " slopes[B,H]");
  out << sinks[static_cast<std::size_t>(c.sinks)];
  if (c.dlse) out << " dlse";
  if (c.rng) out << " rng";
  if (c.no_lse) out << " no_lse";
  if (c.f32_o) out << " f32_o";
  if (c.f32_do) out << " f32_do";
  if (c.f32_grads) out << " f32_grads";
  if (!c.backward) out << " forward_only";
  if (!c.grads.all())
    out << " grads=" << (c.grads.dq ? "q" : "") << (c.grads.dk ? "k" : "") << (c.grads.dv ? "v" : "")
        << (c.grads.dbias ? "b" : "") << (c.grads.dsinks ? "s" : "");
}

constexpr const char* distributions[] = {"normal", "small", "outlier", "cold", "huge", "structured", "identity"};
constexpr const char* styles[] = {"contiguous", "gaps", "heads_first", "shifted", "mixed", "broadcast"};

// A stream that does not end the text where memory runs out, but throws.
class TextStream : public std::ostringstream {
 public:
  TextStream() { exceptions(std::ios::badbit); }
};

std::string padded(const std::string& text, std::size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

std::string printed(const char* format, double x) {
  char text[48];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

}  // namespace

std::string describe(const Case& c) {
  TextStream out;
  shapes(out, c);
  options(out, c.options);
  tensors(out, c);
  out << " " << distributions[static_cast<std::size_t>(c.distribution)] << " "
      << styles[static_cast<std::size_t>(c.style)] << " seed=" << c.seed;
  return out.str();
}

std::string reproduce(const Case& c) {
  if (c.name == random_name(c.seed))
    return "tessera check --suite random --seed " + std::to_string(c.seed) + " --count 1";
  if (c.name == random_small_name(c.seed))
    return "tessera check --suite random_small --seed " + std::to_string(c.seed) + " --count 1";
  if (c.name == random_cache_name(c.seed))
    return "tessera check --suite random_caches --seed " + std::to_string(c.seed) + " --count 1";
  return "tessera check --case " + c.name;
}

std::string to_text(const CaseReport& report) {
  TextStream out;
  out << (report.skipped ? "skipped "
          : report.ok    ? "ok      "
                         : "FAILED  ")
      << report.name << " on " << (report.kernel.empty() ? "?" : report.kernel) << "\n  " << report.text << "\n";
  for (const OutputReport& o : report.outputs) {
    out << "  " << padded(o.name, 7) << padded(name_of(o.type), 5) << printed(" error %.3e", o.error)
        << printed(" allowed %.3e", o.allowed) << printed(" underflow %.3e", o.underflow)
        << printed(" model %.3e", o.model_error) << printed(" norm %.3e", o.norm);
    if (!o.ok) out << "  <- " << o.detail;
    out << "\n";
  }
  for (const std::string& message : report.messages) out << "  " << message << "\n";
  if (!report.ok) out << "  repeat with: " << report.reproduce << "\n";
  return out.str();
}

std::size_t underflowed(const SuiteReport& report) {
  const auto needs = [](const OutputReport& o) { return o.ok && o.needs_underflow(); };
  return static_cast<std::size_t>(std::count_if(report.cases.begin(), report.cases.end(), [&](const CaseReport& c) {
    return std::any_of(c.outputs.begin(), c.outputs.end(), needs);
  }));
}

std::string worst_table(const SuiteReport& report) {
  static constexpr const char* outputs[] = {"o", "lse", "dq", "dk", "dv", "dbias", "dsinks"};
  static constexpr Type types[] = {Type::f32, Type::f16, Type::bf16, Type::f64};
  TextStream out;
  out << padded("output", 8) << padded("type", 6) << padded("error/allowed", 15) << padded("error", 11)
      << padded("allowed", 11) << "worst case\n";
  for (const char* name : outputs)
    for (Type type : types) {
      const OutputReport* worst = nullptr;
      const CaseReport* where = nullptr;
      for (const CaseReport& c : report.cases)
        for (const OutputReport& o : c.outputs)
          if (o.name == name && o.type == type && (!worst || o.ratio() > worst->ratio())) worst = &o, where = &c;
      if (!worst) continue;
      out << padded(name, 8) << padded(name_of(type), 6) << padded(printed("%.3f", worst->ratio()), 15)
          << padded(printed("%.2e", worst->error), 11) << padded(printed("%.2e", worst->allowed), 11) << where->name
          << " (" << where->kernel << ")\n";
    }
  if (const auto count = underflowed(report); count > 0)
    out << count << (count == 1 ? " case is" : " cases are") << " within the rule only by its underflow term\n";
  return out.str();
}

}  // namespace tessera::cases
