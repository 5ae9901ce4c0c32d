// SPDX-License-Identifier: Apache-2.0
// The plain structs of Tessera's C++ API: what a call takes. No functions of the library are declared here.
// Included by tessera.hpp for users and by src/core for the library itself, so that both mean the same.
// What the fields mean: docs/algorithm.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace tessera {

// e4m3 and i8 are for K and V alone. e4m3 is the one without infinities (OCP's, e4m3fn): largest 448, NaN 0x7f, 0xff.
enum class Type : std::int32_t { f64 = 0, f32, f16, bf16, e4m3, e5m2, i32, i64, u8, i8 };

// DLPack's codes; `any` means: wherever the tensors are.
enum class DeviceType : std::int32_t { any = 0, cpu = 1, cuda = 2, vulkan = 7 };

// Where a tensor lies, or a call runs.
struct Device {
  DeviceType type = DeviceType::cpu;
  std::int32_t id = 0;
  bool operator==(const Device&) const = default;
};

// A non-owning view. Strides count elements; that of a dimension of size 1 is never read.
// A default-constructed Tensor (ndim == 0) means: not given.
struct Tensor {
  void* data = nullptr;
  Type type = Type::f32;
  std::int32_t ndim = 0;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> strides{};
  Device device;

  Tensor() = default;

  // A contiguous view, last dimension fastest.
  Tensor(void* memory, Type element, std::initializer_list<std::int64_t> sizes, Device where = {}) :
      data(memory), type(element), device(where) {
    for (std::int64_t size : sizes) {
      if (ndim < 4) shape[static_cast<std::size_t>(ndim)] = size;
      ++ndim;  // the call refuses more than 4; they must not be dropped here
    }
    std::int64_t stride = 1;
    for (std::size_t i = ndim <= 4 ? static_cast<std::size_t>(ndim) : 0; i-- > 0;) {
      strides[i] = stride;
      stride = product(stride, shape[i]);
    }
  }

  explicit operator bool() const { return ndim != 0; }

  // A view of the same memory with two dimensions swapped: transposed(1, 2) turns [B,H,N,D] into [B,N,H,D].
  Tensor transposed(int a, int b) const {
    Tensor t = *this;
    const auto x = static_cast<std::size_t>(a), y = static_cast<std::size_t>(b);
    t.shape[x] = shape[y], t.shape[y] = shape[x];
    t.strides[x] = strides[y], t.strides[y] = strides[x];
    return t;
  }

  std::int64_t elements() const {
    std::int64_t n = ndim == 0 ? 0 : 1;
    for (int i = 0; i < ndim && i < 4; ++i) n = product(n, shape[static_cast<std::size_t>(i)]);
    return n;
  }

 private:
  // Saturates on overflow to the largest number, which the call refuses.
  static std::int64_t product(std::int64_t a, std::int64_t b) {
    std::int64_t result = 0;
    return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<std::int64_t>::max() : result;
  }
};

// The state of a forward pass between calls, one row of o and one m and l per query and head; docs/algorithm.md,
// "Carried state".
struct State {
  Tensor o{};  // [B,Nq,Hq,Dv] or [Tq,Hq,Dv], f32: relative to 2^m and not divided yet
  Tensor m{};  // [B,Hq,Nq] or [Hq,Tq], f32: -inf where a row has seen no key
  Tensor l{};  // the same shape, f64
  explicit operator bool() const { return o || m || l; }
};

