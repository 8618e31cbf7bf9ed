// Ragged paged attention for CPUs, called by XLA through its foreign function interface.
//
// It has the same contract as XlaAttention: it writes this step's keys and values, if there are any, into the pages.
// Then it attends, sequence by sequence, only over the pages of the sequence.

#include "attention.h"
#include "buffers.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace attention {
PENSTOCK_PLAN_RUN(float, float);
PENSTOCK_PLAN_RUN(BFloat16, BFloat16);
PENSTOCK_PLAN_RUN(float, int8_t);
PENSTOCK_PLAN_RUN(BFloat16, int8_t);
PENSTOCK_PLAN_RUN(Float16, float);
PENSTOCK_PLAN_RUN(Float16, int8_t);

namespace {

constexpr int64_t kTokensPerTask = 8;  // written by one thread at once

// The part of a call that does not depend on the type of pages.
struct Call {
  Shape shape;
  Batch batch;
  Options options;
  int64_t num_tokens;
  bool writes;  // otherwise the pages already hold this step's keys and values
};

template <typename T, typename C>
void Run(ffi::ThreadPool& pool, const Call& call, const T* q, const T* k, const T* v, const Cache<C>& cache, T* out) {
  const Shape& shape = call.shape;
  const int64_t kv_stride = shape.num_kv_heads * shape.head_dim, stride = shape.num_heads * shape.head_dim;
  const int64_t num_real = call.batch.num_tokens();
  ForEach(pool, call.writes ? CeilDivide(num_real, kTokensPerTask) : 0, [&](int64_t i) {
    for (int64_t t = i * kTokensPerTask; t < std::min((i + 1) * kTokensPerTask, num_real); ++t)
      WriteToken(shape, call.batch.slots[t], k + t * kv_stride, v + t * kv_stride, cache);
  });
  std::memset(out + num_real * stride, 0, (call.num_tokens - num_real) * stride * sizeof(T));
  static thread_local Plan kept;
  Plan& plan = kept;
  plan.Build(shape, call.batch, call.options.window);
  ForEach(pool, plan.num_tasks(), [&](int64_t i) {
    static thread_local Scratch scratch;
    plan.Run(i, call.options, Rows<const T>{q, stride}, Rows<T>{out, stride}, cache, scratch);
  });
}

struct Arrays {
  ffi::AnyBuffer q, k, v;
  ffi::Result<ffi::AnyBuffer> out, keys, values;
};

template <typename T, typename C>
void Run(ffi::ThreadPool& pool, const Call& call, Arrays& arrays, float* key_scales, float* value_scales) {
  const Cache<C> cache{static_cast<C*>(arrays.keys->untyped_data()), static_cast<C*>(arrays.values->untyped_data()),
                       key_scales, value_scales};
  Run<T, C>(pool, call, static_cast<const T*>(arrays.q.untyped_data()), static_cast<const T*>(arrays.k.untyped_data()),
            static_cast<const T*>(arrays.v.untyped_data()), cache, static_cast<T*>(arrays.out->untyped_data()));
}

ffi::Error RunOfTypes(ffi::ThreadPool& pool, const Call& call, Arrays& arrays, float* key_scales, float* value_scales) {
  return OfPages(arrays.q.element_type(), arrays.keys->element_type(), [&](auto* of_q, auto* of_pages) {
    using T = std::remove_pointer_t<decltype(of_q)>;
    using C = std::remove_pointer_t<decltype(of_pages)>;
    Run<T, C>(pool, call, arrays, key_scales, value_scales);
  });
}

Call CallOf(Arrays& arrays, const S32& slots, const S32& kv_lens, const S32& page_indices,
            const S32& cu_q_lens, const S32& num_seqs, const F32& sinks, Options options) {
  const auto q = arrays.q.dimensions(), keys = arrays.keys->dimensions();
  if (sinks.element_count() > 0) options.sinks = sinks.typed_data();
  return {{q[1], keys[1], q[2], keys[3], page_indices.dimensions()[1]},
          {num_seqs.typed_data()[0], slots.typed_data(), kv_lens.typed_data(), page_indices.typed_data(),
           cu_q_lens.typed_data()},
          options, q[0], arrays.k.element_count() > 0};
}

ffi::Error RaggedAttention(PENSTOCK_PARAMETERS(RaggedAttention)) {
  if (keys.untyped_data() != new_keys->untyped_data() || values.untyped_data() != new_values->untyped_data())
    return ffi::Error::Internal("the KV cache was copied: it must be donated");
  Arrays arrays{q, k, v, out, new_keys, new_values};
  const Call call = CallOf(arrays, slots, kv_lens, page_indices, cu_q_lens, num_seqs, sinks,
                           {scale, window, soft_cap, nullptr});
  return RunOfTypes(pool, call, arrays, nullptr, nullptr);
}

ffi::Error RaggedAttentionInt8(PENSTOCK_PARAMETERS(RaggedAttentionInt8)) {
  if (keys.untyped_data() != new_keys->untyped_data() || values.untyped_data() != new_values->untyped_data() ||
      key_scales.untyped_data() != new_key_scales->untyped_data() ||
      value_scales.untyped_data() != new_value_scales->untyped_data())
    return ffi::Error::Internal("the KV cache was copied: it must be donated");
  Arrays arrays{q, k, v, out, new_keys, new_values};
  const Call call = CallOf(arrays, slots, kv_lens, page_indices, cu_q_lens, num_seqs, sinks,
                           {scale, window, soft_cap, nullptr});
  return RunOfTypes(pool, call, arrays, new_key_scales->typed_data(), new_value_scales->typed_data());
}

}  // namespace

PENSTOCK_DEFINE_KERNEL(RaggedAttention);
PENSTOCK_DEFINE_KERNEL(RaggedAttentionInt8);

}  // namespace attention
}  // namespace penstock
