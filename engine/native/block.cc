// The two halves of a decoder layer for CPUs, each of them one call of XLA's: attention, and the feed-forward, with the
// norms and residual connections around them.
//
// A step of few rows is as fast as the weights come from memory, if no thread waits: what lies between two matmuls takes
// microseconds, and XLA's way from one operation to the next takes as many. So a half goes from phase to phase with the
// same team of threads, on the tokens that there are instead of a padded number.
//
// Activations between the phases are f32, but for what a matmul or attention reads, which is of the model's type.

#include "attention.h"
#include "buffers.h"
#include "matmul.h"
#include "quantized.h"
#include "rows.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace {

constexpr int64_t kRowsEach = 4;  // of a phase that goes row by row

template <typename Work>
void ForEachRow(Team& team, int64_t rows, Work work) {
  team.Run((rows + kRowsEach - 1) / kRowsEach, [&](int64_t i) {
    const int64_t end = std::min(rows, (i + 1) * kRowsEach);
    for (int64_t row = i * kRowsEach; row < end; ++row) work(row);
  });
}

// Takes columns [column, column + width) of a row of a matmul's result. Refers to the function that it is made of.
class Put {
 public:
  template <typename Function>
  Put(const Function& function)  // NOLINT: what is given to a matmul is written where it is called
      : function_(&function), call_([](const void* put, int64_t row, int64_t column, const float* values, int64_t width) {
          (*static_cast<const Function*>(put))(row, column, values, width);
        }) {}
  void operator()(int64_t row, int64_t column, const float* values, int64_t width) const {
    call_(function_, row, column, values, width);
  }

 private:
  const void* function_;
  void (*call_)(const void*, int64_t, int64_t, const float*, int64_t);
};

// A linear layer as XLA gives it: weights in panels, or codes with scales and maybe offsets.
struct LinearBuffers {
  ffi::AnyBuffer weights, scales, offsets;
  F32 bias;
  int64_t offset;
  bool reads_bytes;  // its rows are quantized
};

// A linear layer, and how a team multiplies with it. T is the type of the rows.
template <typename T>
struct Linear {
  LinearBuffers buffers;
  Matmul shape;

  Linear(const LinearBuffers& buffers, int64_t depth, int64_t columns, Gate gate)
      : buffers(buffers), shape{depth, buffers.weights.dimensions().front(), columns, gate, OrNull(buffers.bias)} {}

  void Multiply(Team& team, int64_t rows, const T* x, const Put& put) const {
    if (buffers.weights.element_type() != ffi::U32) {
      const T* weights = static_cast<const T*>(buffers.weights.untyped_data());
      return RunGrid(team, rows, [&](int64_t first_row, int64_t num_rows, int64_t panel) {
        RunTask(shape, first_row, num_rows, panel, x, weights, put);
      });
    }
    const QuantizedWeights weights =
        QuantizedOf(buffers.weights, buffers.scales, buffers.offsets, shape.depth, buffers.offset);
    if (buffers.reads_bytes) return MultiplyQuantized<8>(team, rows, weights, Quantized(team, rows, x), put);
    const PlainRows<T> plain{x, shape.depth};
    if (buffers.weights.dimensions()[1] * kInLane<8> == shape.depth)
      MultiplyQuantized<8>(team, rows, weights, plain, put);
    else
      MultiplyQuantized<4>(team, rows, weights, plain, put);
  }

 private:
  template <typename Work>
  void RunGrid(Team& team, int64_t rows, const Work& work) const {
    const Grid grid(rows, shape.panels, team.size());
    team.Run(grid.size(), [&](int64_t i) { work(grid.FirstRow(i), grid.NumRows(i), grid.Panel(i)); });
  }

  template <int kBits, typename Rows>
  void MultiplyQuantized(Team& team, int64_t rows, const QuantizedWeights& weights, const Rows& x,
                         const Put& put) const {
    RunGrid(team, rows, [&](int64_t first_row, int64_t num_rows, int64_t panel) {
      RunQuantizedTask<kBits>(shape, weights, x, first_row, num_rows, panel, put);
    });
  }

  ByteRows Quantized(Team& team, int64_t rows, const T* x) const {
    static thread_local Buffer kept_bytes, kept_scales;
    uint8_t* bytes = kept_bytes.Of<uint8_t>(rows * shape.depth);
    float* scales = kept_scales.Of<float>(rows);
    ForEachRow(team, rows, [&](int64_t row) {
      scales[row] = QuantizeRow(x + row * shape.depth, shape.depth, bytes + row * shape.depth);
    });
    return {bytes, scales, shape.depth};
  }
};