// Padded: q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv].
// Packed (cu_seqlens_q and cu_seqlens_k given): q [Tq,Hq,D], k [Tk,Hk,D], v [Tk,Hk,Dv].
// Paged (block_table, or page_indptr and page_indices given): q padded, or packed by cu_seqlens_q alone; k
// [pages,page_size,Hk,D], v [pages,page_size,Hk,Dv]; lengths in seqused_k. Forward pass only.
// k and v may each have a type of their own, 8-bit ones included, and scales. Forward pass only.
struct Inputs {
  Tensor q{}, k{}, v{};
  Tensor bias{};                          // [B|1,Hq|1,Nq|1,Nk|1], q's type or f32
  Tensor mask{};                          // the same shapes, u8, non-zero means visible
  Tensor slopes{};                        // ALiBi, f32 [Hq] or [B,Hq]
  Tensor sinks{};                         // f32 [Hq]
  Tensor cu_seqlens_q{}, cu_seqlens_k{};  // i32 [B+1]
  Tensor seqused_q{}, seqused_k{};        // i32 [B]
  Tensor rng{};                           // i64 [2]: dropout's seed and offset, in device memory
  Tensor block_table{};                   // i32 [B,entries]: the pages of each sequence, in order
  Tensor v_block_table{};                 // the same for v, where its pages are not k's
  Tensor page_indptr{}, page_indices{};   // i32 [B+1], [n]: sequence b has the pages indices[indptr[b] .. indptr[b+1])
  Tensor leftpad_k{};                     // i32 [B]: places of the first page(s) before key 0; seqused_k counts them
  State state{};                          // forward: continue from here; not given: rows have seen nothing yet
  Tensor seq_row0{}, seq_col0{};          // i64 [B]: added to Options::row0 and col0, sequence by sequence
  Tensor seq_batch0{};                    // i64 [B]: sequence b counts as number seq_batch0[b] + Options::batch0
  // An element of k means k_scale times the number that is stored; f32 [1], [Hk], [B,Hk], or one per key and head:
  // [B,Nk,Hk], packed [1,Tk,Hk], paged [pages,page_size,Hk]; or one per key, head and 128 dims: these, with a last
  // size of ceil(D / 128). v_scale likewise, of Dv.
  Tensor k_scale{}, v_scale{};
  // [B,Nq,Hq,Dv] or [Tq,Hq,Dv], q's type: scores are scale * (q.k + qv.v), and scale defaults to 1/sqrt(D + Dv). For
  // caches in which v is a part of the key (MLA). Forward pass only.
  Tensor qv{};
  // i32 [B,Nq,words] or [Tq,words]: of the last Nq_b keys of its sequence query i sees key Nk_b - Nq_b + t if bit t %
  // 32 of word t / 32 is set (speculative decoding). Takes the place of `causal` there. Forward pass only.
  Tensor tree_mask{};
  Tensor positions{};  // i32 [B,Nq] or [Tq]: takes the place of i + off (Alignment). Forward pass only
};

// What the forward pass writes, and what merge reads and writes.
struct Outputs {
  Tensor o{};    // [B,Nq,Hq,Dv] or [Tq,Hq,Dv]; q's type or f32
  Tensor lse{};  // optional; f32 [B,Hq,Nq] or [Hq,Tq]; natural logarithm
  // Optional, beside a page table; i32 [1]. The call sets bits and clears none; 1 (page_outside_pool): a table entry in
  // use was no page of the pool, and its keys and values counted as zeros.
  Tensor status{};
  State state{};  // instead of o and lse: end by writing the state. May be the same views as Inputs::state
};

// Bits of Outputs::status.
inline constexpr std::int32_t page_outside_pool = 1;  // a table entry in use was no page of the pool
// On GPUs, where lengths and positions are read by the kernel: one was beyond what the plan's bounds, the table, the
// cache or rotary_cos hold. A length was cut, a row of append left out.
inline constexpr std::int32_t beyond_bounds = 2;

