// SPDX-License-Identifier: Apache-2.0
// Implements cli/npy.hpp: a strict reader of the three header versions, and a writer of version 1.0.
// The header is a Python dict literal; only the three keys that NumPy writes are understood.
#include "cli/npy.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <ostream>
#include <string_view>

#include "cli/failure.hpp"

namespace tessera::cli {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little, ".npy files are read and written as they lie in memory");

constexpr std::string_view magic = "\x93NUMPY";
constexpr std::uint64_t longest_header = 1 << 16;  // NumPy's own are about a hundred bytes
constexpr std::size_t most_dimensions = 4;

[[noreturn]] void refuse(const fs::path& path, const std::string& reason) {
  throw Failure(path.string() + ": " + reason + ".");
}

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
};

// "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", keys in any order, each exactly once.
class HeaderParser {
 public:
  HeaderParser(const fs::path& path, std::string_view text) : path(path), rest(text) {}

  Header parse() {
    Header header;
    bool seen[3] = {};
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      const int index = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : -1;
      if (index < 0) bad("it has an unknown key '" + key.substr(0, 32) + "'");
      if (seen[index]) bad("it has the key '" + key + "' twice");
      seen[index] = true;
      if (index == 0) header.descr = descr();
      if (index == 1) header.fortran_order = boolean();
      if (index == 2) header.shape = tuple();
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (!rest.empty()) bad("something follows it");
    if (!seen[0] || !seen[1] || !seen[2]) bad("it lacks one of descr, fortran_order, shape");
    return header;
  }

 private:
  [[noreturn]] void bad(const std::string& reason) { refuse(path, "its .npy header is not valid: " + reason); }

  void skip_space() {
    while (!rest.empty() && std::isspace(static_cast<unsigned char>(rest.front()))) rest.remove_prefix(1);
  }

  bool accept(char c) {
    skip_space();
    if (rest.empty() || rest.front() != c) return false;
    rest.remove_prefix(1);
    return true;
  }

  void expect(char c) {
    if (!accept(c)) bad(std::string("a '") + c + "' is missing");
  }

  std::string string() {
    skip_space();
    if (rest.empty() || (rest.front() != '\'' && rest.front() != '"')) bad("a string is missing");
    const std::size_t end = rest.find(rest.front(), 1);
    if (end == std::string_view::npos) bad("a string does not end");
    std::string text(rest.substr(1, end - 1));
    for (char& c : text)
      if (!std::isprint(static_cast<unsigned char>(c))) c = '?';  // error messages may quote it
    rest.remove_prefix(end + 1);
    return text;
  }

  std::string descr() {
    skip_space();
    if (!rest.empty() && rest.front() == '[') refuse(path, "it holds records with fields; save each field by itself");
    return string();
  }

  bool boolean() {
    skip_space();
    for (const std::string_view word : {"True", "False"}) {
      if (!rest.starts_with(word)) continue;
      rest.remove_prefix(word.size());
      return word == "True";
    }
    bad("fortran_order is neither True nor False");
  }

  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> sizes;
    expect('(');
    while (!accept(')')) {
      sizes.push_back(integer());
      if (sizes.size() > most_dimensions)
        refuse(path, "it has more than " + std::to_string(most_dimensions) + " dimensions");
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return sizes;
  }

  std::int64_t integer() {
    skip_space();
    if (!rest.empty() && rest.front() == '-') refuse(path, "its shape has a negative size");
    if (rest.empty() || !std::isdigit(static_cast<unsigned char>(rest.front()))) bad("a size is missing");
    std::int64_t value = 0;
    while (!rest.empty() && std::isdigit(static_cast<unsigned char>(rest.front()))) {
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, rest.front() - '0', &value))
        refuse(path, "its shape has a size that does not fit into 64 bits");
      rest.remove_prefix(1);
    }
    return value;
  }

  const fs::path& path;
  std::string_view rest;
};

struct Name {
  const char* descr;
  Type type;
};
constexpr std::array<Name, 8> names{{{"<f4", Type::f32},
                                     {"<f2", Type::f16},
                                     {"<f8", Type::f64},
                                     {"<i4", Type::i32},
                                     {"<i8", Type::i64},
                                     {"|u1", Type::u8},
                                     {"|i1", Type::u8},
                                     {"|b1", Type::u8}}};

Type type_of(const fs::path& path, const std::string& descr) {
  for (const Name& name : names)
    if (descr == name.descr) return name.type;
  std::string quoted("'");
  quoted += descr.substr(0, 32) + "'";
  if (descr.starts_with('>')) refuse(path, "its type " + quoted + " is big-endian; save it as little-endian");
  if (descr.find('O') != std::string::npos) refuse(path, "it holds Python objects, not numbers");
  refuse(path, "its type " + quoted + " is not one of <f4, <f2, <f8, <i4, <i8, |u1, |i1, |b1");
}

