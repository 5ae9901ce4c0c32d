# SPDX-License-Identifier: Apache-2.0
# The page docs/tiles beside the library. Included by tests/CMakeLists.txt. What needs a browser runs by `make site-test`.
if(TARGET tessera_cli)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  add_test(NAME numbers_test COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/numbers_test.py
           $<TARGET_FILE:tessera_cli>)
  set_tests_properties(numbers_test PROPERTIES TIMEOUT ${test_timeout} SKIP_RETURN_CODE 77)
endif()
