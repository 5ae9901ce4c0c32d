# SPDX-License-Identifier: Apache-2.0
# The compile gate: `gate quick` as a test, and the tests that it notices. Included by tests/CMakeLists.txt.
# `make gate` runs `gate full`. See docs/architecture.md, "Compiling kernels".
add_library(gate_parts OBJECT gate/gate.cpp gate/problems.cpp gate/cover.cpp)
target_link_libraries(gate_parts PUBLIC tessera_static)
target_include_directories(gate_parts PUBLIC ${PROJECT_SOURCE_DIR})
add_executable(gate gate/main.cpp)
target_link_libraries(gate PRIVATE gate_parts)
# It uses every processor by itself. The time-out is ten times what it takes on two busy processors.
add_test(NAME gate COMMAND gate quick)
set_tests_properties(gate PROPERTIES LABELS gate SKIP_RETURN_CODE 77 RUN_SERIAL TRUE TIMEOUT 3000)

tessera_test(NAME gate_test SOURCES gate/gate_test.cpp LIBRARIES gate_parts LABELS gate)
set_tests_properties(gate_test PROPERTIES SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
