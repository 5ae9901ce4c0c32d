# SPDX-License-Identifier: Apache-2.0
# Tests of the programs in bench/ and of the tables that are made of their figures. Included by tests/CMakeLists.txt.
# Python cannot load a library that needs a sanitizer.
if(NOT TESSERA_SANITIZE)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  foreach(name bench_test decode_peers_test)
    add_test(NAME ${name} COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/${name}.py $<TARGET_FILE:tessera>)
    set_tests_properties(${name} PROPERTIES TIMEOUT ${test_timeout})
  endforeach()
endif()
