// SPDX-License-Identifier: Apache-2.0
// A driver without a function that the library needs: calls on a GPU are refused with its name, all others work.
// Links tessera_cases and a fake libcuda of an older age. Implements docs/gpu_kernels.md, "Without a GPU, without
// NVRTC".
#include "tests/support/support.hpp"

extern "C" int cuInit(unsigned flags);

namespace tessera::test {
namespace {

TEST(FakeOldDriver, IsRefusedByTheNameOfWhatIsMissing) {
  ASSERT_EQ(cuInit(0), 0);  // the fake one is linked, and so it is the one that is found
  const Tensor t{nullptr, Type::f32, {1, 128, 2, 64}, {DeviceType::cuda, 0}};
  try {
    Plan::forward({.q = t, .k = t, .v = t}, {.o = t, .lse = {}});
    ADD_FAILURE() << "it was planned";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TESSERA_UNSUPPORTED);
    EXPECT_NE(std::string(error.what())
                  .find("the NVIDIA driver is too old: it has no cuLibraryLoadData; CUDA 12 or later is needed"),
              std::string::npos)
        << error.what();
  }
  const Tensor here{nullptr, Type::f32, {1, 128, 2, 64}};
  EXPECT_NO_THROW(Plan::forward({.q = here, .k = here, .v = here}, {.o = here, .lse = {}}));
}

}  // namespace
}  // namespace tessera::test
