// The attention half of a layer: from the residual stream through pages to the residual stream.

#ifndef PENSTOCK_ATTENTION_HALF_H_
#define PENSTOCK_ATTENTION_HALF_H_

#include "attention.h"
#include "linear.h"

namespace penstock {

struct Heads {
  Norm q_norm, k_norm;
  int64_t q_normed, k_normed;  // number of features normed together: a head's, or all
  const float *cos, *sin;      // [tokens, pairs], or null
  int64_t pairs;
  bool is_interleaved;
  const float* query_scales;  // [tokens], or null
  bool has_gate;              // for each feature of the result; its projections follow the values
};

// Norms, rotates and scales one token's queries or keys, `count` features of them.
inline void PrepareHeads(const Heads& heads, const Norm& norm, int64_t normed, int64_t token, int64_t count,
                         int64_t head_dim, float* x) {
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
    attention::Plan& plan = kept_plan;  // this thread's, shared by its team
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
    if (heads.has_gate) {
      const float* gates = in_f32 + stride - q_size;
      ForEachRow(team, rows, [&](int64_t row) { Scale(q_size, gates + row * stride, y + row * q_size); });
    }
    residual.Add(team, out, y, whole);
  }

  // Scales by the sigmoids of the gates.
  static void Scale(int64_t size, const float* gates, T* y) {
    for (int64_t i = 0; i < size; i += kLanes)
      StoreUpTo(y + i, LoadUpTo(y + i, size - i) * Sigmoid(LoadUpTo(gates + i, size - i)), size - i);
  }

  // Writes queries to `q`, keys and values to their page.
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

}  // namespace penstock

#endif  // PENSTOCK_ATTENTION_HALF_H_
