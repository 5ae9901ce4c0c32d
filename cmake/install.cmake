# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` gives: libtessera.so, the headers, a CMake package, a pkg-config file and the program; and
# libtessera_mpi.so, with its header and files, where there was an MPI.
# Included by the root CMakeLists.txt after the targets exist. See examples/ for the users' side.
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)

install(TARGETS tessera EXPORT tessera-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp" PATTERN "mpi.h" EXCLUDE)
# What `make install` builds first.
add_custom_target(tessera_product DEPENDS tessera)
if(TARGET tessera_cli)
  install(TARGETS tessera_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  add_dependencies(tessera_product tessera_cli)
endif()
# Component mpi of the package.
if(TARGET tessera_mpi)
  install(TARGETS tessera_mpi EXPORT tessera-mpi-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(FILES ${PROJECT_SOURCE_DIR}/include/tessera/mpi.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera)
  install(EXPORT tessera-mpi-targets NAMESPACE tessera:: DESTINATION ${package_folder})
  add_dependencies(tessera_product tessera_mpi)
endif()

install(EXPORT tessera-targets NAMESPACE tessera:: DESTINATION ${package_folder})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tessera-config.cmake.in
                              ${PROJECT_BINARY_DIR}/tessera-config.cmake INSTALL_DESTINATION ${package_folder})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tessera-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tessera-config.cmake ${PROJECT_BINARY_DIR}/tessera-config-version.cmake
        DESTINATION ${package_folder})

# pkg-config finds the prefix from where the file lies, so that an installed tree can be moved.
file(RELATIVE_PATH prefix_from_pkgconfig /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/tessera.pc.in ${PROJECT_BINARY_DIR}/tessera.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(TARGET tessera_mpi)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/tessera_mpi.pc.in ${PROJECT_BINARY_DIR}/tessera_mpi.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/tessera_mpi.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
