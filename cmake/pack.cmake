# SPDX-License-Identifier: Apache-2.0
# Gives the target tessera_pack: the pack of common GPU kernels, compiled by NVRTC while the library is built, or an
# empty one. Included by src/CMakeLists.txt, which has defined tessera_objects and tessera_packing. See
# docs/architecture.md, "Compiling kernels".
option(TESSERA_PACK "Compile common GPU kernels at build time, where NVRTC is found, and put them into the library" ON)
set(TESSERA_PACK_ARCHITECTURES "sm_90a" CACHE STRING "The GPUs for which they are compiled, e.g. sm_80;sm_89;sm_90a")

add_library(tessera_pack OBJECT)
target_include_directories(tessera_pack PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
# The packer must run here, and fast.
if(NOT TESSERA_PACK OR CMAKE_CROSSCOMPILING OR TESSERA_SANITIZE)
  target_sources(tessera_pack PRIVATE cuda/jit/no_pack.cpp)
  return()
endif()

add_executable(tessera_packer api/packer.cpp cuda/jit/no_pack.cpp)
target_link_libraries(tessera_packer PRIVATE tessera_objects tessera_packing)

# The pack is a by-product: when the packer finds nothing to change it stays as it is, and nothing is built again.
set(pack_file ${CMAKE_CURRENT_BINARY_DIR}/common.pack)
add_custom_command(
  OUTPUT ${pack_file}.stamp BYPRODUCTS ${pack_file}
  DEPENDS tessera_packer
  COMMAND tessera_packer ${pack_file} ${TESSERA_PACK_ARCHITECTURES}
  COMMAND ${CMAKE_COMMAND} -E touch ${pack_file}.stamp
  COMMENT "Packing GPU kernels" VERBATIM)
target_sources(tessera_pack PRIVATE cuda/jit/embedded_pack.cpp ${pack_file}.stamp)
set_source_files_properties(cuda/jit/embedded_pack.cpp PROPERTIES
  COMPILE_DEFINITIONS "TESSERA_PACK_FILE=\"${pack_file}\"" OBJECT_DEPENDS ${pack_file})
