// SPDX-License-Identifier: Apache-2.0
// The launches of a forward and a backward pass on three rungs, in the order of the stream, and the tensors and
// workspace buffers that each reads and writes. Steps, grids and sizes are the planner's. See pictures.hpp.
#include <algorithm>
#include <map>
#include <optional>

#include "tools/pictures/pictures.hpp"
#include "tools/pictures/plans.hpp"

namespace tessera::pictures {
namespace {

using gpu::Step, gpu::Steps;

enum class Use { none, read, write, add, add_atomically };

// Buffers from left to right; those of the workspace lie in the middle.
const char* const buffers[] = {"q",    "k",    "v",    "O",    "LSE", "dO", "delta",
                               "lse2", "dQ *", "dK *", "dV *", "dQ",  "dK", "dV"};
constexpr std::size_t workspace_begin = 6, workspace_end = 11;

// What a kernel does with each buffer; src/ladder/kernel says the same in its parameters.
using Uses = std::map<std::string, Use>;
Uses uses_of(const std::string& kernel, const gpu::Accumulators& a) {
  const auto with = [](Uses base, const Uses& more) {
    base.insert(more.begin(), more.end());
    return base;
  };
  const Uses inputs{{"q", Use::read}, {"k", Use::read}, {"v", Use::read}};
  const Uses recompute = with(inputs, {{"dO", Use::read}, {"delta", Use::read}, {"lse2", Use::read}});
  if (kernel.ends_with("_forward")) return with(inputs, {{"O", Use::write}, {"LSE", Use::write}});
  if (kernel == "delta")
    return {{"O", Use::read}, {"LSE", Use::read}, {"dO", Use::read}, {"delta", Use::write}, {"lse2", Use::write}};
  if (kernel == "vector_backward_queries")  // prepares delta and LSE, for itself and for the kernel after it
    return with(inputs, {{"O", Use::read},
                         {"LSE", Use::read},
                         {"dO", Use::read},
                         {"delta", Use::write},
                         {"lse2", Use::write},
                         {"dQ", Use::write}});
  if (kernel == "vector_backward_keys") return with(recompute, {{"dK", Use::write}, {"dV", Use::write}});
  if (kernel == "warp_backward") return with(recompute, {{"dQ *", Use::add}, {"dK", Use::write}, {"dV", Use::write}});
  if (kernel == "tiled_backward")
    return with(recompute, {{"dQ", Use::write}, {"dK *", Use::add_atomically}, {"dV *", Use::add_atomically}});
  if (kernel == "convert_queries") return {{"dQ *", Use::read}, {"dQ", Use::write}};
  if (kernel == "convert_keys")
    return {{"dK *", Use::read}, {"dV *", Use::read}, {"dK", Use::write}, {"dV", Use::write}};
  if (kernel == "clear_sums") {
    Uses sums;
    if (a.dq > 0) sums["dQ *"] = Use::write;
    if (a.dk > 0) sums["dK *"] = Use::write;
    if (a.dv > 0) sums["dV *"] = Use::write;
    return sums;
  }
  throw std::runtime_error("pass_flow: what does " + kernel + " read and write?");
}

std::string bytes_text(std::size_t bytes) {
  return bytes >= 1 << 20 ? format("%.1f MiB", double(bytes) / (1 << 20)) : format("%.1f KiB", double(bytes) / 1024);
}

constexpr double left = 470, column = 44, row_height = 34, box_left = 24, box_width = 404;

double buffer_x(std::size_t n) {
  return left + double(n) * column + (n >= workspace_begin ? 24 : 0) + (n >= workspace_end ? 24 : 0);
}

void draw_use(Sheet& sheet, Use use, Point at) {
  switch (use) {
    case Use::none:
      return;
    case Use::read:
      sheet.dot(at, 7, colour::blue), sheet.dot(at, 4.5, "#ffffff");
      return;
    case Use::write:
      sheet.dot(at, 7, colour::orange);
      return;
    default:
      sheet.dot(at, 8.5, use == Use::add ? colour::orange : colour::red);
      sheet.text(at.x, at.y + 5, "+", "middle", "#ffffff", 14, true);
  }
}

// Kernels of both passes from top to bottom; returns where they end.
double draw_rung(Sheet& sheet, const std::string& rung, const Problem& forward, const Problem& backward, double y) {
  const Steps first = steps_of(rung, forward), second = steps_of(rung, backward);
  if (!first.reason.empty() || !second.reason.empty()) throw std::runtime_error(first.reason + second.reason);
  std::vector<Step> steps = first.list;
  steps.insert(steps.end(), second.list.begin(), second.list.end());
  const std::size_t forward_count = first.list.size();

  sheet.text(box_left, y, rung, "start", colour::ink, 15, true);
  sheet.text(box_left + box_width, y,
             "workspace " + bytes_text(gpu::workspace_bytes(backward, second.accumulators)) +
                 (second.accumulators.dq > 1 ? format(", dQ * in %d copies", second.accumulators.dq) : ""),
             "end", colour::faint, 12);
  const double top = y + 14;
  const auto row_y = [&](std::size_t n) { return top + double(n) * row_height + (n >= forward_count ? 14 : 0); };
  for (std::size_t b = 0; b < std::size(buffers); ++b) {
    std::optional<double> begin, end;
    for (std::size_t n = 0; n < steps.size(); ++n)
      if (uses_of(steps[n].name, second.accumulators).contains(buffers[b])) {
        end = row_y(n) + 13;
        if (!begin) begin = end;
      }
    if (begin) sheet.line({buffer_x(b), *begin}, {buffer_x(b), *end}, colour::grid, 3);
  }
  for (std::size_t n = 0; n < steps.size(); ++n) {
    const Step& step = steps[n];
    const double at = row_y(n);
    const char* stroke = n < forward_count ? colour::green : colour::violet;
    sheet.rect(box_left, at, box_width, 26, "#ffffff", stroke, 1.3);
    sheet.text(box_left + 10, at + 17, step.name, "start", stroke, 13, true);
    sheet.text(box_left + box_width - 10, at + 17,
               format("%lld x %d threads", static_cast<long long>(step.blocks), step.threads) +
                   (step.shared_bytes > 0 ? format(", %.1f KiB", step.shared_bytes / 1024.0) : ""),
               "end", colour::faint, 11);
    if (n + 1 < steps.size() && n + 1 != forward_count)
      sheet.arrow({box_left + 18, at + 26}, {box_left + 18, row_y(n + 1)}, stroke, 1.3);
    const Uses uses = uses_of(step.name, second.accumulators);
    for (std::size_t b = 0; b < std::size(buffers); ++b)
      if (const auto use = uses.find(buffers[b]); use != uses.end())
        draw_use(sheet, use->second, {buffer_x(b), at + 13});
  }
  return row_y(steps.size()) + 20;
}

}  // namespace

Sheet pass_flow() {
  Problem forward = api::plain_problem(Pass::forward, Type::f32, {64, 64});
  Problem backward = api::plain_problem(Pass::backward, Type::f32, {64, 64});
  backward.options.deterministic = false;  // or `tiled` would refuse; the others do not care
  const double right = buffer_x(std::size(buffers) - 1) + 34;
  Sheet sheet(right, 816, "Launches of the passes");
  sheet.text(box_left, 32,
             format("Launches in the order of the stream: f32, B=%lld, H=%lld, N=%lld, D=%lld", forward.B, forward.Hq,
                    forward.Nq, forward.D),
             "start", colour::ink, 14, true);

  const double heading = 84, ws = buffer_x(workspace_begin) - 25, ws_end = buffer_x(workspace_end - 1) + 25;
  sheet.rect(ws, heading - 36, ws_end - ws, 696, "#f2f0f7");
  sheet.text((ws + ws_end) / 2, heading - 20, "workspace", "middle", colour::violet, 12, true);
  sheet.text((buffer_x(0) + buffer_x(workspace_begin - 1)) / 2, heading - 20, "the caller's", "middle", colour::faint,
             12);
  sheet.text((buffer_x(workspace_end) + buffer_x(std::size(buffers) - 1)) / 2, heading - 20, "the caller's", "middle",
             colour::faint, 12);
  for (std::size_t b = 0; b < std::size(buffers); ++b)
    sheet.text(buffer_x(b), heading, buffers[b], "middle", colour::ink, 13, true);

  double y = heading + 24;
  for (const char* rung : {"vector", "warp", "tiled"}) y = draw_rung(sheet, rung, forward, backward, y);

  y = 768;
  double x = box_left;
  const auto key = [&](Use use, const std::string& words, double width) {
    draw_use(sheet, use, {x + 8, y - 4});
    sheet.text(x + 24, y, words, "start", colour::ink, 12);
    x += width;
  };
  key(Use::read, "reads", 84), key(Use::write, "writes, one writer to an element", 250);
  key(Use::add, "adds, one writer to an element of a copy", 304);
  key(Use::add_atomically, "adds atomically, in any order", 200);
  sheet.text(box_left, y + 24,
             "dQ *, dK *, dV *: sums in f32, which a last step adds up in a fixed order and writes in the gradient's "
             "type and layout.",
             "start", colour::faint, 12);
  return sheet;
}

}  // namespace tessera::pictures
