# SPDX-License-Identifier: Apache-2.0
# Tests of the Hopper kernels without a GPU: layouts, barriers, and their own text on an emulated machine
# (tests/emulated). Included by tests/CMakeLists.txt, which defines tessera_test.
tessera_test(NAME sm90_test SOURCES sm90/sm90_test.cpp)
tessera_test(NAME sm90_order_test SOURCES sm90/sm90_order_test.cpp)
tessera_test(NAME sm90_protocol_test SOURCES sm90/sm90_protocol_test.cpp)
tessera_test(NAME sm90_backward_protocol_test SOURCES sm90/sm90_backward_protocol_test.cpp)

# The tiles with which these tests specialise the kernels are those that the planner gives to their cases.
planned_headers(hopper_tiles emulated/tiles_main.cpp hopper_tiles.hpp hopper_backward_tiles.hpp hopper_part_tiles.hpp)
emulated_test(NAME sm90_machine_test SHARDS 2 SOURCES sm90/sm90_machine_test.cpp
              HEADER hopper_tiles.hpp PLANNED_BY hopper_tiles)
emulated_test(NAME sm90_parts_test SOURCES sm90/sm90_parts_test.cpp HEADER hopper_part_tiles.hpp PLANNED_BY hopper_tiles)
emulated_test(NAME sm90_backward_test SHARDS 2 SOURCES sm90/sm90_backward_test.cpp
              HEADER hopper_backward_tiles.hpp PLANNED_BY hopper_tiles)
emulated_test(NAME sm90_one_pass_test SHARDS 2 SOURCES sm90/sm90_one_pass_test.cpp)

# Keys in pages: parameters are written as for a GPU, tensor maps encoded by the fake driver.
planned_headers(hopper_units sm90/units_main.cpp hopper_paged_units.hpp)
emulated_test(NAME sm90_paged_test SOURCES sm90/sm90_paged_test.cpp
              HEADER hopper_paged_units.hpp PLANNED_BY hopper_units)
target_link_libraries(sm90_paged_test PRIVATE fake_driver)
