# SPDX-License-Identifier: Apache-2.0
# Tests of one part of the library alone, without a kernel. Included by tests/CMakeLists.txt, which defines tessera_test.
tessera_test(NAME buffer_test SOURCES unit/buffer_test.cpp)
tessera_test(NAME overlap_test SOURCES unit/overlap_test.cpp)
tessera_test(NAME parallel_test SOURCES unit/parallel_test.cpp LABELS threads)
tessera_test(NAME openmp_test SOURCES unit/openmp_test.cpp $<TARGET_OBJECTS:parallel_test> support/faults.cpp
             LABELS threads)
# gcc's runtime, which is loaded later, must meet the pthread_create of faults.cpp.
set_target_properties(openmp_test PROPERTIES ENABLE_EXPORTS ON)
tessera_test(NAME places_test SOURCES unit/places_test.cpp)
tessera_test(NAME jit_test SOURCES unit/jit_test.cpp)
tessera_test(NAME cache_test SOURCES unit/cache_test.cpp support/failing_calls.c)

# Headers of src/math stand alone, and so does their test.
add_executable(mask_test unit/mask_test.cpp)
target_include_directories(mask_test PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(mask_test PRIVATE test_main)
add_test(NAME mask_test COMMAND mask_test --gtest_brief=1)
