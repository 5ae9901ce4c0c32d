// SPDX-License-Identifier: Apache-2.0
// Tests of the .npy reader and writer: what NumPy writes is read, everything else is refused with one sentence.
// Registered by tests/cli/tests.cmake.
// Checks cli/npy.hpp; files of numpy.lib.format, versions 1.0, 2.0 and 3.0.
#include "cli/npy.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cli/failure.hpp"
#include "cli/files.hpp"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

// A file of the given bytes that goes away with the test.
class Npy : public testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / ("tessera_npy_" + std::to_string(getpid()));
    fs::create_directories(folder);
  }
  void TearDown() override { fs::remove_all(folder); }

  fs::path file(const std::string& bytes) const {
    const fs::path path = folder / "x.npy";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  // A whole file: magic, version, length, header, data.
  static std::string bytes(const std::string& header, const std::string& data, int major = 1) {
    std::string text("\x93NUMPY");
    text += static_cast<char>(major);
    text += '\0';
    for (int i = 0; i < (major == 1 ? 2 : 4); ++i) text += static_cast<char>(header.size() >> (8 * i) & 0xFF);
    return text + header + data;
  }

  static std::string header(const std::string& descr, const std::string& shape, const std::string& order = "False") {
    return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
  }

  // The sentence with which a file is refused.
  std::string refusal(const std::string& content) const {
    try {
      read_npy(file(content));
    } catch (const Failure& failure) {
      const std::string sentence = failure.what();
      EXPECT_EQ(sentence.find('\n'), std::string::npos) << sentence;
      EXPECT_EQ(sentence.back(), '.') << sentence;
      EXPECT_NE(sentence.find("x.npy"), std::string::npos) << "the sentence names the file: " << sentence;
      return sentence;
    }
    return "accepted";
  }

  void expect_refused(const std::string& content, const std::string& part) const {
    EXPECT_NE(refusal(content).find(part), std::string::npos) << refusal(content) << "\nexpected: " << part;
  }

  fs::path folder;
};

const std::string six_floats(24, '\0');

