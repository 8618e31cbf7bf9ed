// Ragged paged attention for CPUs, called by XLA through its foreign function interface.
//
// The same contract as XlaAttention: writes this step's keys and values into the pages, then attends, sequence by
// sequence, over the pages that the sequence has and no others.

#include "attention.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace attention {
namespace {

template <typename T>
void Run(ffi::ThreadPool& pool, const Shape& shape, const Batch& batch, const Options& options, int64_t num_tokens,
         const T* q, const T* k, const T* v, const Cache<T>& cache, T* out) {
  const int64_t kv_stride = shape.num_kv_heads * shape.head_dim, stride = shape.num_heads * shape.head_dim;
  for (int64_t t = 0; t < num_tokens; ++t)
    WriteToken(shape, batch.slots[t], k + t * kv_stride, v + t * kv_stride, cache);
  std::memset(out + batch.num_tokens() * stride, 0, (num_tokens - batch.num_tokens()) * stride * sizeof(T));
  static thread_local Plan plan;
  Plan& tasks = plan;
  tasks.Build(shape, batch, options.window);
  ForEach(pool, tasks.num_tasks(), [&](int64_t i) {
    static thread_local Scratch scratch;
    tasks.Run(i, options, Rows<const T>{q, stride}, Rows<T>{out, stride}, cache, scratch);
  });
}

ffi::Error RaggedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::Buffer<ffi::S32> slots,
                           ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> page_indices,
                           ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs,
                           ffi::Buffer<ffi::F32> sinks,  // one for each query head, or none
                           ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_keys,
                           ffi::Result<ffi::AnyBuffer> new_values, float scale, int64_t window,
                           float soft_cap) {
  if (keys.untyped_data() != new_keys->untyped_data() || values.untyped_data() != new_values->untyped_data())
    return ffi::Error::Internal("the KV cache was copied: it must be donated");
  const auto q_dims = q.dimensions(), key_dims = keys.dimensions();
  const Shape shape{q_dims[1], key_dims[1], q_dims[2], key_dims[3], page_indices.dimensions()[1]};
  const Batch batch{num_seqs.typed_data()[0], slots.typed_data(), kv_lens.typed_data(), page_indices.typed_data(),
                    cu_q_lens.typed_data()};
  const float* head_sinks = sinks.element_count() == 0 ? nullptr : sinks.typed_data();
  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Cache<T> cache{static_cast<T*>(new_keys->untyped_data()), static_cast<T*>(new_values->untyped_data())};
    Run<T>(pool, shape, batch, Options{scale, window, soft_cap, head_sinks}, q_dims[0],
           static_cast<const T*>(q.untyped_data()), static_cast<const T*>(k.untyped_data()),
           static_cast<const T*>(v.untyped_data()), cache, static_cast<T*>(out->untyped_data()));
  };
  if (q.element_type() != keys.element_type()) return ffi::Error::InvalidArgument("q and the cache differ in type");
  if (q.element_type() == ffi::F32) run(static_cast<float*>(nullptr));
  else if (q.element_type() == ffi::BF16) run(static_cast<BFloat16*>(nullptr));
  else return ffi::Error::InvalidArgument("only f32 and bf16 are supported");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace attention
}  // namespace penstock

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockRaggedAttention, penstock::attention::RaggedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));
