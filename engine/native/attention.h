// Ragged paged attention for CPUs: what a step's layers share, and the work of one task. No thread and no XLA in it: who
// calls decides which thread runs which task.
//
//   Plan plan;                                            // kept from step to step: it holds on to its memory
//   plan.Build(shape, batch, window);                     // once a step for all layers with the same window
//   WriteToken(shape, batch.slots[t], k, v, cache);       // for every token of the step, before any task
//   plan.Run(i, options, queries, out, cache, scratch);   // for i in [0, plan.num_tasks()), in any order, on any thread
//
// A task is one block of queries of one sequence, for one KV head and the query heads that share it: its rows. It goes
// through the pages a few at a time, with two matmuls for each: queries by keys, and weights by values. The softmax is
// online (Milakov and Gimelshein, arXiv 1805.02867).
//
// Keys are [num_pages, num_kv_heads, head_dim, page_size], so that neighbouring lanes are neighbouring keys, and values
// [num_pages, num_kv_heads, page_size, head_dim], f32 or bf16. Arithmetic is f32 throughout.

#ifndef PENSTOCK_ATTENTION_H_
#define PENSTOCK_ATTENTION_H_

#include <limits>
#include <vector>

#include "kernels.h"

namespace penstock {
namespace attention {

constexpr int64_t kRowsPerTask = 64;     // about: at least one query with all its heads
constexpr int64_t kKeysPerStride = 128;  // about: at least one page
constexpr float kLowest = -1e30f;        // finite, so that a difference of two is 0

// Of a layer and its cache.
struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size, pages_per_seq;
  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t queries_per_task() const { return std::max<int64_t>(1, kRowsPerTask / group()); }
  int64_t pages_per_stride() const { return std::max<int64_t>(1, kKeysPerStride / page_size); }
};

// Of a step, as RaggedBatch has it.
struct Batch {
  int64_t num_seqs;
  const int32_t* slots;         // [num_tokens]
  const int32_t* kv_lens;       // [max_seqs]
  const int32_t* page_indices;  // [max_seqs, pages_per_seq]
  const int32_t* cu_q_lens;     // [max_seqs + 1]
  int64_t num_tokens() const { return cu_q_lens[num_seqs]; }  // that are not padding
};

// How dot products of queries and keys become scores, and which of them are seen.
struct Options {
  float scale;
  int64_t window;      // 0: no window
  float soft_cap;      // 0: none
  const float* sinks;  // [num_heads], the score of one more key without a value; or null
};

// A token's heads lie side by side, and `stride` elements behind them those of the next.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  T* at(int64_t token, int64_t element) const { return data + token * stride + element; }
};

// The pages of one layer, whose elements are of type C: float or BFloat16.
template <typename C>
struct Cache {
  C* keys;
  C* values;
};

// One thread's working memory, to be kept from call to call.
struct Scratch {
  std::vector<float> queries;  // [rows, head_dim], scaled
  std::vector<float> scores;   // [rows, keys of a stride], then their weights
  std::vector<float> sums;     // [rows, head_dim]
  std::vector<float> tops, totals;
};

template <typename T>
inline bool IsFinite(T value) {
  uint32_t bits;
  const float wide = Load(value);
  std::memcpy(&bits, &wide, sizeof bits);
  return (bits & 0x7f800000u) != 0x7f800000u;
}

// Keys and values of one token, [num_kv_heads, head_dim] in f32 or bf16 with keys rotated, into the pages.
template <typename T, typename C>
void WriteToken(const Shape& shape, int64_t slot, const T* k, const T* v, const Cache<C>& cache) {
  const int64_t page = slot / shape.page_size, place = slot % shape.page_size;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    const int64_t start = (page * shape.num_kv_heads + head) * shape.page_size * shape.head_dim;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      Store(&cache.keys[start + d * shape.page_size + place], Load(k[head * shape.head_dim + d]));
      const T value = v[head * shape.head_dim + d];
      // A NaN among the values would outlast a weight of 0 when another sequence gets the page.
      Store(&cache.values[start + place * shape.head_dim + d], IsFinite(value) ? Load(value) : 0.0f);
    }
  }
}

// A matrix, row-major, of which `stride` elements make a row.
template <typename T>
struct Matrix {
  T* data;
  int64_t stride;
  Matrix<T> At(int64_t row, int64_t column) const { return {data + row * stride + column, stride}; }
};

