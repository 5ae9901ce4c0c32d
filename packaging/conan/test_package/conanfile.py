# SPDX-License-Identifier: Apache-2.0
"""What `conan create` runs at its end: the C++ example, built against the package and run."""
from pathlib import Path

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class TesseraTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "VirtualRunEnv"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # nothing is written into the tree
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=Path(self.recipe_folder).parents[2] / "examples" / "cpp")
        cmake.build()

    def test(self):
        if can_run(self):
            self.run(str(Path(self.build_folder) / "attention"), env="conanrun")
