# SPDX-License-Identifier: Apache-2.0
# Tests that need a GPU, with the label `gpu`: `ctest -L gpu -j 14`. Without one they are skipped, and ctest says so
# (tests/support/main.cpp).
# Included by tests/CMakeLists.txt, which defines tessera_test. See docs/testing.md.
tessera_test(NAME gpu_cases_test SOURCES gpu/gpu_cases_test.cpp SHARDS 14 LABELS gpu)
tessera_test(NAME gpu_invariance_test SOURCES gpu/gpu_invariance_test.cpp SHARDS 6 LABELS gpu)
tessera_test(NAME gpu_memory_test SOURCES gpu/gpu_memory_test.cpp SHARDS 14 LABELS gpu)
tessera_test(NAME gpu_calls_test SOURCES gpu/gpu_calls_test.cpp LABELS gpu)
tessera_test(NAME gpu_hopper_test SOURCES gpu/gpu_hopper_test.cpp SHARDS 28 LABELS gpu)
tessera_test(NAME gpu_hopper_backward_test SOURCES gpu/gpu_hopper_backward_test.cpp SHARDS 28 LABELS gpu)
tessera_test(NAME gpu_parts_test SOURCES gpu/gpu_parts_test.cpp LABELS gpu)
tessera_test(NAME gpu_dist_test SOURCES gpu/gpu_dist_test.cpp LABELS gpu)
tessera_test(NAME gpu_nccl_test SOURCES gpu/gpu_nccl_test.cpp LABELS gpu)
tessera_test(NAME gpu_mma_test SOURCES gpu/gpu_mma_test.cpp SHARDS 28 LABELS gpu)
tessera_test(NAME gpu_decode_test SOURCES gpu/gpu_decode_test.cpp SHARDS 14 LABELS gpu)
tessera_test(NAME gpu_append_test SOURCES gpu/gpu_append_test.cpp LABELS gpu)
tessera_test(NAME gpu_ptx_test SOURCES gpu/gpu_ptx_test.cpp LABELS gpu)
tessera_test(NAME gpu_sizes_test SOURCES gpu/gpu_sizes_test.cpp LABELS gpu)

# Processes under mpirun that share the GPU; see tests/dist/tests.cmake.
if(TARGET tessera_mpi AND NOT TESSERA_SANITIZE)
  add_executable(gpu_mpi_ranks gpu/gpu_mpi_ranks.cpp)
  target_link_libraries(gpu_mpi_ranks PRIVATE tessera_mpi_objects tessera_cases ${main})
  target_compile_options(gpu_mpi_ranks PRIVATE ${test_options})
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    target_precompile_headers(gpu_mpi_ranks REUSE_FROM ${main})
  endif()
  add_test(NAME gpu_mpi_ranks
           COMMAND python3 -B ${PROJECT_SOURCE_DIR}/tests/dist/mpi_test.py $<TARGET_FILE:gpu_mpi_ranks> gpu)
  set_tests_properties(gpu_mpi_ranks PROPERTIES TIMEOUT ${test_timeout} LABELS "gpu;mpi" SKIP_RETURN_CODE 77)
endif()

# Kernels that these tests compile stay in the build folder, not in the user's cache.
get_property(all_tests DIRECTORY PROPERTY TESTS)
list(FILTER all_tests INCLUDE REGEX "^gpu_")
set_property(TEST ${all_tests} APPEND PROPERTY ENVIRONMENT "TESSERA_CACHE=${PROJECT_BINARY_DIR}/gpu_kernels")
