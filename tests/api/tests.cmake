# SPDX-License-Identifier: Apache-2.0
# Tests of the library as its callers meet it. Included by tests/CMakeLists.txt, which defines tessera_test.
tessera_test(NAME check_test SOURCES api/check_test.cpp)
tessera_test(NAME append_check_test SOURCES api/append_check_test.cpp)
tessera_test(NAME abi_test SOURCES api/abi_test.cpp LABELS threads)
tessera_test(NAME dlpack_test SOURCES api/dlpack_test.cpp)
tessera_test(NAME plan_test SOURCES api/plan_test.cpp)
tessera_test(NAME limits_test SOURCES api/limits_test.cpp)
tessera_test(NAME fault_test SOURCES api/fault_test.cpp support/faults.cpp SHARDS 4)
target_compile_definitions(fault_test PRIVATE TESSERA_SHARED_LIBRARY="$<TARGET_FILE:tessera>")
add_dependencies(fault_test tessera)
tessera_test(NAME fork_test SOURCES api/fork_test.cpp support/faults.cpp)

# The shared library alone, from C99: whatever is not exported does not link.
foreach(test c_api_test append_c_test)
  add_executable(${test} api/${test}.c)
  target_compile_options(${test} PRIVATE -pedantic)
  target_link_libraries(${test} PRIVATE tessera Threads::Threads m)
  add_test(NAME ${test} COMMAND ${test})
  set_tests_properties(${test} PROPERTIES TIMEOUT ${test_timeout})
endforeach()
add_dependencies(threaded_tests c_api_test)
set_tests_properties(c_api_test PROPERTIES LABELS threads)

# From C99 as well, and compiled alone: what the header says is all there is to it.
add_executable(layout_test api/layout_test.c)
target_include_directories(layout_test PRIVATE ${PROJECT_SOURCE_DIR}/include)
add_test(NAME layout_test COMMAND layout_test)
set_tests_properties(layout_test PROPERTIES TIMEOUT ${test_timeout} SKIP_RETURN_CODE 77)
