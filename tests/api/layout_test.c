/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of the C ABI, as 0.1 has it: where each field lies and which number each enumerator has. Programs that
 * were compiled against an older header rest on it, so lines are added here and never changed (a field that was
 * `reserved` gets its line when it has a name). Links nothing. Implements docs/versions.md, "The C ABI". */
#include <stdio.h>

#include "tessera/dist.h"
#include "tessera/nccl.h"
#include "tessera/vulkan.h"

struct place {
  const char* name;
  size_t found, fixed;
};
#define AT(type, field, offset) {#type "." #field, offsetof(type, field), offset},
#define NUMBER(name, value) {#name, (size_t)(name), value},

static const struct place places[] = {
    /* clang-format off */
  /* tessera_tensor */
  AT(tessera_tensor, size, 0)
  AT(tessera_tensor, data, 8)
  AT(tessera_tensor, type, 16)
  AT(tessera_tensor, ndim, 20)
  AT(tessera_tensor, device_type, 24)
  AT(tessera_tensor, device_id, 28)
  AT(tessera_tensor, shape, 32)
  AT(tessera_tensor, strides, 64)
  /* tessera_inputs */
  AT(tessera_inputs, size, 0)
  AT(tessera_inputs, q, 8)
  AT(tessera_inputs, k, 16)
  AT(tessera_inputs, v, 24)
  AT(tessera_inputs, bias, 32)
  AT(tessera_inputs, mask, 40)
  AT(tessera_inputs, slopes, 48)
  AT(tessera_inputs, sinks, 56)
  AT(tessera_inputs, cu_seqlens_q, 64)
  AT(tessera_inputs, cu_seqlens_k, 72)
  AT(tessera_inputs, seqused_q, 80)
  AT(tessera_inputs, seqused_k, 88)
  AT(tessera_inputs, rng, 96)
  AT(tessera_inputs, block_table, 104)
  AT(tessera_inputs, v_block_table, 112)
  AT(tessera_inputs, page_indptr, 120)
  AT(tessera_inputs, page_indices, 128)
  AT(tessera_inputs, leftpad_k, 136)
  AT(tessera_inputs, state_o, 144)
  AT(tessera_inputs, state_m, 152)
  AT(tessera_inputs, state_l, 160)
  AT(tessera_inputs, seq_row0, 168)
  AT(tessera_inputs, seq_col0, 176)
  AT(tessera_inputs, seq_batch0, 184)
  AT(tessera_inputs, k_scale, 192)
  AT(tessera_inputs, v_scale, 200)
  AT(tessera_inputs, qv, 208)
  AT(tessera_inputs, tree_mask, 216)
  AT(tessera_inputs, positions, 224)
  /* tessera_outputs */
  AT(tessera_outputs, size, 0)
  AT(tessera_outputs, o, 8)
  AT(tessera_outputs, lse, 16)
  AT(tessera_outputs, status, 24)
  AT(tessera_outputs, state_o, 32)
  AT(tessera_outputs, state_m, 40)
  AT(tessera_outputs, state_l, 48)
  /* tessera_saved */
  AT(tessera_saved, size, 0)
  AT(tessera_saved, o, 8)
  AT(tessera_saved, lse, 16)
  AT(tessera_saved, d_o, 24)
  AT(tessera_saved, d_lse, 32)
  /* tessera_gradients */
  AT(tessera_gradients, size, 0)
  AT(tessera_gradients, dq, 8)
  AT(tessera_gradients, dk, 16)
  AT(tessera_gradients, dv, 24)
  AT(tessera_gradients, dbias, 32)
  AT(tessera_gradients, dsinks, 40)
  /* tessera_options */
  AT(tessera_options, size, 0)
  AT(tessera_options, scale, 8)
  AT(tessera_options, softcap, 16)
  AT(tessera_options, causal, 24)
  AT(tessera_options, alignment, 28)
  AT(tessera_options, diagonal_offset, 32)
  AT(tessera_options, window_left, 40)
  AT(tessera_options, window_right, 48)
  AT(tessera_options, dropout, 56)
  AT(tessera_options, seed, 64)
  AT(tessera_options, seed_offset, 72)
  AT(tessera_options, row0, 80)
  AT(tessera_options, col0, 88)
  AT(tessera_options, head0, 96)
  AT(tessera_options, batch0, 104)
  AT(tessera_options, max_seqlen_q, 112)
  AT(tessera_options, max_seqlen_k, 120)
  AT(tessera_options, accumulate, 128)
  AT(tessera_options, deterministic, 132)
  AT(tessera_options, part_invariant, 136)
  AT(tessera_options, segment_rows, 144)
  /* tessera_execution */
  AT(tessera_execution, size, 0)
  AT(tessera_execution, device_type, 8)
  AT(tessera_execution, device_id, 12)
  AT(tessera_execution, stream, 16)
  AT(tessera_execution, threads, 24)
  AT(tessera_execution, sm_margin, 28)
  AT(tessera_execution, workspace, 32)
  AT(tessera_execution, workspace_bytes, 40)
  AT(tessera_execution, kernel, 48)
  /* tessera_append_args */
  AT(tessera_append_args, size, 0)
  AT(tessera_append_args, k_new, 8)
  AT(tessera_append_args, v_new, 16)
  AT(tessera_append_args, k, 24)
  AT(tessera_append_args, v, 32)
  AT(tessera_append_args, cu_seqlens_new, 40)
  AT(tessera_append_args, seqused_k, 48)
  AT(tessera_append_args, block_table, 56)
  AT(tessera_append_args, v_block_table, 64)
  AT(tessera_append_args, page_indptr, 72)
  AT(tessera_append_args, page_indices, 80)
  AT(tessera_append_args, slots, 88)
  AT(tessera_append_args, rotary_cos, 96)
  AT(tessera_append_args, rotary_sin, 104)
  AT(tessera_append_args, positions, 112)
  AT(tessera_append_args, q, 120)
  AT(tessera_append_args, q_out, 128)
  AT(tessera_append_args, q_positions, 136)
  AT(tessera_append_args, status, 144)
  AT(tessera_append_args, interleaved, 152)
  AT(tessera_append_args, k_scale, 160)
  AT(tessera_append_args, v_scale, 168)
  /* tessera_vulkan_queue */
  AT(tessera_vulkan_queue, size, 0)
  AT(tessera_vulkan_queue, instance, 8)
  AT(tessera_vulkan_queue, physical_device, 16)
  AT(tessera_vulkan_queue, device, 24)
  AT(tessera_vulkan_queue, queue, 32)
  AT(tessera_vulkan_queue, queue_family, 40)
  AT(tessera_vulkan_queue, semaphore, 48)
  AT(tessera_vulkan_queue, value, 56)
  /* enumerations */
  NUMBER(TESSERA_OK, 0)
  NUMBER(TESSERA_INVALID_ARGUMENT, 1)
  NUMBER(TESSERA_UNSUPPORTED, 2)
  NUMBER(TESSERA_OUT_OF_MEMORY, 3)
  NUMBER(TESSERA_DEVICE_ERROR, 4)
  NUMBER(TESSERA_INTERNAL, 5)
  NUMBER(TESSERA_F64, 0)
  NUMBER(TESSERA_F32, 1)
  NUMBER(TESSERA_F16, 2)
  NUMBER(TESSERA_BF16, 3)
  NUMBER(TESSERA_E4M3, 4)
  NUMBER(TESSERA_E5M2, 5)
  NUMBER(TESSERA_I32, 6)
  NUMBER(TESSERA_I64, 7)
  NUMBER(TESSERA_U8, 8)
  NUMBER(TESSERA_I8, 9)
  NUMBER(TESSERA_DEVICE_ANY, 0)
  NUMBER(TESSERA_DEVICE_CPU, 1)
  NUMBER(TESSERA_DEVICE_CUDA, 2)
  NUMBER(TESSERA_DEVICE_VULKAN, 7)
  NUMBER(TESSERA_BOTTOM_RIGHT, 0)
  NUMBER(TESSERA_TOP_LEFT, 1)
  NUMBER(TESSERA_OFFSET, 2)
  /* tessera_span */
  AT(tessera_span, sequence, 0)
  AT(tessera_span, begin, 8)
  AT(tessera_span, end, 16)
  /* tessera_partition_args */
  AT(tessera_partition_args, size, 0)
  AT(tessera_partition_args, lengths, 8)
  AT(tessera_partition_args, sequences, 16)
  AT(tessera_partition_args, kind, 24)
  AT(tessera_partition_args, ranks, 28)
  AT(tessera_partition_args, slices, 32)
  AT(tessera_partition_args, align, 40)
  AT(tessera_partition_args, options, 48)
  /* tessera_message */
  AT(tessera_message, data, 0)
  AT(tessera_message, bytes, 8)
  AT(tessera_message, peer, 16)
  AT(tessera_message, send, 20)
  /* tessera_transport */
  AT(tessera_transport, size, 0)
  AT(tessera_transport, context, 8)
  AT(tessera_transport, rank, 16)
  AT(tessera_transport, ranks, 20)
  AT(tessera_transport, start, 24)
  AT(tessera_transport, test, 32)
  AT(tessera_transport, notice, 40)
  AT(tessera_transport, fail, 48)
  AT(tessera_transport, destroy, 56)
  AT(tessera_transport, own_thread, 64)
  AT(tessera_transport, reserved, 68)
  /* tessera_dist_args */
  AT(tessera_dist_args, size, 0)
  AT(tessera_dist_args, communicator, 8)
  AT(tessera_dist_args, partition, 16)
  AT(tessera_dist_args, query_heads, 24)
  AT(tessera_dist_args, key_heads, 32)
  AT(tessera_dist_args, head_dim, 40)
  AT(tessera_dist_args, value_dim, 48)
  AT(tessera_dist_args, type, 56)
  AT(tessera_dist_args, scheme, 60)
  AT(tessera_dist_args, segment, 64)
  AT(tessera_dist_args, timeout, 72)
  /* tessera_decoder_args */
  AT(tessera_decoder_args, size, 0)
  AT(tessera_decoder_args, communicator, 8)
  AT(tessera_decoder_args, query_heads, 16)
  AT(tessera_decoder_args, key_heads, 24)
  AT(tessera_decoder_args, head_dim, 32)
  AT(tessera_decoder_args, value_dim, 40)
  AT(tessera_decoder_args, type, 48)
  AT(tessera_decoder_args, groups, 52)
  AT(tessera_decoder_args, block, 56)
  AT(tessera_decoder_args, timeout, 64)
  /* tessera_nccl_args */
  AT(tessera_nccl_args, size, 0)
  AT(tessera_nccl_args, unique_id, 8)
  AT(tessera_nccl_args, comm, 16)
  AT(tessera_nccl_args, rank, 24)
  AT(tessera_nccl_args, ranks, 28)
  AT(tessera_nccl_args, device, 32)
  AT(tessera_nccl_args, timeout, 40)
  NUMBER(TESSERA_ZIGZAG, 0)
  NUMBER(TESSERA_CONTIGUOUS, 1)
  NUMBER(TESSERA_BALANCED, 2)
  NUMBER(TESSERA_RING, 0)
  NUMBER(TESSERA_GATHER, 1)
    /* clang-format on */
};

int main(void) {
  const size_t count = sizeof(places) / sizeof(places[0]);
  size_t i, wrong = 0;
  if (sizeof(void*) != 8 || sizeof(size_t) != 8) {
    puts("skipped: the layout is written down for pointers of 64 bits");
    return 77;
  }
  for (i = 0; i < count; ++i) {
    if (places[i].found == places[i].fixed) continue;
    ++wrong;
    printf("%s is %zu and must stay %zu\n", places[i].name, places[i].found, places[i].fixed);
  }
  printf("%zu places, %zu moved\n", count, wrong);
  return wrong != 0;
}