// A residual stream [rows, size], which a half reads through a norm and adds its result to.
template <typename T>
struct Residual {
  T* x;
  int64_t rows, size;
  float scale;     // of what is added
  Norm before, after;

  // What the half's first matmul reads: `source` or, where there is none, the stream itself.
  const T* Read(Team& team, const T* source, Buffer& buffer) const {
    const T* from = source != nullptr ? source : x;
    if (before.factors == nullptr) return from;
    T* normed = buffer.Of<T>(rows * size);
    ForEachRow(team, rows, [&](int64_t row) { NormRow(before, size, from + row * size, normed + row * size); });
    return normed;
  }

  // Adds inner times the half's last matmul.
  void Add(Team& team, const Linear<T>& linear, const T* inner, Buffer& buffer) const {
    if (after.factors == nullptr) {
      linear.Multiply(team, rows, inner, [&](int64_t row, int64_t column, const float* values, int64_t width) {
        AddRow(width, scale, values, x + row * size + column);
      });
      return;
    }
    float* whole = buffer.Of<float>(rows * size);
    linear.Multiply(team, rows, inner, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      std::memcpy(whole + row * size + column, values, width * sizeof(float));
    });
    ForEachRow(team, rows, [&](int64_t row) {
      float* own = whole + row * size;
      NormRow(after, size, own, own);
      AddRow(size, scale, own, x + row * size);
    });
  }
};

struct Heads {
  Norm q_norm, k_norm;
  int64_t q_normed, k_normed;  // features that are normed together: a head's, or all
  const float *cos, *sin;      // [tokens, pairs], or null
  int64_t pairs;
  bool is_interleaved;
  const float* query_scales;  // [tokens], or null
};

// Norms, rotates and scales one token's queries or keys, `count` features of them.
void PrepareHeads(const Heads& heads, const Norm& norm, int64_t normed, int64_t token, int64_t count, int64_t head_dim,
                  float* x) {
  if (norm.factors != nullptr)
    for (int64_t i = 0; i < count; i += normed) NormRow(norm, normed, x + i, x + i);
  if (heads.cos == nullptr) return;
  const Rotation rotation{heads.cos + token * heads.pairs, heads.sin + token * heads.pairs, heads.pairs,
                          heads.is_interleaved};
  for (int64_t i = 0; i < count; i += head_dim) RotateHead(rotation, x + i);
}

template <typename T, typename C>
struct AttentionHalf {
  attention::Shape shape;
  attention::Batch batch;
  attention::Options options;
  attention::Cache<C> cache;
  Heads heads;
  Linear<T> qkv, out;
  Residual<T> residual;

  void Run(Team& team) const {
    static thread_local Buffer normed, projected, queries, attended, whole;
    static thread_local attention::Plan kept_plan;
    attention::Plan& plan = kept_plan;  // that of this thread, for all of the team
    const int64_t rows = residual.rows, q_size = shape.num_heads * shape.head_dim;
    const int64_t stride = qkv.shape.columns;
    const T* x = residual.Read(team, nullptr, normed);
    float* in_f32 = projected.Of<float>(rows * stride);
    qkv.Multiply(team, rows, x, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      std::memcpy(in_f32 + row * stride + column, values, width * sizeof(float));
    });
    T* q = queries.Of<T>(rows * q_size);
    ForEachRow(team, rows, [&](int64_t row) { Prepare(row, in_f32 + row * stride, q + row * q_size); });
    plan.Build(shape, batch, options.window);
    T* y = attended.Of<T>(rows * q_size);
    team.Run(plan.num_tasks(), [&](int64_t i) {
      static thread_local attention::Scratch scratch;
      plan.Run(i, options, attention::Rows<const T>{q, q_size}, attention::Rows<T>{y, q_size}, cache, scratch);
    });
    residual.Add(team, out, y, whole);
  }

  // Queries to `q`, keys and values to their page.
  void Prepare(int64_t token, float* qkv_row, T* q) const {
    static thread_local Buffer kept;
    const int64_t q_size = shape.num_heads * shape.head_dim, kv_size = shape.num_kv_heads * shape.head_dim;
    float *k = qkv_row + q_size, *v = k + kv_size;
    PrepareHeads(heads, heads.q_norm, heads.q_normed, token, q_size, shape.head_dim, qkv_row);
    PrepareHeads(heads, heads.k_norm, heads.k_normed, token, kv_size, shape.head_dim, k);
    const float scale = heads.query_scales != nullptr ? heads.query_scales[token] : 1.0f;
    for (int64_t i = 0; i < q_size; ++i) Store(&q[i], qkv_row[i] * scale);
    T* rounded = kept.Of<T>(2 * kv_size);
    for (int64_t i = 0; i < kv_size; ++i) Store(&rounded[i], k[i]), Store(&rounded[kv_size + i], v[i]);
    attention::WriteToken(shape, batch.slots[token], rounded, rounded + kv_size, cache);
  }
};

