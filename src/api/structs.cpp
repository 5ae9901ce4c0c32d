// SPDX-License-Identifier: Apache-2.0
// Structs of the C ABI; see structs.hpp.
#include "api/structs.hpp"

namespace tessera::api {

bool ends_a_field(const tessera_tensor*, std::size_t size) {
  using T = tessera_tensor;
  return ends_one_of(size, &T::size, &T::data, &T::type, &T::ndim, &T::device_type, &T::device_id, &T::shape,
                     &T::strides);
}
bool ends_a_field(const tessera_inputs*, std::size_t size) {
  using T = tessera_inputs;
  return ends_one_of(size, &T::size, &T::q, &T::k, &T::v, &T::bias, &T::mask, &T::slopes, &T::sinks, &T::cu_seqlens_q,
                     &T::cu_seqlens_k, &T::seqused_q, &T::seqused_k, &T::rng, &T::block_table, &T::v_block_table,
                     &T::page_indptr, &T::page_indices, &T::leftpad_k, &T::state_o, &T::state_m, &T::state_l,
                     &T::seq_row0, &T::seq_col0, &T::seq_batch0, &T::k_scale, &T::v_scale, &T::qv, &T::tree_mask,
                     &T::positions);
}
bool ends_a_field(const tessera_outputs*, std::size_t size) {
  using T = tessera_outputs;
  return ends_one_of(size, &T::size, &T::o, &T::lse, &T::status, &T::state_o, &T::state_m, &T::state_l);
}
bool ends_a_field(const tessera_append_args*, std::size_t size) {
  using T = tessera_append_args;
  return ends_one_of(size, &T::size, &T::k_new, &T::v_new, &T::k, &T::v, &T::cu_seqlens_new, &T::seqused_k,
                     &T::block_table, &T::v_block_table, &T::page_indptr, &T::page_indices, &T::slots, &T::rotary_cos,
                     &T::rotary_sin, &T::positions, &T::q, &T::q_out, &T::q_positions, &T::status, &T::interleaved,
                     &T::reserved, &T::k_scale, &T::v_scale);
}
bool ends_a_field(const tessera_saved*, std::size_t size) {
  using T = tessera_saved;
  return ends_one_of(size, &T::size, &T::o, &T::lse, &T::d_o, &T::d_lse);
}
bool ends_a_field(const tessera_gradients*, std::size_t size) {
  using T = tessera_gradients;
  return ends_one_of(size, &T::size, &T::dq, &T::dk, &T::dv, &T::dbias, &T::dsinks);
}
bool ends_a_field(const tessera_options*, std::size_t size) {
  using T = tessera_options;
  return ends_one_of(size, &T::size, &T::scale, &T::softcap, &T::causal, &T::alignment, &T::diagonal_offset,
                     &T::window_left, &T::window_right, &T::dropout, &T::seed, &T::seed_offset, &T::row0, &T::col0,
                     &T::head0, &T::batch0, &T::max_seqlen_q, &T::max_seqlen_k, &T::accumulate, &T::deterministic,
                     &T::part_invariant, &T::reserved, &T::segment_rows);
}
bool ends_a_field(const tessera_execution*, std::size_t size) {
  using T = tessera_execution;
  return ends_one_of(size, &T::size, &T::device_type, &T::device_id, &T::stream, &T::threads, &T::sm_margin,
                     &T::workspace, &T::workspace_bytes, &T::kernel);
}

bool ends_a_field(const tessera_partition_args*, std::size_t size) {
  using T = tessera_partition_args;
  return ends_one_of(size, &T::size, &T::lengths, &T::sequences, &T::kind, &T::ranks, &T::slices, &T::reserved,
                     &T::align, &T::options);
}
bool ends_a_field(const tessera_transport*, std::size_t size) {
  using T = tessera_transport;
  return ends_one_of(size, &T::size, &T::context, &T::rank, &T::ranks, &T::start, &T::test, &T::notice, &T::fail,
                     &T::destroy, &T::own_thread, &T::reserved);
}
bool ends_a_field(const tessera_dist_args*, std::size_t size) {
  using T = tessera_dist_args;
  return ends_one_of(size, &T::size, &T::communicator, &T::partition, &T::query_heads, &T::key_heads, &T::head_dim,
                     &T::value_dim, &T::type, &T::scheme, &T::segment, &T::timeout);
}

bool ends_a_field(const tessera_decoder_args*, std::size_t size) {
  using T = tessera_decoder_args;
  return ends_one_of(size, &T::size, &T::communicator, &T::query_heads, &T::key_heads, &T::head_dim, &T::value_dim,
                     &T::type, &T::groups, &T::block, &T::timeout);
}
bool ends_a_field(const tessera_nccl_args*, std::size_t size) {
  using T = tessera_nccl_args;
  return ends_one_of(size, &T::size, &T::unique_id, &T::comm, &T::rank, &T::ranks, &T::device, &T::reserved,
                     &T::timeout);
}

Tensor tensor(const char* name, const tessera_tensor* given) {
  if (!given) return {};
  const tessera_tensor c = read_struct("tensor", given, tessera_tensor_init, name);
  Tensor t;
  t.data = c.data;
  t.type = static_cast<Type>(c.type);
  t.device = {static_cast<DeviceType>(c.device_type), c.device_id};
  t.ndim = c.ndim;
  // ndim == 0 means "not given" inside the library: a given tensor without dimensions must not be taken for an absent
  // one.
  if (c.ndim < 1 || c.ndim > 4) invalid(name, ": has ", c.ndim, " dimensions; tensors have 1 to 4");
  for (std::size_t i = 0; i < 4; ++i) t.shape[i] = c.shape[i], t.strides[i] = c.strides[i];
  return t;
}

Inputs inputs(const tessera_inputs* given) {
  const tessera_inputs c = require_struct("inputs", given, tessera_inputs_init);
  return {.q = tensor("q", c.q),
          .k = tensor("k", c.k),
          .v = tensor("v", c.v),
          .bias = tensor("bias", c.bias),
          .mask = tensor("mask", c.mask),
          .slopes = tensor("slopes", c.slopes),
          .sinks = tensor("sinks", c.sinks),
          .cu_seqlens_q = tensor("cu_seqlens_q", c.cu_seqlens_q),
          .cu_seqlens_k = tensor("cu_seqlens_k", c.cu_seqlens_k),
          .seqused_q = tensor("seqused_q", c.seqused_q),
          .seqused_k = tensor("seqused_k", c.seqused_k),
          .rng = tensor("rng", c.rng),
          .block_table = tensor("block_table", c.block_table),
          .v_block_table = tensor("v_block_table", c.v_block_table),
          .page_indptr = tensor("page_indptr", c.page_indptr),
          .page_indices = tensor("page_indices", c.page_indices),
          .leftpad_k = tensor("leftpad_k", c.leftpad_k),
          .state = {.o = tensor("inputs.state_o", c.state_o),
                    .m = tensor("inputs.state_m", c.state_m),
                    .l = tensor("inputs.state_l", c.state_l)},
          .seq_row0 = tensor("seq_row0", c.seq_row0),
          .seq_col0 = tensor("seq_col0", c.seq_col0),
          .seq_batch0 = tensor("seq_batch0", c.seq_batch0),
          .k_scale = tensor("k_scale", c.k_scale),
          .v_scale = tensor("v_scale", c.v_scale),
          .qv = tensor("qv", c.qv),
          .tree_mask = tensor("tree_mask", c.tree_mask),
          .positions = tensor("positions", c.positions)};
}

Outputs outputs(const tessera_outputs* given) {
  const tessera_outputs c = require_struct("outputs", given, tessera_outputs_init);
  return {.o = tensor("o", c.o),
          .lse = tensor("lse", c.lse),
          .status = tensor("status", c.status),
          .state = {.o = tensor("outputs.state_o", c.state_o),
                    .m = tensor("outputs.state_m", c.state_m),
                    .l = tensor("outputs.state_l", c.state_l)}};
}

AppendArgs append_args(const tessera_append_args* given) {
  const tessera_append_args c = require_struct("append_args", given, tessera_append_args_init);
  return {.k_new = tensor("k_new", c.k_new),
          .v_new = tensor("v_new", c.v_new),
          .k = tensor("k", c.k),
          .v = tensor("v", c.v),
          .cu_seqlens_new = tensor("cu_seqlens_new", c.cu_seqlens_new),
          .seqused_k = tensor("seqused_k", c.seqused_k),
          .block_table = tensor("block_table", c.block_table),
          .v_block_table = tensor("v_block_table", c.v_block_table),
          .page_indptr = tensor("page_indptr", c.page_indptr),
          .page_indices = tensor("page_indices", c.page_indices),
          .slots = tensor("slots", c.slots),
          .rotary_cos = tensor("rotary_cos", c.rotary_cos),
          .rotary_sin = tensor("rotary_sin", c.rotary_sin),
          .positions = tensor("positions", c.positions),
          .q = tensor("q", c.q),
          .q_out = tensor("q_out", c.q_out),
          .q_positions = tensor("q_positions", c.q_positions),
          .status = tensor("status", c.status),
          .interleaved = c.interleaved != 0,
          .k_scale = tensor("k_scale", c.k_scale),
          .v_scale = tensor("v_scale", c.v_scale)};
}

Saved saved_tensors(const tessera_saved* given) {
  const tessera_saved c = require_struct("saved", given, tessera_saved_init);
  return {.o = tensor("o", c.o),
          .lse = tensor("lse", c.lse),
          .d_o = tensor("d_o", c.d_o),
          .d_lse = tensor("d_lse", c.d_lse)};
}

Gradients gradients(const tessera_gradients* given) {
  const tessera_gradients c = require_struct("gradients", given, tessera_gradients_init);
  return {.dq = tensor("dq", c.dq),
          .dk = tensor("dk", c.dk),
          .dv = tensor("dv", c.dv),
          .dbias = tensor("dbias", c.dbias),
          .dsinks = tensor("dsinks", c.dsinks)};
}

Options options(const tessera_options* given) {
  const tessera_options c = read_struct("options", given, tessera_options_init);
  return {.scale = c.scale,
          .softcap = c.softcap,
          .causal = c.causal != 0,
          .alignment = static_cast<Alignment>(c.alignment),
          .diagonal_offset = c.diagonal_offset,
          .window_left = c.window_left,
          .window_right = c.window_right,
          .dropout = c.dropout,
          .seed = c.seed,
          .seed_offset = c.seed_offset,
          .row0 = c.row0,
          .col0 = c.col0,
          .head0 = c.head0,
          .batch0 = c.batch0,
          .max_seqlen_q = c.max_seqlen_q,
          .max_seqlen_k = c.max_seqlen_k,
          .accumulate = c.accumulate != 0,
          .deterministic = c.deterministic != 0,
          .part_invariant = c.part_invariant != 0,
          .segment_rows = c.segment_rows};
}

Execution execution(const tessera_execution* given) {
  const tessera_execution c = read_struct("execution", given, tessera_execution_init);
  return {.device = {static_cast<DeviceType>(c.device_type), c.device_id},
          .stream = c.stream,
          .threads = c.threads,
          .workspace = c.workspace,
          .workspace_bytes = c.workspace_bytes,
          .kernel = c.kernel,
          .sm_margin = c.sm_margin};
}

}  // namespace tessera::api
