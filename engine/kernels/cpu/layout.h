// What Python and the kernels pass each other, in order. layout.py declares the same tables, and refuses a library whose
// tables differ from them when it loads it (layout.cc).
//
// The code is made from these tables: the parameters and bindings of kernels (binding.h), the arrays and numbers of
// halves (block.cc), and enumerations. So a name here is the name that the code reads. The tables need nothing of XLA.

#ifndef PENSTOCK_LAYOUT_H_
#define PENSTOCK_LAYOUT_H_

#define PENSTOCK_KERNELS(KERNEL)                                                                       \
  KERNEL(RaggedAttention) KERNEL(RaggedAttentionInt8) KERNEL(PackedMatmul) KERNEL(GroupedMatmul)       \
  KERNEL(QuantizedMatmul) KERNEL(Halves) KERNEL(Route) KERNEL(GroupRows) KERNEL(SumRows) KERNEL(Survey)

// ---- Kernels: operands, results, operands that are updated in place, and attributes

#define PENSTOCK_BATCH(OPERAND) \
  OPERAND(S32, slots) OPERAND(S32, kv_lens) OPERAND(S32, page_indices) OPERAND(S32, cu_q_lens) OPERAND(S32, num_seqs)

// `sinks` are one for each query head, or none; `window` and `soft_cap` are 0 for none.
#define PENSTOCK_TABLE_RaggedAttention(OPERAND, RESULT, UPDATE, ATTRIBUTE)                              \
  OPERAND(AnyBuffer, q) OPERAND(AnyBuffer, k) OPERAND(AnyBuffer, v)                                     \
  OPERAND(AnyBuffer, keys) OPERAND(AnyBuffer, values)                                                   \
  PENSTOCK_BATCH(OPERAND) OPERAND(F32, sinks)                                                           \
  RESULT(AnyBuffer, out) UPDATE(AnyBuffer, keys) UPDATE(AnyBuffer, values)                              \
  ATTRIBUTE(float, scale) ATTRIBUTE(int64_t, window) ATTRIBUTE(float, soft_cap)

#define PENSTOCK_TABLE_RaggedAttentionInt8(OPERAND, RESULT, UPDATE, ATTRIBUTE)                          \
  OPERAND(AnyBuffer, q) OPERAND(AnyBuffer, k) OPERAND(AnyBuffer, v)                                     \
  OPERAND(AnyBuffer, keys) OPERAND(AnyBuffer, values) OPERAND(F32, key_scales) OPERAND(F32, value_scales) \
  PENSTOCK_BATCH(OPERAND) OPERAND(F32, sinks)                                                           \
  RESULT(AnyBuffer, out) UPDATE(AnyBuffer, keys) UPDATE(AnyBuffer, values)                              \
  UPDATE(F32, key_scales) UPDATE(F32, value_scales)                                                     \
  ATTRIBUTE(float, scale) ATTRIBUTE(int64_t, window) ATTRIBUTE(float, soft_cap)

// `num_rows` is the number of rows, after which y is undefined; if it is empty, all rows are computed.
#define PENSTOCK_TABLE_PackedMatmul(OPERAND, RESULT, UPDATE, ATTRIBUTE)                                 \
  OPERAND(AnyBuffer, x) OPERAND(AnyBuffer, weights) OPERAND(F32, bias) OPERAND(S32, num_rows)           \
  RESULT(AnyBuffer, y) ATTRIBUTE(int64_t, gate)

// `bias` is [groups, panels * kPanel], or empty.
#define PENSTOCK_TABLE_GroupedMatmul(OPERAND, RESULT, UPDATE, ATTRIBUTE)                                \
  OPERAND(AnyBuffer, x) OPERAND(AnyBuffer, weights) OPERAND(F32, bias) OPERAND(S32, group_sizes)        \
  RESULT(AnyBuffer, y) ATTRIBUTE(int64_t, gate)

// `bytes` and `row_scales` are for quantized rows, and so are `row_sums` [rows, groups], for weights in 4 bits or with
// offsets; otherwise they are empty. Without `group_sizes` there is one group of all rows.
#define PENSTOCK_TABLE_QuantizedMatmul(OPERAND, RESULT, UPDATE, ATTRIBUTE)                              \
  OPERAND(AnyBuffer, x) OPERAND(AnyBuffer, codes) OPERAND(AnyBuffer, scales) OPERAND(AnyBuffer, offsets) \
  OPERAND(F32, bias) OPERAND(S32, group_sizes)                                                          \
  RESULT(AnyBuffer, y) RESULT(U8, bytes) RESULT(F32, row_scales) RESULT(S32, row_sums)                  \
  ATTRIBUTE(int64_t, bits) ATTRIBUTE(int64_t, offset) ATTRIBUTE(int64_t, gate)

// The arrays of the halves follow `x`; `integers` and `floats` have the numbers of one half after the other.
#define PENSTOCK_TABLE_Halves(OPERAND, RESULT, UPDATE, ATTRIBUTE) \
  OPERAND(AnyBuffer, x) UPDATE(AnyBuffer, x) ATTRIBUTE(Integers, integers) ATTRIBUTE(Floats, floats)

// `correction` is [experts], or empty.
#define PENSTOCK_TABLE_Route(OPERAND, RESULT, UPDATE, ATTRIBUTE)                                        \
  OPERAND(F32, logits) OPERAND(F32, correction) RESULT(S32, chosen) RESULT(F32, weights)                \
  ATTRIBUTE(bool, is_sigmoid) ATTRIBUTE(bool, is_normalized) ATTRIBUTE(float, scale)                    \
  ATTRIBUTE(int64_t, groups) ATTRIBUTE(int64_t, groups_chosen)