// Calls `run` with a null pointer of the type that x has.
template <typename Run>
ffi::Error OfType(const ffi::AnyBuffer& x, Run run) {
  if (x.element_type() == ffi::F32) run(static_cast<float*>(nullptr));
  else if (x.element_type() == ffi::BF16) run(static_cast<BFloat16*>(nullptr));
  else return ffi::Error::InvalidArgument("only f32 and bf16 are supported");
  return ffi::Error::Success();
}

// Calls `run` with null pointers of the types of x and of what the cache holds.
template <typename Run>
ffi::Error OfTypes(const ffi::AnyBuffer& x, const ffi::AnyBuffer& cache, Run run) {
  if (cache.element_type() != ffi::S8 && cache.element_type() != x.element_type())
    return ffi::Error::InvalidArgument("the cache holds neither int8 nor the type of the activations");
  return OfType(x, [&](auto* of) {
    if (cache.element_type() == ffi::S8) run(of, static_cast<int8_t*>(nullptr));
    else run(of, of);
  });
}

template <typename Argument, typename Result>
bool IsSame(const Argument& argument, Result& result) {
  return argument.element_count() == 0 || argument.untyped_data() == result->untyped_data();
}

ffi::Error RunAttention(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                        F32 key_scales, F32 value_scales,  // of int8 pages; else empty
                        S32 slots, S32 kv_lens, S32 page_indices, S32 cu_q_lens, S32 num_seqs, F32 norm, F32 out_norm,
                        ffi::AnyBuffer qkv, ffi::AnyBuffer qkv_scales, ffi::AnyBuffer qkv_offsets, F32 qkv_bias,
                        ffi::AnyBuffer out, ffi::AnyBuffer out_scales, ffi::AnyBuffer out_offsets, F32 out_bias,
                        F32 q_norm, F32 k_norm, F32 cos, F32 sin, F32 query_scales, F32 sinks, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_values,
                        ffi::Result<F32> new_key_scales, ffi::Result<F32> new_value_scales, int64_t num_heads,
                        int64_t head_dim, float eps, bool is_layer_norm, float residual_scale, float qk_eps,
                        bool is_qk_layer_norm, bool is_interleaved, float scale, int64_t window, float soft_cap, int64_t first_offset,
                        bool first_reads_bytes, int64_t last_offset, bool last_reads_bytes) {
  if (!IsSame(x, y) || !IsSame(keys, new_keys) || !IsSame(values, new_values) || !IsSame(key_scales, new_key_scales) ||
      !IsSame(value_scales, new_value_scales))
    return ffi::Error::Internal("the KV cache or the residual stream was copied: they must be donated");
  const auto key_dims = keys.dimensions();
  const int64_t hidden = x.dimensions()[1], kv_heads = key_dims[1];
  const attention::Shape shape{num_heads, kv_heads, head_dim, key_dims[3], page_indices.dimensions()[1]};
  const attention::Batch batch{num_seqs.typed_data()[0], slots.typed_data(), kv_lens.typed_data(),
                               page_indices.typed_data(), cu_q_lens.typed_data()};
  const Heads heads{{OrNull(q_norm), qk_eps, is_qk_layer_norm},
                    {OrNull(k_norm), qk_eps, is_qk_layer_norm},
                    static_cast<int64_t>(q_norm.element_count()),
                    static_cast<int64_t>(k_norm.element_count()),
                    OrNull(cos),
                    OrNull(sin),
                    cos.dimensions().back(),
                    is_interleaved,
                    OrNull(query_scales)};
  return OfTypes(x, keys, [&](auto* of_x, auto* of_cache) {
    using T = std::remove_pointer_t<decltype(of_x)>;
    using C = std::remove_pointer_t<decltype(of_cache)>;
    Team team(pool);
    AttentionHalf<T, C>{
        shape,
        batch,
        {scale, window, soft_cap, OrNull(sinks)},
        {static_cast<C*>(new_keys->untyped_data()), static_cast<C*>(new_values->untyped_data()),
         new_key_scales->typed_data(), new_value_scales->typed_data()},
        heads,
        {{qkv, qkv_scales, qkv_offsets, qkv_bias, first_offset, first_reads_bytes},
         hidden, (num_heads + 2 * kv_heads) * head_dim, Gate::kNone},
        {{out, out_scales, out_offsets, out_bias, last_offset, last_reads_bytes},
         num_heads * head_dim, hidden, Gate::kNone},
        {static_cast<T*>(y->untyped_data()), batch.num_tokens(), hidden, residual_scale,
         {OrNull(norm), eps, is_layer_norm}, {OrNull(out_norm), eps, is_layer_norm}},
    }.Run(team);
  });
}

