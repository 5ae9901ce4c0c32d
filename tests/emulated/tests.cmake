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

# emulated_test(NAME name SOURCES files... [SHARDS n] [HEADER header PLANNED_BY program])
# A tessera_test whose kernels see the emulated instructions before the real ones.
function(emulated_test)
  cmake_parse_arguments(test "" "NAME;SHARDS;HEADER;PLANNED_BY" "SOURCES" ${ARGN})
  if(test_HEADER)
    set(folder ${CMAKE_CURRENT_BINARY_DIR}/${test_PLANNED_BY}_text)
    list(APPEND test_SOURCES ${folder}/${test_HEADER})
  endif()
  tessera_test(NAME ${test_NAME} SHARDS ${test_SHARDS} SOURCES ${test_SOURCES})
  target_include_directories(${test_NAME} PRIVATE ${folder})
  target_include_directories(${test_NAME} BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
  # Device code says `#pragma unroll`, leaves out members that are 0, and has empty bodies where a GPU lacks something.
  target_compile_options(${test_NAME} PRIVATE -Wno-unknown-pragmas -Wno-missing-field-initializers
                         -Wno-unused-parameter)
endfunction()
