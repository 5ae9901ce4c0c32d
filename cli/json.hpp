// SPDX-License-Identifier: Apache-2.0
// A JSON document to be written: `--json FILE` of every command. Included by cli/report.hpp.
// Implements the `--json FILE` part of docs/tour.md. Of our own: no destructor of it allocates, so that a command that
// runs out of memory ends with its sentence.
#pragma once

#include <concepts>
#include <initializer_list>
#include <string>
#include <vector>

namespace tessera::cli {

// null, a number, true or false, a string, an array or an object, whose members keep the order in which they were
// added.
class Json {
 public:
  struct Member;

  Json() = default;  // null; the first push_back makes it an array, the first [] an object
  Json(std::same_as<bool> auto value) : scalar(value ? "true" : "false") {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) Json(T value) : scalar(std::to_string(value)) {}
  Json(double value);  // the shortest text that reads back as the same bits; null for infinities and NaN
  Json(const char* value) : Json(std::string(value)) {}
  Json(const std::string& value);  // bytes that are not UTF-8 become U+FFFD
  template <class T>
  Json(const std::vector<T>& values) : kind(Kind::array), children(values.begin(), values.end()) {}
  Json(std::initializer_list<Member> members);  // an object

  static Json array();

  void push_back(Json value);
  Json& operator[](const std::string& key);  // null where there was no such member

  std::string text() const;  // indented by two, with a newline at the end

 private:
  enum class Kind { scalar, array, object };
  void append_to(std::string& text, std::size_t indent) const;

  Kind kind = Kind::scalar;
  std::string scalar = "null";    // as it is written
  std::vector<std::string> keys;  // of an object, one for each child
  std::vector<Json> children;
};

struct Json::Member {
  std::string key;
  Json value;
};

}  // namespace tessera::cli
