# SPDX-License-Identifier: Apache-2.0
# Tests of the Vulkan kernels, on the first Vulkan device that there is, with the validation layers on: what they
# complain about fails the test. Without a driver they are skipped, visibly (tests/vulkan/support.hpp).
# Included by tests/CMakeLists.txt, which defines tessera_test. See docs/testing.md.
tessera_test(NAME vulkan_cases_test SOURCES vulkan/vulkan_cases_test.cpp SHARDS 2 LABELS vulkan)
if(TESSERA_HAS_VULKAN)
  set(rules_spirv ${CMAKE_CURRENT_BINARY_DIR}/generated/vulkan/rules_test.spv.hpp)
  file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/generated/vulkan)
  add_custom_command(
    OUTPUT ${rules_spirv}
    COMMAND ${GLSLANG_VALIDATOR} --quiet -V --target-env vulkan1.2 -I${TESSERA_VULKAN_GENERATED}
            -I${PROJECT_SOURCE_DIR}/src/vulkan/kernel --vn rules_test_spv -o ${rules_spirv}
            ${CMAKE_CURRENT_SOURCE_DIR}/vulkan/rules.comp
    DEPENDS vulkan/rules.comp ${PROJECT_SOURCE_DIR}/src/vulkan/kernel/common.glsl tessera_objects
    VERBATIM)
  tessera_test(NAME vulkan_rules_test SOURCES vulkan/vulkan_rules_test.cpp ${rules_spirv} LABELS vulkan)
  target_include_directories(vulkan_rules_test PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/generated)
  tessera_test(NAME vulkan_compile_test SOURCES vulkan/vulkan_compile_test.cpp LABELS vulkan)
  tessera_test(NAME vulkan_calls_test SOURCES vulkan/vulkan_calls_test.cpp LABELS vulkan)
  tessera_test(NAME vulkan_tiles_test SOURCES vulkan/vulkan_tiles_test.cpp LABELS vulkan)
  # vk_matrix without cooperative matrices: the same kernels with matrices of the tests' own.
  set(emulated_folder ${CMAKE_CURRENT_BINARY_DIR}/generated/emulated/vulkan)
  file(MAKE_DIRECTORY ${emulated_folder})
  set(emulated)
  file(GLOB vulkan_texts CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/vulkan/kernel/*.glsl)
  foreach(kernel matrix_forward matrix_backward)
    add_custom_command(
      OUTPUT ${emulated_folder}/${kernel}.spv.hpp
      COMMAND ${GLSLANG_VALIDATOR} --quiet -V --target-env vulkan1.2 -DEMULATED_MATRICES
              -I${TESSERA_VULKAN_GENERATED} -I${CMAKE_CURRENT_SOURCE_DIR}/vulkan
              -I${PROJECT_SOURCE_DIR}/src/vulkan/kernel --vn ${kernel}_spv -o ${emulated_folder}/${kernel}.spv.hpp
              ${PROJECT_SOURCE_DIR}/src/vulkan/kernel/${kernel}.comp
      DEPENDS vulkan/emulated_matrices.glsl ${PROJECT_SOURCE_DIR}/src/vulkan/kernel/${kernel}.comp ${vulkan_texts}
              tessera_objects
      VERBATIM)
    list(APPEND emulated ${emulated_folder}/${kernel}.spv.hpp)
  endforeach()
  tessera_test(NAME vulkan_matrix_test SOURCES vulkan/vulkan_matrix_test.cpp ${emulated} LABELS vulkan)
  target_include_directories(vulkan_matrix_test PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/generated/emulated)
  # A libvulkan.so.1 that computes nothing: what fails, and what is left behind then.
  add_library(fake_vulkan SHARED vulkan/fake_vulkan.cpp)
  target_include_directories(fake_vulkan PRIVATE ${PROJECT_SOURCE_DIR})
  set_target_properties(fake_vulkan PROPERTIES OUTPUT_NAME vulkan SOVERSION 1
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/fake_vulkan)
  tessera_test(NAME vulkan_faults_test SOURCES vulkan/vulkan_faults_test.cpp LIBRARIES fake_vulkan
               ENVIRONMENT TESSERA_CACHE= LABELS vulkan)
  add_test(NAME vulkan_msl_test
           COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/vulkan/msl_test.sh ${TESSERA_VULKAN_GENERATED})
  set_tests_properties(vulkan_msl_test PROPERTIES LABELS vulkan SKIP_RETURN_CODE 77 TIMEOUT 100)
endif()

get_property(all_tests DIRECTORY PROPERTY TESTS)
list(FILTER all_tests INCLUDE REGEX "^vulkan_(cases|calls|tiles|rules|matrix|compile)")
set_property(TEST ${all_tests} APPEND PROPERTY ENVIRONMENT "TESSERA_CACHE=${PROJECT_BINARY_DIR}/vulkan_pipelines"
             "VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation")
if(TESSERA_SANITIZE MATCHES "address")  # lavapipe keeps some memory of its own for good
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/vulkan_driver_leaks "leak:libvulkan_lvp.so\n")
  set_property(TEST ${all_tests} APPEND PROPERTY ENVIRONMENT
               "LSAN_OPTIONS=suppressions=${CMAKE_CURRENT_BINARY_DIR}/vulkan_driver_leaks")
endif()
set_property(TEST ${all_tests} PROPERTY FAIL_REGULAR_EXPRESSION "VUID-;Validation Error")
