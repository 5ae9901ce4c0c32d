// The JIT without a GPU: hashes, the disk cache, packs, NVRTC's reports, and that the ladder's units compile.
// Links tessera_static; what needs NVRTC is skipped, visibly, where there is none.
// Implements docs/architecture.md, "Compiling kernels".
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/failure.hpp"
#include "cuda/jit/cache.hpp"
#include "cuda/jit/nvrtc.hpp"
#include "cuda/jit/pack.hpp"
#include "cuda/jit/sha256.hpp"
#include "simt/unit.hpp"

namespace tessera::cuda {
namespace {

using std::filesystem::path;

std::vector<char> bytes(const std::string& text) { return {text.begin(), text.end()}; }

// A folder of its own for each test, gone afterwards.
class Jit : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "tessera_jit_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  path folder;
};

TEST(Sha256, StandardVectors) {
  EXPECT_EQ(Sha256().hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256().add("abc").hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256().add("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").hex(),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256().add(std::string(1000000, 'a')).hex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, FieldsDoNotRunTogether) {
  EXPECT_NE(Sha256().add_field("ab").add_field("c").hex(), Sha256().add_field("a").add_field("bc").hex());
}

TEST_F(Jit, DiskCacheReturnsWhatWasWritten) {
  const DiskCache cache((folder / "made" / "on" / "demand").string());
  EXPECT_FALSE(cache.read("key"));
  cache.write("key", bytes("cubin\0with zero"));
  EXPECT_EQ(cache.read("key"), bytes("cubin\0with zero"));
  EXPECT_FALSE(cache.read("another"));
}

TEST_F(Jit, DamagedEntriesCountAsMissing) {
  const DiskCache cache((folder / "cache").string());
  cache.write("key", bytes("a cubin"));
  const path file = folder / "cache" / "key.cubin";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  EXPECT_FALSE(cache.read("key"));
  std::ofstream(file, std::ios::binary) << "short";
  EXPECT_FALSE(cache.read("key"));
  cache.write("key", bytes("a cubin"));  // and are rebuilt
  EXPECT_EQ(cache.read("key"), bytes("a cubin"));
}

TEST_F(Jit, FoldersThatOthersCanEnterAreNotUsed) {
  const DiskCache cache((folder / "cache").string());
  cache.write("key", bytes("a cubin"));
  ASSERT_EQ(chmod((folder / "cache").c_str(), 0755), 0);
  EXPECT_FALSE(cache.read("key"));
  cache.write("other", bytes("a cubin"));
  EXPECT_FALSE(std::filesystem::exists(folder / "cache" / "other.cubin"));
}

TEST_F(Jit, UnusableFoldersAreNotAnError) {
  std::ofstream(folder / "file") << "not a folder";
  for (const std::string& place : {(folder / "file").string(), std::string("/proc/tessera"), std::string()}) {
    const DiskCache cache(place);
    cache.write("key", bytes("a cubin"));
    EXPECT_FALSE(cache.read("key"));
  }
}

TEST_F(Jit, WritersAtOnceLeaveOneWholeEntry) {
  const DiskCache cache((folder / "cache").string());
  const std::vector<char> content = bytes(std::string(200000, 'x'));
  std::vector<std::thread> writers;
  for (int n = 0; n < 8; ++n)
    writers.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        cache.write("key", content);
        const auto read = cache.read("key");
        EXPECT_EQ(read, content);
      }
    });
  for (std::thread& writer : writers) writer.join();
  const std::filesystem::directory_iterator entries(folder / "cache");
  EXPECT_EQ(std::distance(begin(entries), end(entries)), 1);  // no temporary file is left
}

TEST(Pack, ReadsWhatItWrote) {
  const Pack pack{{std::string(64, 'a'), bytes("first")}, {std::string(64, 'b'), {}}};
  EXPECT_EQ(read_pack(write_pack(pack)), pack);
}

TEST(Pack, DamageIsAnError) {
  const std::string good = write_pack({{std::string(64, 'a'), bytes("content")}});
  for (const std::string& bad : {std::string(), std::string("no pack"), good.substr(0, good.size() - 1), good + "x"})
    EXPECT_THROW(read_pack(bad), Failure);
}

