# Tests of the parts and of the tree itself: units, the C ABI, symbols, include directions.
# Included by tests/CMakeLists.txt, which defines tessera_test.
# See docs/architecture.md, "Tests".
tessera_test(NAME check_test SOURCES check_test.cpp)
tessera_test(NAME abi_test SOURCES abi_test.cpp LABELS threads)
tessera_test(NAME types_test SOURCES types_test.cpp)
tessera_test(NAME philox_test SOURCES philox_test.cpp)
tessera_test(NAME parallel_test SOURCES parallel_test.cpp LABELS threads)
tessera_test(NAME openmp_test SOURCES openmp_test.cpp $<TARGET_OBJECTS:parallel_test> faults.cpp)
tessera_test(NAME fault_test SOURCES fault_test.cpp faults.cpp SHARDS 4)
target_compile_definitions(fault_test PRIVATE TESSERA_SHARED_LIBRARY="$<TARGET_FILE:tessera>")
add_dependencies(fault_test tessera)
tessera_test(NAME fork_test SOURCES fork_test.cpp faults.cpp)
tessera_test(NAME plan_test SOURCES plan_test.cpp)
tessera_test(NAME limits_test SOURCES limits_test.cpp)
tessera_test(NAME places_test SOURCES places_test.cpp)
tessera_test(NAME simd_test SOURCES simd_test.cpp)
tessera_test(NAME jit_test SOURCES jit_test.cpp)
tessera_test(NAME cache_test SOURCES cache_test.cpp failing_calls.c)
tessera_test(NAME sm90_test SOURCES sm90_test.cpp)
tessera_test(NAME sm90_protocol_test SOURCES sm90_protocol_test.cpp)
tessera_test(NAME sm90_backward_protocol_test SOURCES sm90_backward_protocol_test.cpp)

# The tiles with which these tests specialise the kernels are those that the planner gives to their cases.
add_executable(hopper_tiles emulated/tiles_main.cpp)
target_link_libraries(hopper_tiles PRIVATE tessera_cases)
set(tiles_folder ${CMAKE_CURRENT_BINARY_DIR}/hopper_tiles_text)
add_custom_command(OUTPUT ${tiles_folder}/hopper_tiles.hpp ${tiles_folder}/hopper_backward_tiles.hpp
  COMMAND ${CMAKE_COMMAND} -E make_directory ${tiles_folder}
  COMMAND hopper_tiles ${tiles_folder}/new.hpp ${tiles_folder}/new_backward.hpp
  COMMAND ${CMAKE_COMMAND} -E copy_if_different ${tiles_folder}/new.hpp ${tiles_folder}/hopper_tiles.hpp
  COMMAND ${CMAKE_COMMAND} -E copy_if_different ${tiles_folder}/new_backward.hpp
          ${tiles_folder}/hopper_backward_tiles.hpp
  DEPENDS hopper_tiles)
tessera_test(NAME sm90_machine_test SHARDS 2
  SOURCES sm90_machine_test.cpp ${tiles_folder}/hopper_tiles.hpp)
tessera_test(NAME sm90_backward_test SHARDS 2
  SOURCES sm90_backward_test.cpp ${tiles_folder}/hopper_backward_tiles.hpp)
tessera_test(NAME sm90_one_pass_test SHARDS 2 SOURCES sm90_one_pass_test.cpp)
foreach(test sm90_machine_test sm90_backward_test sm90_one_pass_test)
  target_include_directories(${test} PRIVATE ${tiles_folder})
  target_include_directories(${test} BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
  # Device text says `#pragma unroll`, and leaves out members that are 0.
  target_compile_options(${test} PRIVATE -Wno-unknown-pragmas -Wno-missing-field-initializers -O2)
  set_target_properties(${test} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)  # of another level of optimisation
endforeach()

# Headers of src/math stand alone, and so does their test.
add_executable(mask_test mask_test.cpp)
target_include_directories(mask_test PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(mask_test PRIVATE test_main)
add_test(NAME mask_test COMMAND mask_test --gtest_brief=1)

# The shared library alone, from C99: whatever is not exported does not link.
add_executable(c_api_test c_api_test.c)
target_compile_options(c_api_test PRIVATE -pedantic)
target_link_libraries(c_api_test PRIVATE tessera Threads::Threads m)
add_test(NAME c_api_test COMMAND c_api_test)
set_tests_properties(c_api_test PROPERTIES TIMEOUT 600 LABELS threads)

find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME tree_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/tree_test.py ${CMAKE_CXX_COMPILER})
set_tests_properties(tree_test PROPERTIES TIMEOUT 600)

# Sanitizers add weak symbols of their own.
if(NOT TESSERA_SANITIZE)
  add_test(NAME weak_symbols COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/weak_symbols.sh ${CMAKE_NM}
                                     $<TARGET_OBJECTS:tessera_objects> COMMAND_EXPAND_LISTS)
  add_test(NAME static_objects COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/static_objects.sh ${CMAKE_NM}
                                       $<TARGET_OBJECTS:tessera_objects> COMMAND_EXPAND_LISTS)
endif()
