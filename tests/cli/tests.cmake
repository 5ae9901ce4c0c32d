# SPDX-License-Identifier: Apache-2.0
# Tests of the command line. Included by tests/CMakeLists.txt.
if(TARGET tessera_cli)
  tessera_test(NAME npy_test SOURCES cli/npy_test.cpp LIBRARIES tessera_cli_parts)
  tessera_test(NAME turns_test SOURCES cli/turns_test.cpp)
  tessera_test(NAME json_test SOURCES cli/json_test.cpp LIBRARIES tessera_cli_parts)

  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  foreach(group Run Errors Commands Terminal)
    add_test(NAME cli_test.${group}
             COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_test.py $<TARGET_FILE:tessera_cli> ${group})
    set_tests_properties(cli_test.${group} PROPERTIES
      ENVIRONMENT "TESSERA_SANITIZE=${TESSERA_SANITIZE}" TIMEOUT ${test_timeout})
  endforeach()

  foreach(group Gpu Without Places)
    add_test(NAME cli_device_test.${group}
             COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_device_test.py $<TARGET_FILE:tessera_cli>
                     $<TARGET_FILE:fake_driver> $<TARGET_FILE:fake_compiler> ${group})
    set_tests_properties(cli_device_test.${group} PROPERTIES
      ENVIRONMENT "TESSERA_SANITIZE=${TESSERA_SANITIZE}" TIMEOUT ${test_timeout} SKIP_RETURN_CODE 77)
  endforeach()
  if(TESSERA_HAS_VULKAN)
    foreach(group Vulkan WithoutVulkan)
      add_test(NAME cli_device_test.${group}
               COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_device_test.py $<TARGET_FILE:tessera_cli>
                       $<TARGET_FILE:fake_driver> $<TARGET_FILE:fake_compiler> ${group})
      set_tests_properties(cli_device_test.${group} PROPERTIES
        ENVIRONMENT "TESSERA_CACHE=${PROJECT_BINARY_DIR}/vulkan_pipelines" TIMEOUT ${test_timeout} LABELS vulkan
        SKIP_RETURN_CODE 77)
    endforeach()
  endif()

  add_test(NAME cli_dist_test
           COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_dist_test.py $<TARGET_FILE:tessera_cli>)
  set_tests_properties(cli_dist_test PROPERTIES TIMEOUT ${test_timeout} LABELS dist)

  # A sanitizer's library would have to be loaded before the failing calls, and not into a privileged program.
  add_library(failing_calls MODULE support/failing_calls.c)
  target_compile_options(failing_calls PRIVATE -fvisibility=default)
  set(file_groups Places Printing)
  if(NOT TESSERA_SANITIZE)
    list(APPEND file_groups Privileges Faults Kills)
    add_library(failing_memory MODULE cli/failing_memory.c)
    target_compile_options(failing_memory PRIVATE -fvisibility=default)
    target_link_libraries(failing_memory PRIVATE ${CMAKE_DL_LIBS})
    add_test(NAME cli_memory_test
             COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_memory_test.py $<TARGET_FILE:tessera_cli>
                     $<TARGET_FILE:failing_memory>)
    set_tests_properties(cli_memory_test PROPERTIES TIMEOUT ${test_timeout})
  endif()
  foreach(group ${file_groups})
    add_test(NAME cli_files_test.${group}
             COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_files_test.py $<TARGET_FILE:tessera_cli>
                     $<TARGET_FILE:failing_calls> ${group})
    set_tests_properties(cli_files_test.${group} PROPERTIES TIMEOUT ${test_timeout} SKIP_RETURN_CODE 77)
  endforeach()
endif()
