// SPDX-License-Identifier: Apache-2.0
// The disk cache and the readers of packs and device code, against files that are no files, races with others, killed
// writers, and a system that fails: a cache that cannot serve is a miss, a pack that cannot be read is a sentence.
// Implements docs/architecture.md, "Compiling kernels" and "Environment variables".
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "core/failure.hpp"
#include "cuda/jit/cache.hpp"
#include "cuda/jit/pack.hpp"
#include "cuda/jit/sha256.hpp"
#include "cuda/jit/source.hpp"
#include "tessera/tessera.h"
#include "tests/support/failing_calls.h"

namespace tessera::cuda {
namespace {

using std::filesystem::path;

std::vector<char> bytes(const std::string& text) { return {text.begin(), text.end()}; }

// A folder of its own for each test, gone afterwards, with a cache in it.
class Cache : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::canonical(std::filesystem::temp_directory_path()) / "tessera_cache_XXXXXX");
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
    cache_path = folder / "parent" / "cache";
  }
  void TearDown() override {
    failing_calls_order("", 0, 0, "");
    std::filesystem::remove_all(folder);
  }
  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(cache_path)) found.insert(entry.path().filename());
    return found;
  }
  path folder, cache_path;
  const std::vector<char> older = bytes("an older cubin"), newer = bytes(std::string(100000, 'x'));
};

TEST_F(Cache, EntriesThatAreNoRegularFilesCountAsMissing) {
  const DiskCache cache(cache_path.string());
  cache.write("good", newer);
  ASSERT_EQ(cache.read("good"), newer);
  std::filesystem::create_directory(cache_path / "folder.cubin");
  ASSERT_EQ(mkfifo((cache_path / "fifo.cubin").c_str(), 0600), 0);
  std::filesystem::create_symlink("good.cubin", cache_path / "link.cubin");
  std::filesystem::create_symlink("link.cubin", cache_path / "nothing.cubin");
  std::ofstream(cache_path / "huge.cubin") << std::string(64, '0') << "\n";
  std::filesystem::resize_file(cache_path / "huge.cubin", std::uintmax_t{1} << 40);
  for (const char* key : {"folder", "fifo", "link", "nothing", "huge"}) EXPECT_FALSE(cache.read(key)) << key;

  // All but the folder give way to an entry; nothing stays of the attempt that failed.
  const std::set<std::string> before = names();
  for (const char* key : {"folder", "fifo", "link", "nothing", "huge"}) cache.write(key, older);
  EXPECT_FALSE(cache.read("folder"));
  for (const char* key : {"fifo", "link", "nothing", "huge"}) EXPECT_EQ(cache.read(key), older) << key;
  EXPECT_EQ(cache.read("good"), newer);  // a link is replaced, not followed
  EXPECT_EQ(names(), before);
}

TEST_F(Cache, EntriesThatOthersCanWriteCountAsMissing) {
  const DiskCache cache(cache_path.string());
  cache.write("key", newer);
  ASSERT_EQ(chmod((cache_path / "key.cubin").c_str(), 0622), 0);
  EXPECT_FALSE(cache.read("key"));
}

TEST_F(Cache, FoldersBehindLinksAreNotUsed) {
  const DiskCache cache(cache_path.string());
  cache.write("key", newer);
  std::filesystem::create_symlink(cache_path, folder / "link");
  EXPECT_FALSE(DiskCache((folder / "link").string()).read("key"));
}

// Somebody who can write the folder's parent puts his own folder there, with an entry of the right hash, at the moment
// between the check of the folder and the use of its entry.
path swapped;
void swap_parents() {
  std::filesystem::rename(swapped / "parent", swapped / "gone");
  std::filesystem::rename(swapped / "hostile", swapped / "parent");
}

TEST_F(Cache, AFolderThatIsSwappedAfterItsCheckIsNotRead) {
  DiskCache((folder / "hostile" / "cache").string()).write("key", bytes("hostile"));
  const DiskCache cache(cache_path.string());
  cache.write("key", newer);
  swapped = folder;
  failing_calls_order("open", 2, 0, folder.c_str());  // 1: the folder, 2: its entry
  failing_calls_meanwhile(swap_parents);
  EXPECT_EQ(cache.read("key"), newer);
  EXPECT_TRUE(failing_calls_happened());
  EXPECT_EQ(cache.read("key"), bytes("hostile"));  // from now on that is the folder
}

TEST_F(Cache, LeftoversOfKilledWritersAreRemovedByTheirAge) {
  const DiskCache cache(cache_path.string());
  cache.write("old", older);
  const auto now = std::filesystem::last_write_time(cache_path / "old.cubin");
  const auto leave = [&](const char* name, std::chrono::minutes age) {
    std::ofstream(cache_path / name) << "half";
    std::filesystem::last_write_time(cache_path / name, now - age);
  };
  leave("old.cubin.123.0", std::chrono::minutes(90));
  leave("young.cubin.124.0", std::chrono::minutes(30));
  leave("somebody's", std::chrono::minutes(90));
  std::filesystem::last_write_time(cache_path / "old.cubin", now - std::chrono::minutes(90));
  cache.write("new", newer);
  EXPECT_EQ(names(), (std::set<std::string>{"new.cubin", "old.cubin", "somebody's", "young.cubin.124.0"}));
}