ffi::Error RunFeedForward(ffi::ThreadPool pool, ffi::AnyBuffer x,
                          ffi::AnyBuffer source,  // what it reads, where that is not x; or empty
                          S32 num_rows, F32 norm, F32 out_norm, ffi::AnyBuffer gate_up, ffi::AnyBuffer gate_up_scales,
                          ffi::AnyBuffer gate_up_offsets, F32 gate_up_bias, ffi::AnyBuffer down,
                          ffi::AnyBuffer down_scales, ffi::AnyBuffer down_offsets, F32 down_bias,
                          ffi::Result<ffi::AnyBuffer> y, int64_t intermediate, int64_t gate, float eps,
                          bool is_layer_norm, float residual_scale, int64_t first_offset, bool first_reads_bytes,
                          int64_t last_offset, bool last_reads_bytes) {
  if (!IsSame(x, y)) return ffi::Error::Internal("the residual stream was copied");
  const int64_t hidden = x.dimensions()[1], rows = num_rows.typed_data()[0];
  return OfType(x, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    static thread_local Buffer normed, activated, whole;
    Team team(pool);
    const Residual<T> residual{static_cast<T*>(y->untyped_data()), rows, hidden, residual_scale,
                               {OrNull(norm), eps, is_layer_norm}, {OrNull(out_norm), eps, is_layer_norm}};
    const Linear<T> first({gate_up, gate_up_scales, gate_up_offsets, gate_up_bias, first_offset, first_reads_bytes},
                          hidden, intermediate, Gate{gate});
    const Linear<T> last({down, down_scales, down_offsets, down_bias, last_offset, last_reads_bytes}, intermediate,
                         hidden, Gate::kNone);
    const T* read = source.element_count() ? static_cast<const T*>(source.untyped_data()) : nullptr;
    const T* input = residual.Read(team, read, normed);
    T* inner = activated.Of<T>(rows * intermediate);
    first.Multiply(team, rows, input, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      for (int64_t i = 0; i < width; ++i) Store(&inner[row * intermediate + column + i], values[i]);
    });
    residual.Add(team, last, inner, whole);
  });
}

}  // namespace
}  // namespace penstock

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockAttentionHalf, penstock::RunAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::S32>()
                                  .Arg<penstock::S32>()
                                  .Arg<penstock::S32>()
                                  .Arg<penstock::S32>()
                                  .Arg<penstock::S32>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<penstock::F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<penstock::F32>()
                                  .Ret<penstock::F32>()
                                  .Attr<int64_t>("num_heads")
                                  .Attr<int64_t>("head_dim")
                                  .Attr<float>("eps")
                                  .Attr<bool>("is_layer_norm")
                                  .Attr<float>("residual_scale")
                                  .Attr<float>("qk_eps")
                                  .Attr<bool>("is_qk_layer_norm")
                                  .Attr<bool>("is_interleaved")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("first_offset")
                                  .Attr<bool>("first_reads_bytes")
                                  .Attr<int64_t>("last_offset")
                                  .Attr<bool>("last_reads_bytes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockFeedForward, penstock::RunFeedForward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<penstock::S32>()
                                  .Arg<penstock::F32>()
                                  .Arg<penstock::F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<penstock::F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<penstock::F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("intermediate")
                                  .Attr<int64_t>("gate")
                                  .Attr<float>("eps")
                                  .Attr<bool>("is_layer_norm")
                                  .Attr<float>("residual_scale")
                                  .Attr<int64_t>("first_offset")
                                  .Attr<bool>("first_reads_bytes")
                                  .Attr<int64_t>("last_offset")
                                  .Attr<bool>("last_reads_bytes"));