// out[R][V vectors] += x[R][depth] * w[depth][V vectors]
template <int R, int V, typename T>
inline void AddTile(Matrix<const float> x, Matrix<const T> w, int64_t depth, Matrix<float> out) {
  Vector held[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) held[r][v] = LoadVector(out.data + r * out.stride + v * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    Vector row[V];
    for (int v = 0; v < V; ++v) row[v] = LoadVector(w.data + k * w.stride + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const float value = x.data[r * x.stride + k];
      for (int v = 0; v < V; ++v) held[r][v] += value * row[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) std::memcpy(out.data + r * out.stride + v * kLanes, &held[r][v], sizeof held[r][v]);
}

template <int V, typename T>
void AddColumns(int64_t rows, Matrix<const float> x, Matrix<const T> w, int64_t depth, Matrix<float> out) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) AddTile<kRows, V>(x.At(r, 0), w, depth, out.At(r, 0));
  for (; r + 3 <= rows; r += 3) AddTile<3, V>(x.At(r, 0), w, depth, out.At(r, 0));
  for (; r + 2 <= rows; r += 2) AddTile<2, V>(x.At(r, 0), w, depth, out.At(r, 0));
  for (; r < rows; ++r) AddTile<1, V>(x.At(r, 0), w, depth, out.At(r, 0));
}

// out[rows][columns] += x[rows][depth] * w[depth][columns]. What a row gets does not depend on the other rows.
template <typename T>
void AddMatmul(int64_t rows, int64_t columns, int64_t depth, Matrix<const float> x, Matrix<const T> w,
                Matrix<float> out) {
  int64_t c = 0;
  for (; c + kVectors * kLanes <= columns; c += kVectors * kLanes)
    AddColumns<kVectors>(rows, x, w.At(0, c), depth, out.At(0, c));
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes) AddColumns<2>(rows, x, w.At(0, c), depth, out.At(0, c));
  for (; c + kLanes <= columns; c += kLanes) AddColumns<1>(rows, x, w.At(0, c), depth, out.At(0, c));
  for (; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) {
      float sum = out.data[r * out.stride + c];
      for (int64_t k = 0; k < depth; ++k) sum += x.data[r * x.stride + k] * Load(w.data[k * w.stride + c]);
      out.data[r * out.stride + c] = sum;
    }
}

inline void Cap(float* __restrict scores, int64_t begin, int64_t end, float cap) {
  for (int64_t j = begin; j < end; ++j) scores[j] = cap * Tanh(scores[j] / cap);
}

// Makes weights of one row's scores, of which [begin, end) of `count` are visible, and adds them to its softmax.
inline void Weigh(float* __restrict scores, int64_t begin, int64_t end, int64_t count, float* top, float* total,
                  float* __restrict sums, int64_t head_dim) {
  if (begin >= end) {
    std::fill(scores, scores + count, 0.0f);
    return;
  }
  float highest = *top;
  for (int64_t j = begin; j < end; ++j) highest = std::max(highest, scores[j]);
  float sum = 0.0f;
  for (int64_t j = begin; j < end; ++j) {
    scores[j] = Exp(scores[j] - highest);
    sum += scores[j];
  }
  std::fill(scores, scores + begin, 0.0f);
  std::fill(scores + end, scores + count, 0.0f);
  const float correction = Exp(*top - highest);
  *total = *total * correction + sum;
  *top = highest;
  for (int64_t d = 0; d < head_dim; ++d) sums[d] *= correction;
}

// A step's tasks.
class Plan {
 public:
  void Build(const Shape& shape, const Batch& batch, int64_t window) {
    shape_ = shape, batch_ = batch, window_ = window;
    tasks_.clear();
    for (int32_t s = 0; s < batch.num_seqs; ++s) {
      const int32_t num_queries = batch.cu_q_lens[s + 1] - batch.cu_q_lens[s];
      for (int32_t first = 0; first < num_queries; first += shape.queries_per_task()) {
        const int32_t count = std::min<int32_t>(shape.queries_per_task(), num_queries - first);
        for (int32_t head = 0; head < shape.num_kv_heads; ++head) tasks_.push_back({s, head, first, count});
      }
    }
  }

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }

  // `queries` [num_tokens, num_heads * head_dim] and `out`, of the same shape, are f32 or bf16. `options` have the window
  // that the plan was built for.
  template <typename Q, typename O, typename C>
  void Run(int64_t task, const Options& options, Rows<const Q> queries, Rows<O> out, const Cache<C>& cache,
           Scratch& scratch);

 private:
  struct Task {
    int32_t sequence;
    int32_t kv_head;
    int32_t first_query;  // within the sequence's queries of this step
    int32_t num_queries;
  };

  Shape shape_{};
  Batch batch_{};
  int64_t window_ = 0;
  std::vector<Task> tasks_;
};

