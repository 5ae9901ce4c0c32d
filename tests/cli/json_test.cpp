// SPDX-License-Identifier: Apache-2.0
// JSON as `--json` writes it: every kind of value, what must be escaped, and numbers that read back as the same bits.
#include "cli/json.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>

namespace tessera::cli {
namespace {

std::string line(const Json& json) {
  const std::string text = json.text();
  EXPECT_TRUE(text.ends_with("\n"));
  return text.substr(0, text.size() - 1);
}

TEST(Json, Scalars) {
  EXPECT_EQ(line(Json()), "null");
  EXPECT_EQ(line(true), "true");
  EXPECT_EQ(line(false), "false");
  EXPECT_EQ(line(-7), "-7");
  EXPECT_EQ(line(std::numeric_limits<std::int64_t>::min()), "-9223372036854775808");
  EXPECT_EQ(line(std::numeric_limits<std::uint64_t>::max()), "18446744073709551615");
  EXPECT_EQ(line("text"), "\"text\"");
}

TEST(Json, Floats) {
  EXPECT_EQ(line(0.1), "0.1");
  EXPECT_EQ(line(4.0), "4.0");
  EXPECT_EQ(line(-0.0), "-0.0");
  EXPECT_EQ(line(1e300), "1e+300");
  EXPECT_EQ(line(0.5f), "0.5");
  EXPECT_EQ(line(std::numeric_limits<double>::infinity()), "null");
  EXPECT_EQ(line(std::numeric_limits<double>::quiet_NaN()), "null");
}

TEST(Json, FloatsReadBackAsTheSameBits) {
  std::mt19937_64 random(1);
  int finite = 0;
  for (int n = 0; n < 10000; ++n) {
    const double value = std::bit_cast<double>(random());
    if (!std::isfinite(value)) continue;
    ++finite;
    const std::string text = line(value);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(std::strtod(text.c_str(), nullptr)), std::bit_cast<std::uint64_t>(value))
        << text;
    EXPECT_NE(text.find_first_of(".e"), std::string::npos) << text;
  }
  EXPECT_GT(finite, 9000);
}

TEST(Json, EscapesWhatStringsMustNotHold) {
  EXPECT_EQ(line("a\"b\\c\nd"), R"("a\"b\\c\nd")");
  EXPECT_EQ(line(std::string("\t\0\x1f\x7f", 4)), "\"\\u0009\\u0000\\u001f\x7f\"");
  EXPECT_EQ(line({{"a\"b", 1}}), "{\n  \"a\\\"b\": 1\n}");
}

TEST(Json, KeepsUtf8) {
  for (const char* text : {"\u00e9", "\u0800", "\ud7ff", "\uffff", "\U00010000", "\U0010ffff"})
    EXPECT_EQ(line(text), std::string("\"") + text + "\"");
}

// Paths may hold any bytes; a JSON reader takes UTF-8 only.
TEST(Json, ReplacesBytesThatAreNotUtf8) {
  const std::string bad = "\uFFFD";
  EXPECT_EQ(line("a\xff"
                 "b"),
            "\"a" + bad + "b\"");
  EXPECT_EQ(line("\x80"), "\"" + bad + "\"");  // a continuation without a beginning
  EXPECT_EQ(line("\xc3"), "\"" + bad + "\"");  // cut off
  EXPECT_EQ(line("\xe2\x82"
                 "a"),
            "\"" + bad + bad + "a\"");                                       // one byte too few
  EXPECT_EQ(line("\xc0\xaf"), "\"" + bad + bad + "\"");                      // overlong, two bytes
  EXPECT_EQ(line("\xe0\x9f\xbf"), "\"" + bad + bad + bad + "\"");            // overlong, three
  EXPECT_EQ(line("\xf0\x8f\xbf\xbf"), "\"" + bad + bad + bad + bad + "\"");  // overlong, four
  EXPECT_EQ(line("\xed\xa0\x80"), "\"" + bad + bad + bad + "\"");            // a surrogate
  EXPECT_EQ(line("\xf4\x90\x80\x80"), "\"" + bad + bad + bad + bad + "\"");  // beyond U+10FFFF
  EXPECT_EQ(line("\xf5\x80\x80\x80"), "\"" + bad + bad + bad + bad + "\"");
}

TEST(Json, ArraysAndObjects) {
  EXPECT_EQ(line(Json::array()), "[]");
  EXPECT_EQ(line(std::vector<std::string>{}), "[]");
  EXPECT_EQ(line(std::vector<std::int64_t>{1, 2}), "[\n  1,\n  2\n]");
  Json json;
  json["z"] = 1;
  json["a"].push_back(Json::array());
  json["a"].push_back({{"x", true}, {"y", "no"}});
  json["z"] = 2;  // keeps its place
  EXPECT_EQ(line(json),
            "{\n  \"z\": 2,\n  \"a\": [\n    [],\n    {\n      \"x\": true,\n      \"y\": \"no\"\n    }\n  ]\n}");
}

}  // namespace
}  // namespace tessera::cli
