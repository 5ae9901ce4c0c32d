# SPDX-License-Identifier: Apache-2.0
# Tests of the tree, of what was built from it and of the tests themselves. Included by tests/CMakeLists.txt.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME tree_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/tree_test.py ${CMAKE_CXX_COMPILER})
set_tests_properties(tree_test PROPERTIES TIMEOUT ${test_timeout})

# Sanitizers add weak symbols of their own.
if(NOT TESSERA_SANITIZE)
  add_test(NAME weak_symbols COMMAND ${CMAKE_CURRENT_LIST_DIR}/weak_symbols.sh ${CMAKE_NM}
                                     $<TARGET_OBJECTS:tessera_objects> COMMAND_EXPAND_LISTS)
  add_test(NAME static_objects COMMAND ${CMAKE_CURRENT_LIST_DIR}/static_objects.sh ${CMAKE_NM}
                                       $<TARGET_OBJECTS:tessera_objects> COMMAND_EXPAND_LISTS)
endif()

# A sanitizer's run-time library would have to be linked into the examples too.
if(TARGET tessera_cli AND NOT TESSERA_SANITIZE)
  add_test(NAME install_test
           COMMAND ${CMAKE_CURRENT_LIST_DIR}/install_test.sh ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR})
  set_tests_properties(install_test PROPERTIES TIMEOUT ${test_timeout}
    ENVIRONMENT "CC=${CMAKE_C_COMPILER};CXX=${CMAKE_CXX_COMPILER}")
endif()

if(NOT TESSERA_SANITIZE)
  add_test(NAME glibc_test
           COMMAND ${CMAKE_CURRENT_LIST_DIR}/glibc_test.sh ${PROJECT_SOURCE_DIR} $<TARGET_OBJECTS:tessera_objects>
                   $<TARGET_OBJECTS:tessera_pack> COMMAND_EXPAND_LISTS)
  set_tests_properties(glibc_test PROPERTIES TIMEOUT ${test_timeout}
    ENVIRONMENT "CC=${CMAKE_C_COMPILER};CXX=${CMAKE_CXX_COMPILER}")
endif()

if(CMAKE_GENERATOR STREQUAL "Ninja")
  add_test(NAME subproject_test COMMAND ${CMAKE_CURRENT_LIST_DIR}/subproject_test.sh ${PROJECT_SOURCE_DIR})
  set_tests_properties(subproject_test PROPERTIES TIMEOUT ${test_timeout}
    ENVIRONMENT "CC=${CMAKE_C_COMPILER};CXX=${CMAKE_CXX_COMPILER}")
endif()

if(TARGET amx_invariance_test)
  set(amx_program $<TARGET_FILE:amx_invariance_test>)
endif()
add_test(NAME main_test COMMAND ${CMAKE_CURRENT_LIST_DIR}/main_test.sh $<TARGET_FILE:plan_test> ${amx_program})
add_test(NAME mutants_test COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_LIST_DIR}/mutants_test.py)
add_test(NAME gpu_tests_test COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_LIST_DIR}/gpu_tests_test.py)