// Every system call of a kind fails in turn, until there are no more: what is read afterwards is one entry or the
// other, whole, and nothing else lies in the folder.
TEST_F(Cache, AFailingSystemLeavesWholeEntriesAndNothingElse) {
  const DiskCache cache(cache_path.string());
  for (const char* kind : {"open", "write", "short", "fsync", "close", "rename"}) {
    int failures = 0;
    for (const int error : {ENOSPC, EIO})
      for (int n = 1;; ++n, ++failures) {
        cache.write("key", older);
        failing_calls_order(kind, n, error, folder.c_str());
        cache.write("key", newer);
        const bool happened = failing_calls_happened();
        failing_calls_order("", 0, 0, "");
        const auto read = cache.read("key");
        EXPECT_TRUE(read == older || read == newer) << kind << " " << n;
        EXPECT_EQ(names(), std::set<std::string>{"key.cubin"}) << kind << " " << n;
        if (!happened) {
          EXPECT_EQ(read, newer);
          break;
        }
      }
    EXPECT_GT(failures, 0) << kind;
  }
}

TEST_F(Cache, AFailingReadIsAMiss) {
  const DiskCache cache(cache_path.string());
  cache.write("key", newer);
  for (int n = 1; n <= 2; ++n) {
    failing_calls_order("open", n, EIO, folder.c_str());
    EXPECT_FALSE(cache.read("key"));
    EXPECT_TRUE(failing_calls_happened());
  }
}

TEST_F(Cache, AFolderThatCannotBeMadeIsNoError) {
  failing_calls_order("mkdir", 2, ENOSPC, folder.c_str());
  DiskCache(cache_path.string()).write("key", newer);
  EXPECT_TRUE(failing_calls_happened());
  EXPECT_FALSE(DiskCache(cache_path.string()).read("key"));
}

// --- packs

std::string refusal_of(const path& file) {
  try {
    read_pack_file(file.string());
    return "";
  } catch (const Failure& failure) {
    return failure.what();
  }
}

// A pack with a body of our choice and the hash that belongs to it.
std::string pack_of(const std::string& body) { return "TESSERA PACK 1\n" + Sha256().add(body).hex() + body; }

class PackFiles : public Cache {
 protected:
  void expect_refusal(const std::string& content, const std::string& what) {
    std::ofstream(folder / "my.pack", std::ios::binary) << content;
    EXPECT_EQ(refusal_of(folder / "my.pack"),
              "pack " + (folder / "my.pack").string() + ": this is not a pack of kernels, or it is damaged")
        << what;
  }
};

TEST_F(PackFiles, ThatAreNoRegularFilesAreRefusedByName) {
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  std::ofstream(folder / "huge") << "TESSERA PACK 1\n";
  std::filesystem::resize_file(folder / "huge", std::uintmax_t{1} << 40);
  const auto expect = [&](const path& file, const std::string& reason) {
    EXPECT_EQ(refusal_of(file), "pack " + file.string() + ": cannot be read: " + reason);
  };
  expect(folder, "it is a folder");
  expect(folder / "fifo", "it is not a regular file");
  expect("/dev/null", "it is not a regular file");
  expect(folder / "huge", "it is larger than 1 GiB");
  expect(folder / "missing", "No such file or directory");
}

TEST_F(PackFiles, OfAnyLengthButTheRightOneAreRefused) {
  const std::string good = write_pack({{std::string(64, 'a'), {"sm_80", "first", "f32 D=64", bytes("cubin")}}});
  for (std::size_t length = 0; length < good.size(); ++length) expect_refusal(good.substr(0, length), "cut");
  // Cut inside, with the right hash: the reader itself must notice.
  const std::string body = good.substr(15 + 64);
  for (std::size_t length = 1; length < body.size(); ++length) expect_refusal(pack_of(body.substr(0, length)), "body");
}

TEST_F(PackFiles, WithSenselessCountsAreRefused) {
  for (const char* digits :
       {"ffffffffffffffff", "7fffffffffffffff", "8000000000000000", "0000000100000000", "-000000000000001",
        "+000000000000001", " 000000000000001", "0x00000000000001", "000000000000000g", "                "})
    expect_refusal(pack_of(digits + std::string(500, 'k')), digits);
}

TEST_F(PackFiles, WithOneKeyTwiceAreRefused) {
  const std::string one = write_pack({{"key", {"sm_80", "first", "", bytes("cubin")}}}).substr(15 + 64);
  EXPECT_EQ(read_pack(pack_of(one)).size(), 1u);
  expect_refusal(pack_of(one + one), "twice");
}

// --- through the C ABI; the environment is read once per process, so each asks in a process of its own

class NewProcess : public Cache {
 protected:
  void expect_in_new_process(const char* variable, const char* value, const std::function<bool()>& is_good) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto ask = [&] {
      setenv(variable, value, 1);
      const bool good = is_good();
      std::filesystem::remove_all(folder);
      std::exit(good ? 0 : 1);
    };
    EXPECT_EXIT(ask(), testing::ExitedWithCode(0), "");
  }
};

TEST_F(NewProcess, InfoTellsOfAPackThatIsAFolder) {
  expect_in_new_process("TESSERA_PACK", "/etc", [] {
    const std::string info = tessera_info();
    std::fprintf(stderr, "%s", info.c_str());
    return info.find("packed     pack /etc: cannot be read: it is a folder\n") != std::string::npos &&
           info.find("\ncache ") != std::string::npos;
  });
}

TEST_F(NewProcess, DeviceTextThatIsAFolderIsASentence) {
  std::filesystem::create_directories(folder / "math" / "types.hpp");
  expect_in_new_process("TESSERA_DEVICE_SOURCE", folder.c_str(), [] {
    try {
      device_sources();
      return false;
    } catch (const Failure& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
      return std::string(failure.what()).find("cannot be read: it is a folder; see TESSERA_DEVICE_SOURCE") !=
             std::string::npos;
    }
  });
}

}  // namespace
}  // namespace tessera::cuda
