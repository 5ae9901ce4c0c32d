# SPDX-License-Identifier: Apache-2.0
# Tests of the `mma` kernels without a GPU: layouts, plans, and their own text on an emulated machine (tests/emulated).
# Included by tests/CMakeLists.txt, which defines tessera_test.
tessera_test(NAME mma_test SOURCES mma/mma_test.cpp)

planned_headers(mma_units mma/units_main.cpp mma_units.hpp mma_backward_units.hpp mma_one_pass_units.hpp
                mma_paged_units.hpp)
emulated_test(NAME mma_machine_test SHARDS 2 SOURCES mma/mma_machine_test.cpp
              HEADER mma_units.hpp PLANNED_BY mma_units)
emulated_test(NAME mma_backward_test SHARDS 2 SOURCES mma/mma_backward_test.cpp
              HEADER mma_backward_units.hpp PLANNED_BY mma_units)
emulated_test(NAME mma_one_pass_test SHARDS 2 SOURCES mma/mma_one_pass_test.cpp
              HEADER mma_one_pass_units.hpp PLANNED_BY mma_units)
emulated_test(NAME mma_paged_test SOURCES mma/mma_paged_test.cpp
              HEADER mma_paged_units.hpp PLANNED_BY mma_units)
