# SPDX-License-Identifier: Apache-2.0
# What the tests of device code on this folder's emulated machine share. Included by tests/CMakeLists.txt, which defines
# tessera_test, before the folders that use it.

# planned_headers(program source headers...)
# A program that writes these headers while the tests are built: what the planners give to the tests' cases. Its
# arguments are their paths, in this order. A header whose text stays the same is not written anew.
function(planned_headers program source)
  add_executable(${program} ${source})
  target_link_libraries(${program} PRIVATE tessera_cases)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${program}_text)
  foreach(header ${ARGN})
    list(APPEND headers ${folder}/${header})
    list(APPEND written ${folder}/new/${header})
    list(APPEND copies COMMAND ${CMAKE_COMMAND} -E copy_if_different ${folder}/new/${header} ${folder}/${header})
  endforeach()
  add_custom_command(OUTPUT ${headers} COMMAND ${CMAKE_COMMAND} -E make_directory ${folder}/new
                     COMMAND ${program} ${written} ${copies} DEPENDS ${program})
endfunction()

# The compiler tells of every access to memory, as it does for ThreadSanitizer, whose place races.cpp takes.
function(look_for_races target)
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS
                              "-fsanitize=thread;--param=tsan-instrument-func-entry-exit=0;-g1")
  set_source_files_properties(emulated/races.cpp emulated/clocks.cpp PROPERTIES COMPILE_OPTIONS -O3)
  target_sources(${target} PRIVATE emulated/races.cpp emulated/clocks.cpp)
  target_compile_definitions(${target} PRIVATE TESSERA_RACES)
  set_target_properties(${target} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)
endfunction()

# The programs that `make races` runs.
add_custom_target(emulated_tests)

# emulated_test(NAME name SOURCES files... [SHARDS n] [HEADER header PLANNED_BY program])
# A tessera_test whose kernels see the emulated instructions before the real ones.
function(emulated_test)
  cmake_parse_arguments(test "" "NAME;SHARDS;HEADER;PLANNED_BY" "SOURCES" ${ARGN})
  if(test_HEADER)
    set(folder ${CMAKE_CURRENT_BINARY_DIR}/${test_PLANNED_BY}_text)
    list(APPEND test_SOURCES ${folder}/${test_HEADER})
  endif()
  tessera_test(NAME ${test_NAME} SHARDS ${test_SHARDS} SOURCES ${test_SOURCES} LABELS emulated)
  target_include_directories(${test_NAME} PRIVATE ${folder})
  target_include_directories(${test_NAME} BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
  # Device code says `#pragma unroll`, leaves out members that are 0, has empty bodies where a GPU lacks something, and
  # compares the numbers of threads, which are unsigned, with others.
  target_compile_options(${test_NAME} PRIVATE -Wno-unknown-pragmas -Wno-missing-field-initializers
                         -Wno-unused-parameter -Wno-sign-compare)
  add_dependencies(emulated_tests ${test_NAME})
  if(TESSERA_RACES)
    look_for_races(${test_NAME} ${test_SOURCES})
  endif()
endfunction()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT TESSERA_SANITIZE)
  foreach(test races_test races_blocks_test)
    emulated_test(NAME ${test} SOURCES unit/${test}.cpp)
    if(NOT TESSERA_RACES)
      look_for_races(${test} unit/${test}.cpp)
    endif()
  endforeach()
elseif(TESSERA_RACES)
  message(FATAL_ERROR "TESSERA_RACES needs g++, and no other sanitizer")
endif()
