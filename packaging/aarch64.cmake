# SPDX-License-Identifier: Apache-2.0
# A CMake toolchain: builds for 64-bit ARM with Debian's cross compiler (g++-aarch64-linux-gnu), and runs what was built
# by qemu-user: cmake -DCMAKE_TOOLCHAIN_FILE=packaging/aarch64.cmake, then ctest. docs/python.md, "Wheels".
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