// What append takes: new tokens, the cache that they go to, where in it, and how keys and queries are rotated.
struct AppendArgs {
  Tensor k_new{}, v_new{};  // [B,n,Hk,D] and [B,n,Hk,Dv], or packed [T,Hk,D] and [T,Hk,Dv]
  Tensor k{}, v{};          // written: the cache, [pages,page_size,Hk,D|Dv]; or [B,capacity,Hk,D|Dv]
  Tensor cu_seqlens_new{};  // i32 [B+1]: packed tokens without slots
  Tensor seqused_k{};       // i32 [B]: places in use, the new tokens' included; absent with slots
  Tensor block_table{};     // i32 [B,entries]; this and the next three as in Inputs
  Tensor v_block_table{};
  Tensor page_indptr{}, page_indices{};
  Tensor slots{};                     // i32 or i64 [B,n] or [T]: page * page_size + place; below 0: skipped
  Tensor rotary_cos{}, rotary_sin{};  // [positions,rotary_dim/2], k_new's type or f32
  Tensor positions{};                 // i32 [B,n] or [T]; absent: the place of each token
  Tensor q{}, q_out{};                // [B,Nq,Hq,D] or [T,Hq,D]: q, rotated, goes to q_out, which may be q
  Tensor q_positions{};               // i32 [B,Nq] or [T]; absent: positions, or places from the first new token's on
  Tensor status{};                    // written; i32 [1], as in Outputs
  bool interleaved = false;           // pairs are neighbours; false: half of rotary_dim apart (NeoX)
  // f32: numbers are divided by it before they are stored. [1], [Hk], [B,Hk]: read. [pages,page_size,Hk] or
  // [B,capacity,Hk], of e4m3 and i8: written, the largest number of each row over the largest of the type.
  Tensor k_scale{}, v_scale{};
};

// What the backward pass reads besides the inputs.
struct Saved {
  Tensor o{}, lse{};  // of the forward pass, or of a merge
  Tensor d_o{};       // q's type or f32
  Tensor d_lse{};     // optional, f32
};

// Each is optional: what is not asked for is not computed. Type: that of the input, or f32.
struct Gradients {
  Tensor dq{}, dk{}, dv{}, dbias{}, dsinks{};
};

// Where the diagonal j = i + off of causal, window and ALiBi lies.
enum class Alignment : std::int32_t {
  bottom_right = 0,  // off = Nk - Nq of the sequence (FlashAttention)
  top_left = 1,      // off = 0 (PyTorch's is_causal)
  offset = 2         // off = Options::diagonal_offset
};

// The value of `scale` that means 1/sqrt(D), or with qv 1/sqrt(D + Dv).
inline constexpr double default_scale = std::numeric_limits<double>::max();

// What to compute.
struct Options {
  double scale = default_scale;
  double softcap = 0;  // 0: none
  bool causal = false;
  Alignment alignment = Alignment::bottom_right;
  std::int64_t diagonal_offset = 0;  // only with Alignment::offset
  std::int64_t window_left = -1;     // inclusive; -1: no bound
  std::int64_t window_right = -1;
  double dropout = 0;
  std::uint64_t seed = 0, seed_offset = 0;
  std::int64_t row0 = 0, col0 = 0, head0 = 0, batch0 = 0;  // global position of a part, from -2^48 to 2^48
  std::int64_t max_seqlen_q = -1, max_seqlen_k = -1;       // upper bounds; they never change a bit
  bool accumulate = false;                                 // gradients (all f32) are added to
  bool deterministic = true;  // false: a GPU may add up dQ, dK and dV in any order; their bits may vary between runs
  // The bits of a row do not depend on how a problem is cut into calls, at multiples of Plan::key_tile and query_tile.
  bool part_invariant = false;
  std::int64_t segment_rows = 0;  // with part_invariant: dK and dV as a tree over segments of so many queries; 0: none

  bool operator==(const Options&) const = default;
};

// Where and how to run.
struct Execution {
  Device device{DeviceType::any, 0};
  void* stream = nullptr;
  int threads = 0;  // 0: all that the process may use
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  const char* kernel = nullptr;  // a kernel's name forces it
  int sm_margin = 0;             // multiprocessors of a GPU that persistent kernels leave free
};

}  // namespace tessera
