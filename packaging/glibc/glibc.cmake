# SPDX-License-Identifier: Apache-2.0
# Links libtessera.so so that it runs with glibc TESSERA_GLIBC and later, whatever this system has: for wheels.
# Included by src/CMakeLists.txt after the target exists. docs/python.md, "Wheels", says why it is done this way.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(glibc_stubs ${CMAKE_CURRENT_BINARY_DIR}/glibc-${TESSERA_GLIBC})
execute_process(COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/stubs.py
                        ${CMAKE_C_COMPILER} ${TESSERA_GLIBC} ${glibc_stubs}
                COMMAND_ERROR_IS_FATAL ANY)
target_sources(tessera PRIVATE ${CMAKE_CURRENT_LIST_DIR}/shims.c)
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/shims.c PROPERTIES COMPILE_OPTIONS
  "-std=gnu99;-fvisibility=hidden")
target_link_options(tessera PRIVATE -L${glibc_stubs})
