// SPDX-License-Identifier: Apache-2.0
// The JIT without a GPU: hashes, the disk cache, packs, NVRTC's reports. What the kernels compile to is the gate's.
// Links tessera_static; what needs NVRTC is skipped, visibly, where there is none.
// Implements docs/architecture.md, "Compiling kernels".
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "api/units.hpp"
#include "core/failure.hpp"
#include "cuda/jit/cache.hpp"
#include "cuda/jit/pack.hpp"
#include "cuda/jit/sha256.hpp"
#include "cuda/jit/source.hpp"
#include "tests/support/nvrtc.hpp"

namespace tessera::cuda {
extern const char* const embedded_sources[];  // generated; see source.cpp

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

// --- packs

const Pack two_kernels{{std::string(64, 'a'), {"sm_80", "first", "f32 D=64", bytes("cubin\0with zero")}},
                       {std::string(64, 'b'), {"sm_90a", "second", "", {}}}};

TEST(Packs, ReadsWhatItWrote) {
  EXPECT_EQ(read_pack(write_pack(two_kernels)), two_kernels);
  EXPECT_EQ(read_pack(write_pack({})), Pack{});
}

TEST(Packs, DamageIsAnError) {
  const std::string good = write_pack(two_kernels);
  std::string flipped = good;
  flipped[good.size() / 2] ^= 1;
  for (const std::string& bad : {std::string(), std::string("no pack"), good.substr(0, 20),
                                 good.substr(0, good.size() - 1), good + "x", flipped})
    EXPECT_THROW(read_pack(bad), Failure);
}

TEST_F(Jit, PackFilesAreWholeOrRefusedByName) {
  const std::string file = (folder / "some.pack").string();
  write_pack_file(file, two_kernels);
  EXPECT_EQ(read_pack_file(file), two_kernels);
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  for (const std::string& name : {file, (folder / "none.pack").string()}) {
    try {
      read_pack_file(name);
      FAIL() << "was read";
    } catch (const Failure& failure) {
      EXPECT_NE(std::string(failure.what()).find(name), std::string::npos) << failure.what();
    }
  }
  EXPECT_THROW(write_pack_file((folder / "no" / "such" / "folder").string(), two_kernels), Failure);
}

const NamedUnit tiny{"tiny", "plain", {"extern \"C\" __global__ void tiny(int* out) { *out = 1; }", "sm_80"}};

TEST(Packs, KeepWhatIsStillRightAndCompileTheRest) {
  REQUIRE_NVRTC();
  NamedUnit other = tiny;
  other.unit.text += "// differs\n";
  std::vector<std::string> compiled;
  const auto note = [&](const NamedUnit& unit, const Compiled&) { compiled.push_back(unit.unit.text); };
  const Pack first = make_pack({tiny}, two_kernels, 2, note);
  EXPECT_EQ(compiled, std::vector{tiny.unit.text});
  const Pack second = make_pack({tiny, other, tiny}, first, 2, note);
  EXPECT_EQ(compiled, (std::vector{tiny.unit.text, other.unit.text}));
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(second.at(unit_key(tiny.unit)), first.at(unit_key(tiny.unit)));
  EXPECT_EQ(make_pack({tiny, other}, second, 2, note), second);
  EXPECT_EQ(compiled.size(), 2u);
}

Unit common_unit() {
  return api::plain_units(target_named(api::common_architecture), api::common_types, api::common_dims)[0].unit;
}

#define REQUIRE_EMBEDDED_PACK() \
  if (embedded_pack().empty() || read_pack(embedded_pack()).empty()) GTEST_SKIP() << "this library has no pack"

TEST(Packs, TheLibraryHoldsTheCommonKernels) {
  REQUIRE_EMBEDDED_PACK();
  EXPECT_EQ(find_in_packs(unit_key(common_unit())), read_pack(embedded_pack()).at(unit_key(common_unit())).cubin);
  Unit another = common_unit();
  another.text += "// one more line\n";
  EXPECT_FALSE(find_in_packs(unit_key(another)));
  EXPECT_NE(packs_summary().find(" kernels for sm_90a in the library"), std::string::npos) << packs_summary();
  EXPECT_NE(packs_text().find("f32 D=64"), std::string::npos) << packs_text();
}

// What depends on the environment is read once per process: these tests ask in a process of their own.
class NewProcess : public Jit {
 protected:
  void SetUp() override {
    Jit::SetUp();
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  void expect_in_new_process(const std::function<bool()>& is_good) {
    const auto ask = [&] {
      const bool good = is_good();
      std::filesystem::remove_all(folder);
      std::exit(good ? 0 : 1);
    };
    EXPECT_EXIT(ask(), testing::ExitedWithCode(0), "");
  }
  bool sentence_holds(const Unit& unit, const std::vector<std::string>& words) {
    try {
      find_cubin(unit);
      return false;
    } catch (const Failure& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
      for (const std::string& word : words)
        if (std::string(failure.what()).find(word) == std::string::npos) return false;
      return true;
    }
  }
};

TEST_F(NewProcess, WithoutNvrtcPackedKernelsAreFound) {
  REQUIRE_EMBEDDED_PACK();
  expect_in_new_process([&] {
    setenv("TESSERA_NVRTC", "/no/libnvrtc.so", 1);
    return find_cubin(common_unit()) == read_pack(embedded_pack()).at(unit_key(common_unit())).cubin;
  });
}

TEST_F(NewProcess, WithoutNvrtcOtherKernelsAreRefusedWithWhatThereIs) {
  REQUIRE_EMBEDDED_PACK();
  expect_in_new_process([&] {
    setenv("TESSERA_NVRTC", "/no/libnvrtc.so", 1);
    return sentence_holds(tiny.unit, {"NVRTC is missing", "set TESSERA_NVRTC", "for sm_90a", "f32 D=64"});
  });
}

TEST_F(NewProcess, APackFileServesToo) {
  expect_in_new_process([&] {
    write_pack_file((folder / "my.pack").string(),
                    {{unit_key(tiny.unit), {"sm_80", "tiny", "plain", bytes("a cubin")}}});
    setenv("TESSERA_NVRTC", "/no/libnvrtc.so", 1);
    setenv("TESSERA_PACK", (folder / "my.pack").c_str(), 1);
    return find_cubin(tiny.unit) == bytes("a cubin");
  });
}

TEST_F(NewProcess, ADamagedPackFileIsAnErrorThatNamesIt) {
  expect_in_new_process([&] {
    std::ofstream(folder / "my.pack") << "not a pack";
    setenv("TESSERA_PACK", (folder / "my.pack").c_str(), 1);
    return sentence_holds(tiny.unit, {(folder / "my.pack").string(), "not a pack of kernels"});
  });
}

// --- keys

TEST(Keys, DependOnUnitAndArchitecture) {
  EXPECT_NE(unit_key({"a", "sm_80"}), unit_key({"b", "sm_80"}));
  EXPECT_NE(unit_key({"a", "sm_80"}), unit_key({"a", "sm_90a"}));
}

TEST(Keys, CoverIncludedFilesAndTheirIncludes) {
  const auto reads = [](const std::string& name) {
    for (const SourceFile* file : sources_read_by("#include \"gpu/kernel/delta.cuh\"\n"))
      if (file->name == name) return true;
    return false;
  };
  EXPECT_TRUE(reads("gpu/kernel/delta.cuh"));
  EXPECT_TRUE(reads("math/types.hpp"));
  EXPECT_FALSE(reads("ladder/kernel/naive_forward.cuh"));
}

// Writes the device code into a folder, with one more line in one file, and lets this process read it there.
void edit_device_code(const path& folder, const std::string& edited) {
  for (const char* const* p = embedded_sources; *p; p += 2) {
    create_directories((folder / p[0]).parent_path());
    std::ofstream(folder / p[0]) << p[1] << (p[0] == edited ? "// one more line\n" : "");
  }
  setenv("TESSERA_DEVICE_SOURCE", folder.c_str(), 1);
}

TEST_F(NewProcess, EditedTextIsNotServedFromThePack) {
  REQUIRE_EMBEDDED_PACK();
  expect_in_new_process([&] {
    edit_device_code(folder, "math/types.hpp");
    return !find_in_packs(unit_key(common_unit()));
  });
}

TEST_F(NewProcess, EditingAnotherKernelChangesNothing) {
  REQUIRE_EMBEDDED_PACK();
  expect_in_new_process([&] {
    edit_device_code(folder, "ladder/kernel/naive_forward.cuh");
    return find_in_packs(unit_key(common_unit())).has_value();
  });
}

// --- the compiler

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

TEST(Compile, ErrorsCarryTheLog) {
  REQUIRE_NVRTC();
  try {
    compile({"__global__ void broken() { undeclared(); }", "sm_80"});
    FAIL() << "compiled";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("undeclared"), std::string::npos) << failure.what();
  }
}

}  // namespace
}  // namespace tessera::cuda
