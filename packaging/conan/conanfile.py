# SPDX-License-Identifier: Apache-2.0
"""Tessera for Conan 2, from this tree: `conan create packaging/conan`. docs/packages.md says more.

The library is always shared. Only C leaves it and the C++ runtime is inside, so that one binary serves every compiler.
"""
import re
from pathlib import Path

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy


class Tessera(ConanFile):
    name = "tessera"
    description = "Exact attention, forward and backward, on CPUs and NVIDIA GPUs"
    license = "Apache-2.0"
    topics = ("attention", "transformer", "flash-attention", "cuda", "deterministic")
    package_type = "shared-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {
        "tool": [True, False],  # the program `tessera`
        "pack": [True, False],  # common GPU kernels compiled ahead of time, where NVRTC is found
        "system": [True, False],  # the headers of Highway and CLI11 are the system's, not Conan's
    }
    default_options = {"tool": False, "pack": True, "system": False}

    @property
    def _tree(self):
        return Path(self.recipe_folder).parent.parent

    def set_version(self):
        text = (self._tree / "CMakeLists.txt").read_text()
        self.version = re.search(r"project\(tessera VERSION (\S+)", text)[1]

    def export_sources(self):
        for pattern in ["CMakeLists.txt", "LICENSE", *(f"{folder}/*" for folder in (
                "cmake", "include", "src", "cases", "cli", "bench", "tools/pictures"))]:
            copy(self, pattern, self._tree, self.export_sources_folder)

    def requirements(self):
        if not self.options.system:
            self.requires("highway/[>=1.0.3 <2]", visible=False, libs=False)
            if self.options.tool:
                self.requires("cli11/[>=2.3 <3]", visible=False, libs=False)

    def validate(self):
        if self.settings.os != "Linux" or self.settings.arch not in ("x86_64", "armv8"):
            raise ConanInvalidConfiguration("Tessera is for Linux on x86-64 and 64-bit ARM")

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for name, value in [("TESSERA_TESTS", False), ("TESSERA_MPI", False),
                            ("TESSERA_CLI", bool(self.options.tool)), ("TESSERA_PACK", bool(self.options.pack))]:
            toolchain.cache_variables[name] = value
        if not self.options.system:
            toolchain.cache_variables["TESSERA_HIGHWAY"] = self.dependencies["highway"].cpp_info.includedir
            if self.options.tool:
                toolchain.extra_cxxflags.append(f"-isystem {self.dependencies['cli11'].cpp_info.includedir}")
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build(target="tessera")
        if self.options.tool:
            cmake.build(target="tessera_cli")

    def package(self):
        copy(self, "LICENSE", self.source_folder, Path(self.package_folder) / "licenses")
        CMake(self).install()

    def package_id(self):
        del self.info.settings.compiler

    def package_info(self):
        # The library's own package for CMake says all that there is to say.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/tessera"]
        self.cpp_info.set_property("pkg_config_name", "tessera")
        self.cpp_info.libs = ["tessera"]
