// SPDX-License-Identifier: Apache-2.0
// Implements cli/json.hpp: RFC 8259.
#include "cli/json.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string_view>

namespace tessera::cli {
namespace {

// Length of the UTF-8 sequence at the beginning of the text, or 0 if there is none: a stray or missing continuation
// byte, an overlong form, a surrogate, or a number beyond U+10FFFF.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t n) { return n < text.size() ? static_cast<unsigned char>(text[n]) : 0u; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  const std::size_t length = first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
  for (std::size_t n = 1; n < length; ++n)
    if ((byte(n) & 0xC0) != 0x80) return 0;
  if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F)) return 0;
  if ((first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F)) return 0;
  return length;
}

std::string quoted(std::string_view value) {
  std::string text = "\"";
  while (!value.empty()) {
    const std::size_t length = utf8_length(value);
    const char first = value.front();
    if (length == 0) {
      text += "\uFFFD";
    } else if (first == '"' || first == '\\') {
      text += {'\\', first};
    } else if (first == '\n') {
      text += "\\n";
    } else if (length == 1 && first < ' ') {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(first));
      text += escape;
    } else {
      text += value.substr(0, length);
    }
    value.remove_prefix(std::max<std::size_t>(1, length));
  }
  return text + "\"";
}

}  // namespace

Json::Json(double value) {
  if (!std::isfinite(value)) return;
  char digits[32];
  scalar.assign(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  if (scalar.find_first_of(".e") == std::string::npos) scalar += ".0";  // stays a float where types are told apart
}

Json::Json(const std::string& value) : scalar(quoted(value)) {}

Json::Json(std::initializer_list<Member> members) : kind(Kind::object) {
  for (const Member& member : members) (*this)[member.key] = member.value;
}

Json Json::array() {
  Json json;
  json.kind = Kind::array;
  return json;
}

void Json::push_back(Json value) {
  kind = Kind::array;
  children.push_back(std::move(value));
}

Json& Json::operator[](const std::string& key) {
  kind = Kind::object;
  const auto found = std::find(keys.begin(), keys.end(), key);
  if (found != keys.end()) return children[static_cast<std::size_t>(found - keys.begin())];
  keys.push_back(key);
  return children.emplace_back();
}

void Json::append_to(std::string& text, std::size_t indent) const {
  if (kind == Kind::scalar) {
    text += scalar;
    return;
  }
  text += kind == Kind::array ? '[' : '{';
  for (std::size_t n = 0; n < children.size(); ++n) {
    text += n == 0 ? "\n" : ",\n";
    text.append(indent + 2, ' ');
    if (kind == Kind::object) text += quoted(keys[n]) + ": ";
    children[n].append_to(text, indent + 2);
  }
  if (!children.empty()) text.append("\n").append(indent, ' ');
  text += kind == Kind::array ? ']' : '}';
}

std::string Json::text() const {
  std::string text;
  append_to(text, 0);
  return text + "\n";
}

}  // namespace tessera::cli
