// Ragged paged attention for CPUs, called by XLA through its foreign function interface.
//
// The same contract as XlaAttention: writes this step's keys and values into the pages, then attends, sequence by
// sequence, over the pages that the sequence has and no others, with online softmax (Milakov and Gimelshein, arXiv 1805.02867).
//
// A task is one block of queries of one sequence, for one KV head and the query heads that share it: its rows. It goes
// through the pages a few at a time, with two matmuls for each: queries by keys, and weights by values.
//
// Keys are [num_pages, num_kv_heads, head_dim, page_size], so that neighbouring lanes are neighbouring keys, and values
// [num_pages, num_kv_heads, page_size, head_dim], f32 or bf16. Arithmetic is f32 throughout.

#include <limits>
#include <vector>

#include "kernels.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace {

constexpr int64_t kRowsPerTask = 64;     // about: at least one query with all its heads
constexpr int64_t kKeysPerStride = 128;  // about: at least one page
constexpr float kLowest = -1e30f;        // finite, so that a difference of two is 0

template <typename T>
inline bool IsFinite(T value) {
  uint32_t bits;
  const float wide = Load(value);
  std::memcpy(&bits, &wide, sizeof bits);
  return (bits & 0x7f800000u) != 0x7f800000u;
}

struct Shape {
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, page_size, pages_per_seq, max_seqs, num_seqs;
  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t queries_per_task() const { return std::max<int64_t>(1, kRowsPerTask / group()); }
  int64_t pages_per_stride() const { return std::max<int64_t>(1, kKeysPerStride / page_size); }
};

struct Batch {
  const int32_t* slots;
  const int32_t* kv_lens;
  const int32_t* page_indices;
  const int32_t* cu_q_lens;
};

struct Task {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_query;  // within the sequence's queries of this step
  int32_t num_queries;
};

// One thread's working memory, kept from call to call.
struct Scratch {
  std::vector<float> queries;  // [rows, head_dim], scaled
  std::vector<float> scores;   // [rows, keys of a stride], then their weights
  std::vector<float> sums;     // [rows, head_dim]
  std::vector<float> tops, totals;
};

template <typename T>
void WriteToken(const Shape& shape, int64_t slot, const T* k, const T* v, T* keys, T* values) {
  const int64_t page = slot / shape.page_size, place = slot % shape.page_size;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    const int64_t start = (page * shape.num_kv_heads + head) * shape.page_size * shape.head_dim;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      keys[start + d * shape.page_size + place] = k[head * shape.head_dim + d];
      const T value = v[head * shape.head_dim + d];
      T* to = &values[start + place * shape.head_dim + d];
      // A NaN among the values would outlast a weight of 0 when another sequence gets the page.
      if (IsFinite(value)) *to = value;
      else Store(to, 0.0f);
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

// How dot products of queries and keys become scores, and which of them are seen.
struct Scores {
  float scale;
  int64_t window;  // 0: no window
  float soft_cap;  // 0: none
};

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

template <typename T>
void Attend(const Shape& shape, const Batch& batch, const Task& task, const Scores& how, const float* sinks,
            const T* __restrict q, const T* __restrict keys, const T* __restrict values, T* __restrict out,
            Scratch& scratch) {
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
    const T* from = q + ((start + i / group) * shape.num_heads + task.kv_head * group + i % group) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) scratch.queries[i * head_dim + d] = Load(from[d]) * how.scale;
  }
  if (sinks != nullptr) {  // the first key that a row sees, without a value
    for (int64_t i = 0; i < rows; ++i) scratch.tops[i] = sinks[task.kv_head * group + i % group];
    scratch.totals.assign(rows, 1.0f);
  }

  const int64_t window = how.window;
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
      AddMatmul<T>(rows, page_size, head_dim, {scratch.queries.data(), head_dim}, {keys + offset(p), page_size},
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
      AddMatmul<T>(rows, head_dim, std::min(page_size, count - done), {scratch.scores.data() + done, stride},
                    {values + offset(p), head_dim}, {scratch.sums.data(), head_dim});
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    T* to = out + ((start + i / group) * shape.num_heads + task.kv_head * group + i % group) * head_dim;
    const float factor = 1.0f / scratch.totals[i];
    for (int64_t d = 0; d < head_dim; ++d) Store(&to[d], scratch.sums[i * head_dim + d] * factor);
  }
}

std::vector<Task> MakeTasks(const Shape& shape, const Batch& batch) {
  std::vector<Task> tasks;
  for (int32_t s = 0; s < shape.num_seqs; ++s) {
    const int32_t num_queries = batch.cu_q_lens[s + 1] - batch.cu_q_lens[s];
    for (int32_t first = 0; first < num_queries; first += shape.queries_per_task()) {
      const int32_t count = std::min<int32_t>(shape.queries_per_task(), num_queries - first);
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) tasks.push_back({s, head, first, count});
    }
  }
  return tasks;
}

template <typename T>
void Run(ffi::ThreadPool& pool, const Shape& shape, const Batch& batch, const Scores& how, const float* sinks,
         const T* q, const T* k, const T* v, T* keys, T* values, T* out) {
  const int64_t stride = shape.num_kv_heads * shape.head_dim;
  for (int64_t t = 0; t < shape.num_tokens; ++t)
    WriteToken(shape, batch.slots[t], k + t * stride, v + t * stride, keys, values);
  const int64_t num_real = batch.cu_q_lens[shape.num_seqs];
  std::memset(out + num_real * shape.num_heads * shape.head_dim, 0,
              (shape.num_tokens - num_real) * shape.num_heads * shape.head_dim * sizeof(T));
  const std::vector<Task> tasks = MakeTasks(shape, batch);
  ForEach(pool, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    static thread_local Scratch scratch;
    Attend(shape, batch, tasks[i], how, sinks, q, keys, values, out, scratch);
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
  const Shape shape{q_dims[0], q_dims[1], key_dims[1], q_dims[2], key_dims[3], page_indices.dimensions()[1],
                    kv_lens.dimensions()[0], num_seqs.typed_data()[0]};
  const Batch batch{slots.typed_data(), kv_lens.typed_data(), page_indices.typed_data(), cu_q_lens.typed_data()};
  const float* head_sinks = sinks.element_count() == 0 ? nullptr : sinks.typed_data();
  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Run<T>(pool, shape, batch, Scores{scale, window, soft_cap}, head_sinks, static_cast<const T*>(q.untyped_data()),
           static_cast<const T*>(k.untyped_data()), static_cast<const T*>(v.untyped_data()),
           static_cast<T*>(new_keys->untyped_data()), static_cast<T*>(new_values->untyped_data()),
           static_cast<T*>(out->untyped_data()));
  };
  if (q.element_type() != keys.element_type()) return ffi::Error::InvalidArgument("q and the cache differ in type");
  if (q.element_type() == ffi::F32) run(static_cast<float*>(nullptr));
  else if (q.element_type() == ffi::BF16) run(static_cast<BFloat16*>(nullptr));
  else return ffi::Error::InvalidArgument("only f32 and bf16 are supported");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockRaggedAttention, penstock::RaggedAttention,
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
