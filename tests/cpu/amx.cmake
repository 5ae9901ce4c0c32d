# SPDX-License-Identifier: Apache-2.0
# The kernels for AMX on processors without it: src/cpu/isa/amx.cpp, compiled against a matrix unit in plain C++
# (tests/emulated/cpu), takes the place of the library's own in these tests, which force the kernel `amx`.
# Included by tests/cpu/tests.cmake. They need AVX-512, without which they are skipped, and ctest says so: the unit is
# emulated, but the kernels' vectors are written for AVX-512.
if(TESSERA_X86_64)
  add_library(emulated_amx OBJECT ${PROJECT_SOURCE_DIR}/src/cpu/isa/amx.cpp emulated/cpu/amx.cpp cpu/amx_skip.cpp)
  target_include_directories(emulated_amx PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulated ${PROJECT_SOURCE_DIR}
                                                  ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  # Optimised little: at -O3 it takes a minute to compile, which its tests do not save when they run.
  target_compile_options(emulated_amx PRIVATE ${test_options})

  # Another test once more, as it was compiled there. The objects come before the library, so the linker looks for
  # nothing of theirs in it.
  function(emulated_amx_test name shards test)
    tessera_test(NAME ${name} SHARDS ${shards} ENVIRONMENT TESSERA_TEST_KERNELS=amx
                 SOURCES $<TARGET_OBJECTS:${test}> ${ARGN} $<TARGET_OBJECTS:emulated_amx>)
  endfunction()
  emulated_amx_test(amx_features_test 1 simd_test cpu/amx_test.cpp)
  emulated_amx_test(amx_cases_test 2 cases_test)
  emulated_amx_test(amx_random_test 2 random_test)
  emulated_amx_test(amx_invariance_test 1 invariance_test)
  emulated_amx_test(amx_edge_test 1 edge_test)
  emulated_amx_test(amx_paged_test 1 paged_test)
  emulated_amx_test(amx_parts_test 1 parts_test)
  emulated_amx_test(amx_draft_test 1 draft_test)
  # Layouts of pages are undone before anything reaches the matrix unit: paged_test has them all.
  set_property(TEST amx_paged_test APPEND PROPERTY ENVIRONMENT "GTEST_FILTER=-Sizes/*")
endif()
