// SPDX-License-Identifier: Apache-2.0
// Every tensor that a call may be given, by its name, so that what several ranks do not take is refused and none is
// ignored. Included by plans and the decoder.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "tessera/tessera.hpp"

namespace tessera::dist {

// The name of the first that is given and is none of those taken. Null: there is none.
inline const char* first_besides(const Inputs& in, std::initializer_list<const Tensor*> taken) {
  const std::pair<const char*, const Tensor*> all[] = {{"q", &in.q},
                                                       {"k", &in.k},
                                                       {"v", &in.v},
                                                       {"bias", &in.bias},
                                                       {"mask", &in.mask},
                                                       {"slopes", &in.slopes},
                                                       {"sinks", &in.sinks},
                                                       {"cu_seqlens_q", &in.cu_seqlens_q},
                                                       {"cu_seqlens_k", &in.cu_seqlens_k},
                                                       {"seqused_q", &in.seqused_q},
                                                       {"seqused_k", &in.seqused_k},
                                                       {"rng", &in.rng},
                                                       {"block_table", &in.block_table},
                                                       {"v_block_table", &in.v_block_table},
                                                       {"page_indptr", &in.page_indptr},
                                                       {"page_indices", &in.page_indices},
                                                       {"leftpad_k", &in.leftpad_k},
                                                       {"state", &in.state.o},
                                                       {"state", &in.state.m},
                                                       {"state", &in.state.l},
                                                       {"seq_row0", &in.seq_row0},
                                                       {"seq_col0", &in.seq_col0},
                                                       {"seq_batch0", &in.seq_batch0},
                                                       {"k_scale", &in.k_scale},
                                                       {"v_scale", &in.v_scale},
                                                       {"qv", &in.qv},
                                                       {"tree_mask", &in.tree_mask},
                                                       {"positions", &in.positions}};
  static_assert(sizeof(all) / sizeof(*all) * sizeof(Tensor) == sizeof(Inputs), "every input");
  for (const auto& [name, t] : all)
    if (*t && std::find(taken.begin(), taken.end(), t) == taken.end()) return name;
  return nullptr;
}

}  // namespace tessera::dist
