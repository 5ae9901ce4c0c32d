# Tests of the `mma` kernels without a GPU: layouts, plans, and their own text on an emulated machine (tests/emulated).
# Included by tests/CMakeLists.txt, which defines tessera_test.
tessera_test(NAME mma_test SOURCES mma/mma_test.cpp)

add_executable(mma_units mma/units_main.cpp)
target_link_libraries(mma_units PRIVATE tessera_cases)
set(mma_folder ${CMAKE_CURRENT_BINARY_DIR}/mma_units_text)
add_custom_command(OUTPUT ${mma_folder}/mma_units.hpp ${mma_folder}/mma_backward_units.hpp
  COMMAND ${CMAKE_COMMAND} -E make_directory ${mma_folder}
  COMMAND mma_units ${mma_folder}/new.hpp ${mma_folder}/new_backward.hpp
  COMMAND ${CMAKE_COMMAND} -E copy_if_different ${mma_folder}/new.hpp ${mma_folder}/mma_units.hpp
  COMMAND ${CMAKE_COMMAND} -E copy_if_different ${mma_folder}/new_backward.hpp ${mma_folder}/mma_backward_units.hpp
  DEPENDS mma_units)
tessera_test(NAME mma_machine_test SHARDS 2 SOURCES mma/mma_machine_test.cpp ${mma_folder}/mma_units.hpp)
tessera_test(NAME mma_backward_test SHARDS 2 SOURCES mma/mma_backward_test.cpp ${mma_folder}/mma_backward_units.hpp)
foreach(test mma_machine_test mma_backward_test)
  target_include_directories(${test} PRIVATE ${mma_folder})
  target_include_directories(${test} BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
  # Device code says `#pragma unroll`, and leaves out members that are 0.
  target_compile_options(${test} PRIVATE -Wno-unknown-pragmas -Wno-missing-field-initializers -O1)
  set_target_properties(${test} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)
endforeach()
