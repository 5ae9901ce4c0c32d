// SPDX-License-Identifier: Apache-2.0
// A sheet of paper for the pictures in docs/pictures: rectangles, lines, text, and a file at the end.
// Included by tools/pictures/*.cpp only.
// Every sheet has a light background of its own, so that it can be read on a light and on a dark page.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::pictures {

namespace colour {
inline constexpr const char* ink = "#22303c";
inline constexpr const char* faint = "#7a8790";
inline constexpr const char* grid = "#d5dade";
inline constexpr const char* empty = "#eef0f1";
inline constexpr const char* light = "#a9c6e3";
inline constexpr const char* blue = "#2f6ba8";
inline constexpr const char* orange = "#d9822b";
inline constexpr const char* red = "#c23b3b";
inline constexpr const char* green = "#3a8a5f";
inline constexpr const char* violet = "#7a5aa6";
}  // namespace colour

inline std::string format(const char* pattern, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

struct Point {
  double x, y;
};

class Sheet {
 public:
  Sheet(double width, double height, const std::string& title) {
    body = format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" height=\"%g\" ", width,
                  height, width, height) +
           "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\">\n<title>" + title + "</title>\n" +
           format("<rect width=\"%g\" height=\"%g\" rx=\"8\" fill=\"#fcfcfa\"/>\n", width, height);
  }

  void rect(double x, double y, double w, double h, const std::string& fill, const std::string& stroke = "none",
            double line = 1) {
    body += format("<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\" stroke=\"%s\" ", x, y, w, h,
                   fill.c_str(), stroke.c_str()) +
            format("stroke-width=\"%g\"/>\n", line);
  }
  void line(Point a, Point b, const std::string& stroke, double width = 1, const std::string& dash = "") {
    body +=
        format("<line x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\" stroke=\"%s\" ", a.x, a.y, b.x, b.y,
               stroke.c_str()) +
        format("stroke-width=\"%g\"%s/>\n", width, dash.empty() ? "" : (" stroke-dasharray=\"" + dash + "\"").c_str());
  }
  void arrow(Point a, Point b, const std::string& stroke, double width = 1.5) {
    line(a, b, stroke, width);
    const double dx = b.x - a.x, dy = b.y - a.y, n = dx * dx + dy * dy > 0 ? std::sqrt(dx * dx + dy * dy) : 1;
    const double ux = dx / n * 7, uy = dy / n * 7;
    body += format("<polygon points=\"%.2f,%.2f %.2f,%.2f %.2f,%.2f\" fill=\"%s\"/>\n", b.x, b.y, b.x - ux - uy / 2,
                   b.y - uy + ux / 2, b.x - ux + uy / 2, b.y - uy - ux / 2, stroke.c_str());
  }
  void polyline(const std::vector<Point>& points, const std::string& stroke, double width = 1.5) {
    body += "<polyline points=\"";
    for (const Point& p : points) body += format("%.2f,%.2f ", p.x, p.y);
    body += format("\" fill=\"none\" stroke=\"%s\" stroke-width=\"%g\"/>\n", stroke.c_str(), width);
  }
  void dot(Point at, double radius, const std::string& fill) {
    body += format("<circle cx=\"%.2f\" cy=\"%.2f\" r=\"%g\" fill=\"%s\"/>\n", at.x, at.y, radius, fill.c_str());
  }
  // anchor: start, middle or end.
  void text(double x, double y, const std::string& words, const char* anchor = "start",
            const std::string& fill = colour::ink, double size = 13, bool bold = false) {
    body += format("<text x=\"%.2f\" y=\"%.2f\" text-anchor=\"%s\" fill=\"%s\" font-size=\"%g\"%s>", x, y, anchor,
                   fill.c_str(), size, bold ? " font-weight=\"bold\"" : "") +
            escaped(words) + "</text>\n";
  }
  void vertical_text(double x, double y, const std::string& words, const std::string& fill = colour::ink) {
    body += format("<text transform=\"translate(%.2f,%.2f) rotate(-90)\" text-anchor=\"middle\" fill=\"%s\">", x, y,
                   fill.c_str()) +
            escaped(words) + "</text>\n";
  }

  void save(const std::string& path) const {
    std::ofstream file(path);
    file << body << "</svg>\n";
    if (!file.flush()) throw std::runtime_error("cannot write " + path);
  }

 private:
  static std::string escaped(const std::string& words) {
    std::string out;
    for (char c : words) {
      if (c == '<')
        out += "&lt;";
      else if (c == '>')
        out += "&gt;";
      else if (c == '&')
        out += "&amp;";
      else
        out += c;
    }
    return out;
  }

  std::string body;
};

}  // namespace tessera::pictures