std::ifstream open(const fs::path& path, std::uint64_t& size) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) refuse(path, "there is no such file");
  if (status.type() != fs::file_type::regular) refuse(path, "it is not a regular file");
  size = fs::file_size(path, error);
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (error || !in) refuse(path, "it cannot be read" + (errno ? ": " + std::string(std::strerror(errno)) : ""));
  return in;
}

void read_exactly(std::istream& in, const fs::path& path, char* to, std::uint64_t bytes) {
  in.read(to, static_cast<std::streamsize>(bytes));
  if (static_cast<std::uint64_t>(in.gcount()) != bytes) refuse(path, "it ends in the middle");
}

// Magic, version, length of the header, the header itself. Returns the number of bytes that were read.
std::uint64_t read_header(std::istream& in, const fs::path& path, std::uint64_t size, Header& header) {
  std::array<unsigned char, 12> start{};
  if (size < 10) refuse(path, "it is too short for a .npy file");
  read_exactly(in, path, reinterpret_cast<char*>(start.data()), 8);
  if (std::memcmp(start.data(), magic.data(), magic.size()) != 0)
    refuse(path, "it is not a .npy file (its first bytes are wrong)");
  const int major = start[6], minor = start[7];
  if (major < 1 || major > 3 || minor != 0)
    refuse(path, "its .npy version " + std::to_string(major) + "." + std::to_string(minor) + " is not 1.0, 2.0 or 3.0");

  const std::uint64_t width = major == 1 ? 2 : 4;
  read_exactly(in, path, reinterpret_cast<char*>(start.data()) + 8, width);
  std::uint64_t length = 0;
  for (std::uint64_t i = 0; i < width; ++i) length |= std::uint64_t{start[8 + i]} << (8 * i);
  const std::uint64_t first = 8 + width;
  if (length > size - first) refuse(path, "it ends inside its header");
  if (length > longest_header) refuse(path, "its header of " + std::to_string(length) + " bytes is too long");
  std::string text(length, '\0');
  read_exactly(in, path, text.data(), length);
  header = HeaderParser(path, text).parse();
  return first + length;
}

// Checked before anything is allocated: a header may claim any size. [0, 2^40, 2^40] holds nothing, yet its strides
// would overflow, so a size of 0 counts as 1 there.
void check_size(const fs::path& path, const Header& header, Type type, std::uint64_t present) {
  std::int64_t extent = static_cast<std::int64_t>(size_of(type));
  bool empty = false;
  for (const std::int64_t n : header.shape) {
    empty |= n == 0;
    if (__builtin_mul_overflow(extent, std::max<std::int64_t>(n, 1), &extent))
      refuse(path, "its shape " + text_of(header.shape) + " is larger than any memory");
  }
  const std::uint64_t needed = empty ? 0 : static_cast<std::uint64_t>(extent);
  if (needed > present)
    refuse(path, "it is truncated: its shape " + text_of(header.shape) + " needs " + std::to_string(needed) +
                     " bytes of data and " + std::to_string(present) + " are there");
  if (needed < present)
    refuse(path, std::to_string(present - needed) + " bytes follow the data of its shape " + text_of(header.shape));
}

}  // namespace

Array read_npy(const fs::path& path) {
  std::uint64_t size = 0;
  std::ifstream in = open(path, size);
  Header header;
  const std::uint64_t begin = read_header(in, path, size, header);
  const Type type = type_of(path, header.descr);
  if (header.shape.empty()) refuse(path, "it holds a single number without dimensions");
  if (header.fortran_order)
    refuse(path, "it is stored column by column (fortran_order); save numpy.ascontiguousarray of it");
  check_size(path, header, type, size - begin);
  Array array(type, header.shape);
  read_exactly(in, path, array.data<char>(), array.bytes());
  return array;
}

void write_npy(std::ostream& out, const Array& array) {
  if (array.type() == Type::bf16) return write_npy(out, converted(array, Type::f32));
  std::string descr;
  for (const Name& name : names)
    if (descr.empty() && name.type == array.type()) descr = name.descr;

  std::string header = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (";
  for (const std::int64_t n : array.shape()) header += std::to_string(n) + ", ";
  if (array.shape().size() > 1) header.resize(header.size() - 2);  // a tuple of one keeps its comma
  header += "), }";
  constexpr std::size_t prefix = 10, alignment = 64;  // NumPy aligns the data for memory mapping
  header.append(alignment - (prefix + header.size() + 1) % alignment, ' ');
  header += '\n';

  const char version[] = {1, 0},
             length[] = {static_cast<char>(header.size() & 0xFF), static_cast<char>(header.size() >> 8)};
  out << std::string(magic).append(version, 2).append(length, 2) + header;
  out.write(array.data<char>(), static_cast<std::streamsize>(array.bytes()));
}

}  // namespace tessera::cli
