# Tests of the Hopper kernels without a GPU: layouts, barriers, and their own text on an emulated machine
# (tests/emulated). Included by tests/CMakeLists.txt, which defines tessera_test.
tessera_test(NAME sm90_test SOURCES sm90/sm90_test.cpp)
tessera_test(NAME sm90_order_test SOURCES sm90/sm90_order_test.cpp)
tessera_test(NAME sm90_protocol_test SOURCES sm90/sm90_protocol_test.cpp)
tessera_test(NAME sm90_backward_protocol_test SOURCES sm90/sm90_backward_protocol_test.cpp)

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
  SOURCES sm90/sm90_machine_test.cpp ${tiles_folder}/hopper_tiles.hpp)
tessera_test(NAME sm90_backward_test SHARDS 2
  SOURCES sm90/sm90_backward_test.cpp ${tiles_folder}/hopper_backward_tiles.hpp)
tessera_test(NAME sm90_one_pass_test SHARDS 2 SOURCES sm90/sm90_one_pass_test.cpp)
foreach(test sm90_machine_test sm90_backward_test sm90_one_pass_test)
  target_include_directories(${test} PRIVATE ${tiles_folder})
  target_include_directories(${test} BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
  # Device code says `#pragma unroll`, and leaves out members that are 0.
  target_compile_options(${test} PRIVATE -Wno-unknown-pragmas -Wno-missing-field-initializers)
endforeach()
