// SPDX-License-Identifier: Apache-2.0
// Reading and writing NumPy's .npy files, versions 1.0, 2.0 and 3.0.
// Included by cli/run.cpp and tests/cli/npy_test.cpp.
// Implements numpy.lib.format, for the types that attention uses; every file is treated as hostile.
#pragma once

#include <filesystem>
#include <iosfwd>

#include "cli/array.hpp"

namespace tessera::cli {

// f2, f4, f8, i4, i8, u1, i1, b1, little-endian, C order, up to four dimensions. Anything else is a Failure with one
// sentence that names the file. The file's size is checked against its header before memory is allocated.
Array read_npy(const std::filesystem::path& path);

// bf16 has no name in NumPy: it is written as f4, which holds every value exactly.
void write_npy(std::ostream& out, const Array& array);

}  // namespace tessera::cli
