# SPDX-License-Identifier: Apache-2.0
# Tests of the ladder without a GPU: its own text on an emulated machine (tests/emulated). Included by
# tests/CMakeLists.txt.
planned_headers(ladder_units ladder/units_main.cpp ladder_units.hpp)
emulated_test(NAME ladder_test SOURCES ladder/ladder_test.cpp HEADER ladder_units.hpp PLANNED_BY ladder_units)
