// SPDX-License-Identifier: Apache-2.0
// Kernels on the way from the compiler through the disk cache, while system calls fail: a call always gets its kernel.
// Links the fake NVRTC (tests/fake) and the failing calls (tests/support/failing_calls.c).
// Implements docs/architecture.md, "Compiling kernels".
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "api/units.hpp"
#include "cuda/jit/cache.hpp"
#include "tests/fake/compiler.hpp"
#include "tests/fake/environment.hpp"
#include "tests/support/failing_calls.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class CachedKernels : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::canonical(fs::temp_directory_path()) / "tessera_cache_XXXXXX");
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
    setenv("TESSERA_CACHE", (folder / "made" / "cache").c_str(), 1);
  }
  void TearDown() override {
    failing_calls_order("", 0, 0, "");
    fs::remove_all(folder);
  }
  std::size_t compilations_of(const std::function<void()>& work) const {
    const auto count = [] {
      std::size_t found = 0;
      for (const char* call : fake::compiler().calls) found += std::string(call) == "nvrtcCompileProgram";
      return found;
    };
    const std::size_t before = count();
    work();
    return count() - before;
  }
  const Unit unit =
      api::plain_units(target_named(api::common_architecture), api::common_types, api::common_dims)[0].unit;
  fs::path folder;
};

TEST_F(CachedKernels, AreCompiledOnce) {
  std::vector<char> first, second;
  EXPECT_EQ(compilations_of([&] { first = find_cubin(unit); }), 1u);
  EXPECT_EQ(compilations_of([&] { second = find_cubin(unit); }), 0u);
  EXPECT_FALSE(first.empty());
  EXPECT_EQ(first, second);
}

TEST_F(CachedKernels, ComeWhateverFails) {
  const std::vector<char> expected = find_cubin(unit);
  for (const char* kind : {"open", "write", "short", "fsync", "close", "rename", "mkdir"}) {
    int failures = 0;
    for (int n = 1;; ++n, ++failures) {
      fs::remove_all(folder / "made");
      failing_calls_order(kind, n, n % 2 ? ENOSPC : EIO, folder.c_str());
      EXPECT_EQ(find_cubin(unit), expected) << kind << " " << n;
      const bool happened = failing_calls_happened();
      failing_calls_order("", 0, 0, "");
      std::error_code none;
      for (const auto& entry : fs::directory_iterator(folder / "made" / "cache", none))
        EXPECT_EQ(entry.path().extension(), ".cubin") << kind << " " << n;
      EXPECT_EQ(find_cubin(unit), expected) << kind << " " << n;
      EXPECT_EQ(compilations_of([&] { find_cubin(unit); }), 0u) << kind << " " << n;
      if (!happened) break;
    }
    EXPECT_GT(failures, 0) << kind;
  }
}

}  // namespace
}  // namespace tessera::cuda
