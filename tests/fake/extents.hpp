// SPDX-License-Identifier: Apache-2.0
// What the launches of one call address, from their parameters alone: every pointer with the sizes and strides beside
// it must stay inside the tensor or the part of the workspace that it stands for. Included by tests/fake.
// Implements docs/testing.md.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "decode/params.hpp"
#include "mma/one_pass_config.hpp"
#include "mma/params.hpp"
#include "sm90/params.hpp"
#include "tessera/types.hpp"
#include "tests/fake/machine.hpp"

namespace tessera::test {

template <class... Parts>
inline std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

struct Extent {
  std::uintptr_t begin = 0, end = 0;
  bool empty() const { return begin == end; }
  bool holds(const Extent& other) const { return begin <= other.begin && other.end <= end; }
  bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
  bool operator==(const Extent&) const = default;
};

// `count` places, `stride` elements apart.
struct Axis {
  std::int64_t count, stride;
};
Extent extent_of(const void* data, std::int64_t element_bytes, std::initializer_list<Axis> axes);
Extent extent_of(const Tensor& tensor);

// One call as its caller sees it.
enum class FakePass { forward, backward };
struct FakeCall {
  FakePass pass = FakePass::forward;
  Inputs in{};
  Outputs out{};      // of a forward pass
  Saved saved{};      // of a backward pass
  Gradients grads{};  // likewise
  Options options{};
  Execution execution{};

  bool packed() const { return bool(in.cu_seqlens_q); }
  bool paged() const { return in.block_table || in.page_indices; }
  Extent workspace() const {
    const auto begin = reinterpret_cast<std::uintptr_t>(execution.workspace);
    return {begin, begin + execution.workspace_bytes};
  }
};

class Addressed {
 public:
  explicit Addressed(const FakeCall& call) : call(call) {}

  void check(const fake::Launch& launch);

  const std::vector<std::string>& faults() const { return found; }
  // How far into the workspace the launches reach.
  std::uintptr_t workspace_end() const { return furthest; }

 private:
  void fault(const std::string& what);
  void tensor(const char* name, const void* data, const Extent& addressed, const Tensor& of);
  void tokens(const char* name, const gpu::TokenRef& ref, const Tensor& of, std::int64_t B, std::int64_t N,
              std::int64_t H);
  void rows(const char* name, const gpu::RowRef& ref, const Tensor& of, const gpu::Question& x);
  void pairs(const char* name, const gpu::PairRef& ref, const Tensor& of, const gpu::Question& x);
  void lengths(const char* name, const gpu::LengthRef& ref, const Tensor& of, std::int64_t count);
  void map(const char* name, const sm90::TensorMap& map, const Tensor& of);

  // Parts of the workspace lie apart, and every launch means the same by the same name.
  void part(const char* name, const void* data, std::int64_t bytes);
  // A launch sets so many times 16 bytes of it to 0; a part that is counted or added to begins there.
  void cleared(const void* zero, std::int64_t chunks);
  void begins_at_zero(const char* name);

  void question(const gpu::Question& x);
  void forward(const gpu::ForwardParams& p);
  void states(const gpu::States& s, const gpu::Question& x);
  void backward(const gpu::BackwardParams& p);
  void mma_forward(const mma::ForwardParams& p);
  void mma_paged(const mma::PagedParams& p);
  void mma_backward(const mma::BackwardParams& p);
  template <class Params>
  void mma_grid(const Params& p, std::int64_t tiles_per_head, std::int64_t heads_of_rows);
  void mma_sums(const mma::OnePassMemory& memory, const gpu::BackwardParams& p, const mma::QuerySums& sums,
                bool ordered);
  void mma_one_pass(const mma::OnePassParams& p);
  void pool(const char* name, const gpu::TokenRef& ref, const gpu::PageTable& table, const Tensor& of,
            const Tensor& of_table);
  void scale(const char* name, const gpu::ScaleRef& ref, const Tensor& of, const Tensor& keys, const gpu::Question& x,
             Int64 group = 0);
  void pages(const gpu::PageTables& p, const gpu::Question& x, const gpu::LengthBounds& most);
  void decode(const decode::Params& p);
  void hopper_forward(const sm90::ForwardParams& p);
  void hopper_paged(const sm90::PagedParams& p);
  void hopper_backward(const sm90::BackwardParams& p);
  void one_pass(const sm90::OnePassMemory& memory, const gpu::BackwardParams& p);

  // Tiles of so many queries, of one head in all sequences.
  std::int64_t tiles_of(const gpu::Question& x, std::int64_t queries) const;
  // A number of the configuration in the kernel's unit.
  int setting(const char* name) const;
  bool is_set(const char* name) const;

  const FakeCall& call;
  const fake::Launch* launch = nullptr;
  std::map<std::string, Extent> parts;
  Extent zeros;  // what an earlier launch has set to 0
  std::vector<std::string> found;
  std::uintptr_t furthest = 0;
};

}  // namespace tessera::test
