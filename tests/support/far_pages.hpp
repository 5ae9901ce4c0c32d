// SPDX-License-Identifier: Apache-2.0
// The pages of a paged case so far apart that 32 bits do not count the elements between them: what is wrong with a
// kernel's arithmetic of addresses leads to where nothing may be read. Included by the tests of kernels over pages.
#pragma once

#include <sys/mman.h>

#include "tests/support/pages.hpp"

namespace tessera::test {

// Takes the place of the case's pools as long as it lives. Of the address space that a pool fills, only its pages have
// memory.
class FarPages {
 public:
  // So many elements from each page to the next one, which lies below it if they are fewer than 0.
  FarPages(PagedCase& paged, std::int64_t distance) : pools{Pool(paged.in.k, distance), Pool(paged.in.v, distance)} {}

 private:
  class Pool {
   public:
    Pool(Tensor& pool, std::int64_t distance) : bytes(reserved(pool, distance)) {
      memory =
          static_cast<std::byte*>(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (memory == MAP_FAILED) throw std::runtime_error("no room for a large pool");
      const std::int64_t pages = pool.shape[0], size = tessera::size_of(pool.type), step = distance * size;
      std::byte* const first = memory + (step < 0 ? (1 - pages) * step : 0);
      for (std::int64_t page = 0; page < pages; ++page) {
        std::byte* const to = first + page * step;
        std::byte* const begin = to - reinterpret_cast<std::uintptr_t>(to) % 4096;
        const std::int64_t page_bytes = page_elements(pool) * size;
        if (mprotect(begin, static_cast<std::size_t>(to + page_bytes - begin), PROT_READ | PROT_WRITE) != 0)
          throw std::runtime_error("no memory for a page");
        for (std::int64_t row = 0; row < pool.shape[1]; ++row)
          for (std::int64_t head = 0; head < pool.shape[2]; ++head) {
            const std::int64_t at = (row * pool.strides[1] + head * pool.strides[2]) * size;
            std::memcpy(to + at, static_cast<std::byte*>(pool.data) + page * pool.strides[0] * size + at,
                        static_cast<std::size_t>(pool.shape[3] * size));
          }
      }
      pool.data = first, pool.strides[0] = distance;
    }
    ~Pool() { munmap(memory, bytes); }
    Pool(const Pool&) = delete;

   private:
    // From its first element to the one behind its last.
    static std::int64_t page_elements(const Tensor& pool) {
      return (pool.shape[1] - 1) * pool.strides[1] + (pool.shape[2] - 1) * pool.strides[2] + pool.shape[3];
    }
    static std::size_t reserved(const Tensor& pool, std::int64_t distance) {
      return static_cast<std::size_t>(((pool.shape[0] - 1) * std::abs(distance) + page_elements(pool)) *
                                      tessera::size_of(pool.type));
    }

    std::byte* memory;
    std::size_t bytes;
  };

  Pool pools[2];
};

// More than 32 bits count; rows are still aligned.
inline constexpr std::int64_t far_apart = (std::int64_t{1} << 32) + 64;

}  // namespace tessera::test
