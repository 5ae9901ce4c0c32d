# SPDX-License-Identifier: Apache-2.0
# Tests on GPUs that are not there: a fake libcuda and a fake libnvrtc with the real ones' names. Programs that link
# them have them loaded, and so the library's dlopen by name finds them. Included by tests/CMakeLists.txt, which defines
# tessera_test. See docs/testing.md.
function(fake_library name soname)
  add_library(${name} SHARED ${ARGN})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src
                                             ${PROJECT_SOURCE_DIR}/include)
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET default LIBRARY_OUTPUT_DIRECTORY fake/${name}
                                           OUTPUT_NAME ${soname} PREFIX "" SUFFIX "")
  # The C++ runtime in it is its own.
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL)
endfunction()
fake_library(fake_driver libcuda.so.1 fake/driver.cpp fake/driver_memory.cpp fake/machine.cpp)
fake_library(fake_compiler libnvrtc.so.13 fake/compiler.cpp)

# Kernels come from the fake compiler, never from the pack of the build: the empty one takes its place. Nor from what the
# user's environment names (fake/environment.hpp).
function(fake_test name)
  tessera_test(NAME ${name} SOURCES ${ARGN} fake/extents.cpp fake/extents_hopper.cpp
               ${PROJECT_SOURCE_DIR}/src/cuda/jit/no_pack.cpp
               LIBRARIES fake_driver fake_compiler
               ENVIRONMENT "TESSERA_NVRTC=/nowhere/libnvrtc.so;TESSERA_PACK=/nowhere/kernels.pack")
endfunction()
fake_test(fake_gpu_test fake/fake_gpu_test.cpp)
fake_test(fake_shapes_test fake/fake_shapes_test.cpp)
fake_test(fake_decode_test fake/fake_decode_test.cpp)
fake_test(fake_append_test fake/fake_append_test.cpp)
fake_test(fake_dist_test fake/fake_dist_test.cpp)
fake_test(fake_faults_test fake/fake_faults_test.cpp)
fake_test(fake_opening_test fake/fake_opening_test.cpp)
fake_test(fake_memory_test fake/fake_memory_test.cpp support/faults.cpp)
fake_test(fake_cache_test fake/fake_cache_test.cpp support/failing_calls.c)

# Messages over NCCL; the memory that they travel between is the fake driver's.
fake_library(fake_nccl libnccl.so.2 fake/nccl.cpp)
target_link_libraries(fake_nccl PRIVATE fake_driver)
tessera_test(NAME fake_nccl_test SOURCES fake/fake_nccl_test.cpp ${PROJECT_SOURCE_DIR}/src/cuda/jit/no_pack.cpp
             LIBRARIES fake_nccl fake_driver LABELS dist)

fake_library(fake_old_driver libcuda.so.1 fake/old_driver.cpp)
tessera_test(NAME fake_old_driver_test SOURCES fake/fake_old_driver_test.cpp LIBRARIES fake_old_driver)

# What a call costs on the host: figures for people. As a test, that it runs.
add_executable(fake_host_time fake/host_time.cpp ${PROJECT_SOURCE_DIR}/src/cuda/jit/no_pack.cpp)
target_link_libraries(fake_host_time PRIVATE tessera_cases fake_driver fake_compiler GTest::gtest)
target_include_directories(fake_host_time PRIVATE ${PROJECT_SOURCE_DIR})
add_test(NAME fake_host_time COMMAND fake_host_time 20)
set_tests_properties(fake_host_time PROPERTIES TIMEOUT 60
                     ENVIRONMENT "TESSERA_NVRTC=/nowhere/libnvrtc.so;TESSERA_PACK=/nowhere/kernels.pack")