template <typename Q, typename O, typename C>
void Plan::Run(int64_t index, const Options& how, Rows<const Q> q, Rows<O> out, const Cache<C>& cache,
               Scratch& scratch) {
  const Shape& shape = shape_;
  const Batch& batch = batch_;
  const Task& task = tasks_[index];
  const float* sinks = how.sinks;
  const int64_t head_dim = shape.head_dim, page_size = shape.page_size, group = shape.group();
  const int64_t start = batch.cu_q_lens[task.sequence] + task.first_query;
  const int64_t num_queries = batch.cu_q_lens[task.sequence + 1] - batch.cu_q_lens[task.sequence];
  const int64_t first_position = batch.kv_lens[task.sequence] - num_queries + task.first_query;
  const int64_t last_position = first_position + task.num_queries - 1;
  const int64_t rows = task.num_queries * group;  // row = query * group + head within the group
  const int64_t stride = shape.pages_per_stride() * page_size;

  scratch.queries.resize(rows * head_dim);
  scratch.scores.resize(rows * stride);
  scratch.sums.assign(rows * head_dim, 0.0f);
  scratch.tops.assign(rows, kLowest);
  scratch.totals.assign(rows, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    const Q* from = q.at(start + i / group, (task.kv_head * group + i % group) * head_dim);
    for (int64_t d = 0; d < head_dim; ++d) scratch.queries[i * head_dim + d] = Load(from[d]) * how.scale;
  }
  if (sinks != nullptr) {  // the first key that a row sees, without a value
    for (int64_t i = 0; i < rows; ++i) scratch.tops[i] = sinks[task.kv_head * group + i % group];
    scratch.totals.assign(rows, 1.0f);
  }

  const int64_t window = window_;
  const int32_t* pages = batch.page_indices + task.sequence * shape.pages_per_seq;
  const auto offset = [&](int64_t p) { return (pages[p] * shape.num_kv_heads + task.kv_head) * page_size * head_dim; };
  const int64_t first_key = window > 0 ? std::max<int64_t>(0, first_position - window + 1) : 0;
  const int64_t end_page = last_position / page_size + 1;
  for (int64_t first = first_key / page_size; first < end_page; first += shape.pages_per_stride()) {
    const int64_t last = std::min(first + shape.pages_per_stride(), end_page);
    const int64_t before = first * page_size;
    const int64_t count = std::min((last - first) * page_size, last_position + 1 - before);
    std::fill(scratch.scores.begin(), scratch.scores.end(), 0.0f);
    for (int64_t p = first; p < last; ++p)
      AddMatmul<C>(rows, page_size, head_dim, {scratch.queries.data(), head_dim}, {cache.keys + offset(p), page_size},
                    {scratch.scores.data() + (p - first) * page_size, stride});
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t position = first_position + i / group;
      const int64_t begin = window > 0 ? std::max<int64_t>(0, position - window + 1 - before) : 0;
      const int64_t end = std::min(count, position + 1 - before);
      if (how.soft_cap > 0) Cap(scratch.scores.data() + i * stride, begin, end, how.soft_cap);
      Weigh(scratch.scores.data() + i * stride, begin, end, count, &scratch.tops[i], &scratch.totals[i], scratch.sums.data() + i * head_dim, head_dim);
    }
    for (int64_t p = first; p < last; ++p) {
      const int64_t done = (p - first) * page_size;
      AddMatmul<C>(rows, head_dim, std::min(page_size, count - done), {scratch.scores.data() + done, stride},
                    {cache.values + offset(p), head_dim}, {scratch.sums.data(), head_dim});
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    O* to = out.at(start + i / group, (task.kv_head * group + i % group) * head_dim);
    const float factor = 1.0f / scratch.totals[i];
    for (int64_t d = 0; d < head_dim; ++d) Store(&to[d], scratch.sums[i * head_dim + d] * factor);
  }
}

}  // namespace attention
}  // namespace penstock

#endif  // PENSTOCK_ATTENTION_H_
