// The halves of decoder layers for CPUs: attention, and the feed-forward, with the norms and residual connections around
// them. One call of XLA's is given as many of them as come one after the other, all but the last of a whole model.
//
// A step of few rows is as fast as the weights come from memory, if no thread waits: what lies between two matmuls takes
// microseconds, XLA's way from one operation to the next takes as many, and a thread of its pool comes to help a tenth of
// a millisecond after it is called. So a call goes from phase to phase with the same team of threads, on the tokens that
// there are instead of a padded number.
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
      return RunGrid(team, rows, [&](int64_t first_row, int64_t num_rows, int64_t panel, int64_t next_panel) {
        RunTask(shape, first_row, num_rows, panel, next_panel, x, weights, put);
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
    team.Run(grid.size(), [&](int64_t i) { work(grid.FirstRow(i), grid.NumRows(i), grid.Panel(i), grid.NextPanel(i)); });
  }

  template <int kBits, typename Rows>
  void MultiplyQuantized(Team& team, int64_t rows, const QuantizedWeights& weights, const Rows& x,
                         const Put& put) const {
    RunGrid(team, rows, [&](int64_t first_row, int64_t num_rows, int64_t panel, int64_t next_panel) {
      RunQuantizedTask<kBits>(shape, weights, x, first_row, num_rows, panel, next_panel, put);
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

// What a half is besides its arrays, in the order in which Python gives it (`_Numbers` in packed_block.py).
struct Integers {
  int64_t is_attention;
  int64_t is_layer_norm;
  int64_t columns, gate;  // of the first matmul
  int64_t first_offset, first_reads_bytes, last_offset, last_reads_bytes;
  int64_t num_heads, head_dim, is_qk_layer_norm, is_interleaved, window;  // of attention
};
struct Floats {
  float eps, residual_scale;
  float qk_eps, scale, soft_cap;  // of attention
};

// The arrays of a call, one after the other.
class Arrays {
 public:
  Arrays(const ffi::RemainingArgs& given, const ffi::RemainingRets& results) : given_(given), results_(results) {}

  ffi::AnyBuffer Next() { return *given_.get<ffi::AnyBuffer>(num_given_++); }
  const int32_t* OfIntegers() { return static_cast<const int32_t*>(Next().untyped_data()); }
  F32 OfFloats() { return *given_.get<F32>(num_given_++); }
  const float* FloatsOrNull() { return OrNull(OfFloats()); }
  Norm NextNorm(float eps, bool is_layer) { return {FloatsOrNull(), eps, is_layer}; }
  LinearBuffers NextLinear(int64_t offset, bool reads_bytes) {
    const ffi::AnyBuffer weights = Next(), scales = Next(), offsets = Next();
    return {weights, scales, offsets, OfFloats(), offset, reads_bytes};
  }
  // One that is changed where it is: it has to be the next result too.
  ffi::AnyBuffer NextChanged() {
    const ffi::AnyBuffer array = Next();
    if (array.element_count() == 0) return array;  // a part that this cache does not have
    is_in_place_ &= array.untyped_data() == (*results_.get<ffi::AnyBuffer>(num_results_++))->untyped_data();
    return array;
  }
  bool is_in_place() const { return is_in_place_; }

 private:
  const ffi::RemainingArgs& given_;
  const ffi::RemainingRets& results_;
  size_t num_given_ = 0, num_results_ = 0;
  bool is_in_place_ = true;
};

// The residual stream, and who works on it.
struct Stream {
  Team& team;
  ffi::AnyBuffer x;
  int64_t hidden() const { return x.dimensions()[1]; }
};

ffi::Error RunAttention(const Stream& stream, const Integers& ints, const Floats& floats, Arrays& arrays) {
  const ffi::AnyBuffer keys = arrays.NextChanged(), values = arrays.NextChanged();
  const ffi::AnyBuffer key_scales = arrays.NextChanged(), value_scales = arrays.NextChanged();
  const int32_t *slots = arrays.OfIntegers(), *kv_lens = arrays.OfIntegers();
  const ffi::AnyBuffer page_indices = arrays.Next();
  const int32_t *cu_q_lens = arrays.OfIntegers(), *num_seqs = arrays.OfIntegers();
  const Norm before = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const Norm after = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const LinearBuffers qkv = arrays.NextLinear(ints.first_offset, ints.first_reads_bytes);
  const LinearBuffers out = arrays.NextLinear(ints.last_offset, ints.last_reads_bytes);
  const F32 q_norm = arrays.OfFloats(), k_norm = arrays.OfFloats(), cos = arrays.OfFloats(), sin = arrays.OfFloats();
  const F32 query_scales = arrays.OfFloats(), sinks = arrays.OfFloats();
  if (!arrays.is_in_place()) return ffi::Error::Internal("the KV cache was copied: it must be donated");
  const auto key_dims = keys.dimensions();
  const attention::Shape shape{ints.num_heads, key_dims[1], ints.head_dim, key_dims[3], page_indices.dimensions()[1]};
  const attention::Batch batch{*num_seqs, slots, kv_lens, static_cast<const int32_t*>(page_indices.untyped_data()),
                               cu_q_lens};
  const bool is_layer = ints.is_qk_layer_norm;
  const Heads heads{{OrNull(q_norm), floats.qk_eps, is_layer},
                    {OrNull(k_norm), floats.qk_eps, is_layer},
                    static_cast<int64_t>(q_norm.element_count()),
                    static_cast<int64_t>(k_norm.element_count()),
                    OrNull(cos),
                    OrNull(sin),
                    cos.dimensions().back(),
                    ints.is_interleaved != 0,
                    OrNull(query_scales)};
  return OfTypes(stream.x, keys, [&](auto* of_x, auto* of_cache) {
    using T = std::remove_pointer_t<decltype(of_x)>;
    using C = std::remove_pointer_t<decltype(of_cache)>;
    AttentionHalf<T, C>{
        shape,
        batch,
        {floats.scale, ints.window, floats.soft_cap, OrNull(sinks)},
        {static_cast<C*>(keys.untyped_data()), static_cast<C*>(values.untyped_data()),
         static_cast<float*>(key_scales.untyped_data()), static_cast<float*>(value_scales.untyped_data())},
        heads,
        {qkv, stream.hidden(), ints.columns, Gate::kNone},
        {out, ints.num_heads * ints.head_dim, stream.hidden(), Gate::kNone},
        {static_cast<T*>(stream.x.untyped_data()), batch.num_tokens(), stream.hidden(), floats.residual_scale, before,
         after},
    }.Run(stream.team);
  });
}

ffi::Error RunFeedForward(const Stream& stream, const Integers& ints, const Floats& floats, Arrays& arrays) {
  const ffi::AnyBuffer source = arrays.Next();  // what it reads, where that is not x; or empty
  const int64_t rows = *arrays.OfIntegers();
  const Norm before = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const Norm after = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const LinearBuffers gate_up = arrays.NextLinear(ints.first_offset, ints.first_reads_bytes);
  const LinearBuffers down = arrays.NextLinear(ints.last_offset, ints.last_reads_bytes);
  return OfType(stream.x, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    static thread_local Buffer normed, activated, whole;
    const Residual<T> residual{static_cast<T*>(stream.x.untyped_data()), rows, stream.hidden(), floats.residual_scale,
                               before, after};
    const Linear<T> first(gate_up, stream.hidden(), ints.columns, Gate{ints.gate});
    const Linear<T> last(down, ints.columns, stream.hidden(), Gate::kNone);
    const T* read = source.element_count() ? static_cast<const T*>(source.untyped_data()) : nullptr;
    const T* input = residual.Read(stream.team, read, normed);
    T* inner = activated.Of<T>(rows * ints.columns);
    first.Multiply(stream.team, rows, input, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      StoreRow(width, values, inner + row * ints.columns + column);
    });
    residual.Add(stream.team, last, inner, whole);
  });
}

ffi::Error RunHalves(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::RemainingRets results,
                     ffi::Span<const int64_t> integers, ffi::Span<const float> floats) {
  constexpr size_t kIntegers = sizeof(Integers) / sizeof(int64_t), kFloats = sizeof(Floats) / sizeof(float);
  Arrays arrays(given, results);
  const ffi::AnyBuffer x = arrays.NextChanged();
  if (!arrays.is_in_place()) return ffi::Error::Internal("the residual stream was copied");
  Team team(pool);
  const Stream stream{team, x};
  for (size_t half = 0; half < integers.size() / kIntegers; ++half) {
    Integers own_integers;
    Floats own_floats;
    std::memcpy(&own_integers, integers.begin() + half * kIntegers, sizeof own_integers);
    std::memcpy(&own_floats, floats.begin() + half * kFloats, sizeof own_floats);
    const auto run = own_integers.is_attention ? RunAttention : RunFeedForward;
    if (ffi::Error error = run(stream, own_integers, own_floats, arrays); error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockHalves, penstock::RunHalves,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("integers")
                                  .Attr<ffi::Span<const float>>("floats"));