// `places` are the places of each token's rows, -1 for an expert that does not exist.
#define PENSTOCK_TABLE_GroupRows(OPERAND, RESULT, UPDATE, ATTRIBUTE) \
  OPERAND(AnyBuffer, x) OPERAND(S32, chosen) RESULT(AnyBuffer, rows) RESULT(S32, places) RESULT(S32, group_sizes)

#define PENSTOCK_TABLE_SumRows(OPERAND, RESULT, UPDATE, ATTRIBUTE) \
  OPERAND(F32, rows) OPERAND(S32, places) OPERAND(F32, weights) RESULT(F32, y)

#define PENSTOCK_TABLE_Survey(OPERAND, RESULT, UPDATE, ATTRIBUTE) \
  OPERAND(F32, logits) RESULT(S32, places) RESULT(Pred, are_sound)

// ---- Halves of layers: arrays, caches that are updated in place or empty, and groups of arrays

#define PENSTOCK_HALVES(HALF) HALF(FeedForward) HALF(Attention) HALF(ShortConv) HALF(DeltaNet)  // by the number `kind`

// `source` is the half's input if that is not x; or it is empty.
#define PENSTOCK_TABLE_FeedForward(OPERAND, CACHE, GROUP)                                               \
  OPERAND(AnyBuffer, source) OPERAND(S32, num_rows) OPERAND(F32, norm_before) OPERAND(F32, norm_after)  \
  GROUP(Linear, gate_up) GROUP(Linear, down)

#define PENSTOCK_TABLE_Attention(OPERAND, CACHE, GROUP)                                                 \
  CACHE(AnyBuffer, keys) CACHE(AnyBuffer, values) CACHE(F32, key_scales) CACHE(F32, value_scales)       \
  PENSTOCK_BATCH(OPERAND) OPERAND(F32, norm_before) OPERAND(F32, norm_after)                            \
  GROUP(Linear, qkv) GROUP(Linear, out) OPERAND(F32, q_norm) OPERAND(F32, k_norm)                       \
  OPERAND(F32, cos) OPERAND(F32, sin) OPERAND(F32, query_scales) OPERAND(F32, sinks)

#define PENSTOCK_TABLE_ShortConv(OPERAND, CACHE, GROUP)                                                 \
  CACHE(AnyBuffer, kept) GROUP(States, states) OPERAND(F32, norm_before) OPERAND(F32, norm_after)       \
  GROUP(Linear, joined) GROUP(Linear, out) OPERAND(F32, taps) OPERAND(F32, taps_bias)

#define PENSTOCK_TABLE_DeltaNet(OPERAND, CACHE, GROUP)                                                  \
  CACHE(AnyBuffer, q_kept) CACHE(AnyBuffer, k_kept) CACHE(AnyBuffer, v_kept) CACHE(F32, matrices)       \
  GROUP(States, states) OPERAND(F32, norm_before) OPERAND(F32, norm_after)                              \
  GROUP(Linear, joined) GROUP(Linear, rates) GROUP(Linear, out)                                         \
  OPERAND(F32, q_taps) OPERAND(F32, k_taps) OPERAND(F32, v_taps)                                        \
  OPERAND(F32, exponents) OPERAND(F32, dt_bias) OPERAND(F32, norm)

#define PENSTOCK_TABLE_Linear(OPERAND) \
  OPERAND(AnyBuffer, weights) OPERAND(AnyBuffer, scales) OPERAND(AnyBuffer, offsets) OPERAND(F32, bias)

#define PENSTOCK_TABLE_States(OPERAND)                                       \
  OPERAND(S32, cu_q_lens) OPERAND(S32, num_seqs) OPERAND(S32, positions)     \
  OPERAND(S32, reads) OPERAND(S32, ends) OPERAND(S32, writes)

// ---- The numbers of a half; what it has no use for is 0

// `columns` and `gate` are the first matmul's; `rates_*` a delta net's; what follows is attention's.
#define PENSTOCK_HALF_INTEGERS(NUMBER)                                                        \
  NUMBER(int64_t, kind) NUMBER(int64_t, is_layer_norm)                                        \
  NUMBER(int64_t, columns) NUMBER(int64_t, gate)                                              \
  NUMBER(int64_t, first_offset) NUMBER(int64_t, first_reads_bytes)                            \
  NUMBER(int64_t, last_offset) NUMBER(int64_t, last_reads_bytes)                              \
  NUMBER(int64_t, rates_offset) NUMBER(int64_t, rates_reads_bytes)                            \
  NUMBER(int64_t, num_heads) NUMBER(int64_t, head_dim) NUMBER(int64_t, is_qk_layer_norm)      \
  NUMBER(int64_t, is_interleaved) NUMBER(int64_t, window) NUMBER(int64_t, has_gate)

// `head_eps` is of the norms of heads; `scale` and `soft_cap` are attention's.
#define PENSTOCK_HALF_FLOATS(NUMBER) \
  NUMBER(float, eps) NUMBER(float, residual_scale) NUMBER(float, head_eps) NUMBER(float, scale) NUMBER(float, soft_cap)

// ---- Enumerations, by their numbers

#define PENSTOCK_GATES(CHOICE) \
  CHOICE(kNone, none) CHOICE(kSilu, silu) CHOICE(kGeluTanh, gelu_tanh) CHOICE(kGelu, gelu) CHOICE(kRelu, relu)
#define PENSTOCK_OFFSETS(CHOICE) CHOICE(kNone, none) CHOICE(kZeros, zeros) CHOICE(kMinimums, minimums)

#define PENSTOCK_ENUMERATOR(enumerator, name) enumerator,

#endif  // PENSTOCK_LAYOUT_H_
