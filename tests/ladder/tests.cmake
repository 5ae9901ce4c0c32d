# Tests of the ladder without a GPU: its own text on an emulated machine (tests/emulated). Included by
# tests/CMakeLists.txt, which defines tessera_test.
add_executable(ladder_units ladder/units_main.cpp)
target_link_libraries(ladder_units PRIVATE tessera_cases)
set(units_folder ${CMAKE_CURRENT_BINARY_DIR}/ladder_units_text)
add_custom_command(OUTPUT ${units_folder}/ladder_units.hpp
  COMMAND ${CMAKE_COMMAND} -E make_directory ${units_folder}
  COMMAND ladder_units ${units_folder}/new.hpp
  COMMAND ${CMAKE_COMMAND} -E copy_if_different ${units_folder}/new.hpp ${units_folder}/ladder_units.hpp
  DEPENDS ladder_units)
tessera_test(NAME ladder_test SOURCES ladder/ladder_test.cpp ${units_folder}/ladder_units.hpp)
target_include_directories(ladder_test PRIVATE ${units_folder})
target_include_directories(ladder_test BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
# Device code says `#pragma unroll`, and leaves out members that are 0.
target_compile_options(ladder_test PRIVATE -Wno-unknown-pragmas -Wno-missing-field-initializers -O1)
set_target_properties(ladder_test PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)