TEST_F(Npy, ReadsEveryVersion) {
  float values[6] = {1, 2, 3, 4, 5, -6};
  const std::string data(reinterpret_cast<const char*>(values), sizeof values);
  for (int major = 1; major <= 3; ++major) {
    const Array array = read_npy(file(bytes(header("<f4", "(2, 3)"), data, major)));
    EXPECT_EQ(array.type(), Type::f32);
    EXPECT_EQ(array.shape(), (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(std::memcmp(array.data<float>(), values, sizeof values), 0);
  }
}

TEST_F(Npy, ReadsKeysInAnyOrderAndQuotes) {
  const std::string odd = "  {\"shape\":(6,),\"fortran_order\":False ,  'descr':'<f4'}   \n";
  EXPECT_EQ(read_npy(file(bytes(odd, six_floats))).shape(), std::vector<std::int64_t>{6});
}

TEST_F(Npy, ReadsEmptyArrays) { EXPECT_EQ(read_npy(file(bytes(header("<f4", "(2, 0, 3)"), ""))).elements(), 0); }

TEST_F(Npy, WritesWhatItReads) {
  for (const Type type : {Type::f64, Type::f32, Type::f16, Type::bf16, Type::i32, Type::i64, Type::u8}) {
    for (const auto& shape : {std::vector<std::int64_t>{5}, {2, 3}, {1, 2, 3, 4}, {3, 0}}) {
      Array array(type, shape);
      for (std::int64_t i = 0; i < array.elements(); ++i) array.set(i, static_cast<double>(i));
      std::ostringstream out;
      write_npy(out, array);
      EXPECT_EQ((out.str().size() - (type == Type::bf16 ? 2 : 1) * array.bytes()) % 64, 0u) << "data are aligned";
      const Array again = read_npy(file(out.str()));
      EXPECT_EQ(again.type(), type == Type::bf16 ? Type::f32 : type);
      EXPECT_EQ(again.shape(), shape);
      for (std::int64_t i = 0; i < array.elements(); ++i) EXPECT_EQ(again.at(i), static_cast<double>(i));
    }
  }
}

TEST_F(Npy, RefusesOtherFiles) {
  expect_refused("", "too short");
  expect_refused("\x93NUMPY", "too short");
  expect_refused("PK\x03\x04 this is an .npz archive", "not a .npy file");
  std::string version = bytes(header("<f4", "(6,)"), six_floats);
  version[6] = 4;
  expect_refused(version, "version 4.0");
  version[6] = 1, version[7] = 7;
  expect_refused(version, "version 1.7");
  EXPECT_THROW(read_npy(folder / "missing.npy"), Failure);
  EXPECT_THROW(read_npy(folder), Failure);
}

TEST_F(Npy, RefusesAPipe) {
  const fs::path pipe = folder / "pipe.npy";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(read_npy(pipe), Failure);  // and does not wait for a writer
}

TEST_F(Npy, RefusesTruncatedFiles) {
  const std::string whole = bytes(header("<f4", "(2, 3)"), six_floats);
  for (std::size_t length = 0; length < whole.size(); ++length)
    EXPECT_NE(refusal(whole.substr(0, length)), "accepted") << length;
  expect_refused(whole.substr(0, whole.size() - 1), "truncated");
  expect_refused(whole.substr(0, 40), "ends inside its header");
}

TEST_F(Npy, RefusesTrailingData) {
  expect_refused(bytes(header("<f4", "(2, 3)"), six_floats + "!"), "1 bytes follow the data");
}

TEST_F(Npy, RefusesHostileShapes) {
  for (const auto& [shape, part] : {std::pair{"(-1, 6)", "negative"},
                                    {"(99999999999999999999,)", "does not fit into 64 bits"},
                                    {"(4294967296, 4294967296)", "larger than any memory"},
                                    {"(9223372036854775807,)", "larger than any memory"},
                                    {"(0, 9223372036854775807, 9223372036854775807)", "larger than any memory"},
                                    {"(1000000000000,)", "truncated"},
                                    {"(1, 1, 1, 1, 6)", "more than 4 dimensions"},
                                    {"()", "without dimensions"},
                                    {"6", "'(' is missing"},
                                    {"(6", "is missing"},
                                    {"(2 3)", "is missing"},
                                    {"(2.0, 3)", "is missing"},
                                    {"(,)", "a size is missing"}})
    expect_refused(bytes(header("<f4", shape), six_floats), part);
}

TEST_F(Npy, RefusesOtherTypes) {
  for (const auto& [descr, part] : {std::pair{">f4", "big-endian"},
                                    {"|O", "Python objects"},
                                    {"<c8", "is not one of"},
                                    {"<U4", "is not one of"},
                                    {"<V2", "is not one of"},
                                    {"=f4", "is not one of"},
                                    {"f4", "is not one of"},
                                    {"", "is not one of"}})
    expect_refused(bytes(header(descr, "(6,)"), six_floats), part);
  expect_refused(bytes("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (6,), }", six_floats), "fields");
  expect_refused(bytes(header("<f4", "(2, 3)", "True"), six_floats), "fortran_order");
}

TEST_F(Npy, RefusesBrokenHeaders) {
  const std::string good = header("<f4", "(6,)");
  for (const auto& [text, part] : {std::pair{std::string(""), "missing"},
                                   {std::string("{"), "missing"},
                                   {std::string("{}"), "lacks"},
                                   {std::string("not a dict"), "missing"},
                                   {std::string("{'descr': '<f4"), "does not end"},
                                   {std::string("{'descr': '<f4', }"), "lacks"},
                                   {std::string("{'other': 1, }"), "unknown key"},
                                   {std::string("{'descr': '<f4', 'descr': '<f4', }"), "twice"},
                                   {header("<f4", "(6,)", "Maybe"), "neither True nor False"},
                                   {good + "x", "follows"},
                                   {std::string(200, '\0'), "missing"},
                                   {std::string(200, '{'), "missing"}})
    expect_refused(bytes(text, six_floats), part);
  expect_refused(bytes(std::string(70000, ' '), six_floats, 2), "too long");
  std::string huge = bytes(good, six_floats, 2);
  for (int i = 8; i < 12; ++i) huge[static_cast<std::size_t>(i)] = '\xFF';
  expect_refused(huge, "ends inside its header");
}

// Every byte of a good file replaced by every value of a few: accepted or refused, never anything else.
TEST_F(Npy, SurvivesChangedBytes) {
  const std::string whole = bytes(header("<f4", "(2, 3)"), six_floats);
  for (std::size_t at = 0; at < whole.size() - six_floats.size(); ++at)
    for (const char value : {'\0', '\xFF', '9', '-', '(', '\'', ',', '\n'}) {
      std::string changed = whole;
      changed[at] = value;
      refusal(changed);
    }
}

TEST_F(Npy, FilesAppearTogetherOrNotAtAll) {
  const auto write = [](std::ostream& out) { out << "content"; };
  {
    Files files;
    files.create_folder(folder / "a" / "b");
    files.add(folder / "a" / "b" / "one", write);
    EXPECT_FALSE(fs::exists(folder / "a" / "b" / "one"));
  }
  EXPECT_FALSE(fs::exists(folder / "a")) << "an abandoned set leaves not even its folders";
  {
    Files files;
    files.create_folder(folder / "a" / "b");
    files.add(folder / "a" / "b" / "one", write);
    files.add(folder / "a" / "b" / "two", write);
    files.commit();
  }
  std::size_t count = 0;
  for (const auto& entry : fs::directory_iterator(folder / "a" / "b")) count += entry.file_size() == 7;
  EXPECT_EQ(count, 2u);
  Files files;
  EXPECT_THROW(files.add(folder / "a", write), Failure);
  EXPECT_THROW(files.add(folder / "nowhere" / "x", write), Failure);
  EXPECT_THROW(files.create_folder(folder / "a" / "b" / "one"), Failure);
}

}  // namespace
}  // namespace tessera::cli