TEST(Resources, AreReadFromPtxas) {
  const Resources r = read_resources(
      "ptxas .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
      "ptxas info    : Used 255 registers, used 1 barriers, 2048 bytes smem\n");
  EXPECT_EQ(r.registers, 255);
  EXPECT_EQ(r.stack_bytes, 16);
  EXPECT_EQ(r.spill_bytes, 20);
  EXPECT_EQ(r.shared_bytes, 2048);
  EXPECT_FALSE(r.serialised_wgmma);
  EXPECT_TRUE(read_resources("Potential Performance Loss: wgmma.mma_async (C7510)").serialised_wgmma);
}

#define REQUIRE_NVRTC() \
  if (!find_nvrtc().nvrtc) GTEST_SKIP() << find_nvrtc().reason

TEST(Compile, ErrorsCarryTheLog) {
  REQUIRE_NVRTC();
  try {
    compile({"__global__ void broken() { undeclared(); }", "sm_80"});
    FAIL() << "compiled";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("undeclared"), std::string::npos) << failure.what();
  }
}

TEST(Compile, KeysDependOnUnitAndArchitecture) {
  EXPECT_NE(unit_key({"a", "sm_80"}), unit_key({"b", "sm_80"}));
  EXPECT_NE(unit_key({"a", "sm_80"}), unit_key({"a", "sm_90a"}));
}

// Every kernel of the ladder, in a plain and in a full configuration.
struct UnitCase {
  simt::Function function;
  simt::Config config;
  bool may_spill;
};

std::vector<UnitCase> ladder() {
  using simt::Config, simt::Element;
  const auto with_tile = [](Config c, int rows) {
    c.threads = 256, c.block_rows = 16 * rows, c.block_cols = 64, c.rows_per_thread = rows, c.wide_loads = true;
    return c;
  };
  std::vector<UnitCase> units;
  const Config plain{};
  Config full{.D = 40, .Dv = 24, .element = Element::bf16, .o = Element::bf16, .d_o = Element::f16};
  full.softcap = full.alibi = full.mask = full.dropout = true, full.bias = Element::f32;
  for (const Config& c : {plain, full}) {
    units.push_back({{"simt/kernel/naive_forward.cuh", "naive_forward", "ForwardParams"}, c, true});
    units.push_back({{"simt/kernel/naive_backward.cuh", "naive_backward_queries", "BackwardParams"}, c, true});
    units.push_back({{"simt/kernel/naive_backward.cuh", "naive_backward_keys", "BackwardParams"}, c, true});
    units.push_back({{"simt/kernel/delta.cuh", "delta", "BackwardParams"}, c, false});
    units.push_back({{"simt/kernel/clear.cuh", "clear", "BackwardParams"}, c, false});
    units.push_back({{"simt/kernel/sink_gradient.cuh", "sink_gradient", "BackwardParams"}, c, false});
    units.push_back({{"simt/kernel/vector_forward.cuh", "vector_forward", "ForwardParams"},
                     with_tile(c, c.softcap ? 4 : 8),
                     false});
    units.push_back(
        {{"simt/kernel/vector_backward.cuh", "vector_backward_queries", "BackwardParams"}, with_tile(c, 4), false});
    units.push_back(
        {{"simt/kernel/vector_backward.cuh", "vector_backward_keys", "BackwardParams"}, with_tile(c, 4), false});
  }
  return units;
}

TEST(Compile, LadderForEachArchitecture) {
  REQUIRE_NVRTC();
  for (const char* architecture : {"sm_80", "sm_90a"})
    for (const UnitCase& unit : ladder()) {
      const std::string text = simt::unit_text(unit.function, unit.config);
      SCOPED_TRACE(std::string(architecture) + "\n" + text);
      const Compiled compiled = compile({text, architecture});
      EXPECT_FALSE(compiled.cubin.empty());
      if (!unit.may_spill) {
        EXPECT_EQ(compiled.resources.spill_bytes, 0);
      }
    }
}

}  // namespace
}  // namespace tessera::cuda
