# SPDX-License-Identifier: Apache-2.0
# Tests of the `decode` kernels without a GPU: layouts, plans, and their own text on an emulated machine (tests/emulated).
# Included by tests/CMakeLists.txt, which defines tessera_test.
tessera_test(NAME decode_test SOURCES decode/decode_test.cpp)
emulated_test(NAME decode_schedule_test SOURCES decode/decode_schedule_test.cpp)

emulated_test(NAME append_machine_test SOURCES decode/append_machine_test.cpp)
emulated_test(NAME merge_machine_test SOURCES decode/merge_machine_test.cpp)
emulated_test(NAME read_machine_test SOURCES decode/read_machine_test.cpp)

planned_headers(decode_units decode/units_main.cpp decode_units.hpp decode_cache_units.hpp)
emulated_test(NAME decode_machine_test SOURCES decode/decode_machine_test.cpp
              HEADER decode_units.hpp PLANNED_BY decode_units)
emulated_test(NAME decode_invariance_test SHARDS 2 SOURCES decode/decode_invariance_test.cpp
              HEADER decode_units.hpp PLANNED_BY decode_units)
emulated_test(NAME decode_caches_test SOURCES decode/decode_caches_test.cpp
              HEADER decode_cache_units.hpp PLANNED_BY decode_units)
