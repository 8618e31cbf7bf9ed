// Ragged paged attention for CPUs, called by XLA through its foreign function interface.
//
// The same contract as XlaAttention: writes this step's keys and values into the pages, then attends, sequence by
// sequence, over the pages that the sequence has and no others, with online softmax (Milakov and Gimelshein, arXiv 1805.02867).
//
// A task is one block of queries of one sequence, for one KV head and the query heads that share it. Tasks are handed out
// by a counter: the calling thread works through them itself, and threads of XLA's pool that are free help.
//
// Keys and values are [num_pages, num_kv_heads, page_size, head_dim], f32 or bf16; arithmetic is f32 throughout.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kQueriesPerBlock = 16;

struct BFloat16 {
  uint16_t bits;
};

inline float Load(float value) { return value; }
inline float Load(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void Store(float* to, float value) { *to = value; }
inline void Store(BFloat16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits += 0x7fffu + ((bits >> 16) & 1u);  // to nearest, ties to even
  to->bits = is_nan ? 0x7fc0u : static_cast<uint16_t>(bits >> 16);
}

template <typename T>
inline bool IsFinite(T value) {
  uint32_t bits;
  const float wide = Load(value);
  std::memcpy(&bits, &wide, sizeof bits);
  return (bits & 0x7f800000u) != 0x7f800000u;
}

// e^x for x <= 0, within 2 ulp, in a form that compilers vectorise: 2^n times a polynomial in the rest (Cephes' expf).
inline float Exp(float x) {
  x = std::max(x, -87.0f);  // a NaN stays one
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

struct Shape {
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, page_size, pages_per_seq, max_seqs, num_seqs;
  int64_t group() const { return num_heads / num_kv_heads; }
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
  std::vector<float> queries, keys, values, turned, scores, sums, tops, totals;
};

// A page as f32: as it is, or converted into `buffer`, once for all queries of a task.
inline const float* Widen(const float* page, int64_t, std::vector<float>&) { return page; }
inline const float* Widen(const BFloat16* page, int64_t count, std::vector<float>& buffer) {
  buffer.resize(count);
  float* __restrict to = buffer.data();
  const uint16_t* __restrict from = &page->bits;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(&to[i], &bits, sizeof bits);
  }
  return buffer.data();
}

template <typename T>
void WriteToken(const Shape& shape, int64_t slot, const T* k, const T* v, T* keys, T* values) {
  const int64_t page = slot / shape.page_size, place = slot % shape.page_size;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    const int64_t to = ((page * shape.num_kv_heads + head) * shape.page_size + place) * shape.head_dim;
    std::memcpy(keys + to, k + head * shape.head_dim, shape.head_dim * sizeof(T));
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      const T value = v[head * shape.head_dim + d];
      // A NaN among the values would outlast a weight of 0 when another sequence gets the page.
      if (IsFinite(value)) values[to + d] = value;
      else Store(&values[to + d], 0.0f);
    }
  }
}

// Scores of `rows` queries against one page, [rows, page_size].
void ScorePage(const float* __restrict queries, int64_t rows, const float* __restrict page, int64_t page_size,
               int64_t head_dim, std::vector<float>& buffer, float* __restrict scores) {
  if (rows <= 4) {
    for (int64_t j = 0; j < page_size; ++j) {
      const float* __restrict key = page + j * head_dim;
      for (int64_t i = 0; i < rows; ++i) {
        const float* __restrict query = queries + i * head_dim;
        float sum = 0.0f;
        for (int64_t d = 0; d < head_dim; ++d) sum += query[d] * key[d];
        scores[i * page_size + j] = sum;
      }
    }
    return;
  }
  buffer.resize(page_size * head_dim);
  float* __restrict turned = buffer.data();  // [head_dim, page_size]: the inner loop then runs over keys
  for (int64_t j = 0; j < page_size; ++j)
    for (int64_t d = 0; d < head_dim; ++d) turned[d * page_size + j] = page[j * head_dim + d];
  for (int64_t i = 0; i < rows; ++i) {
    float* __restrict row = scores + i * page_size;
    std::fill(row, row + page_size, 0.0f);
    for (int64_t d = 0; d < head_dim; ++d) {
      const float weight = queries[i * head_dim + d];
      const float* __restrict line = turned + d * page_size;
      for (int64_t j = 0; j < page_size; ++j) row[j] += weight * line[j];
    }
  }
}

template <typename T>
void Attend(const Shape& shape, const Batch& batch, const Task& task, float scale, int64_t window,
            const T* __restrict q, const T* __restrict keys, const T* __restrict values, T* __restrict out,
            Scratch& scratch) {
  const int64_t d = shape.head_dim, page_size = shape.page_size, group = shape.group();
  const int64_t start = batch.cu_q_lens[task.sequence] + task.first_query;
  const int64_t num_queries = batch.cu_q_lens[task.sequence + 1] - batch.cu_q_lens[task.sequence];
  const int64_t first_position = batch.kv_lens[task.sequence] - num_queries + task.first_query;
  const int64_t rows = task.num_queries * group;  // row = query * group + head within the group

  scratch.queries.resize(rows * d);
  scratch.scores.resize(rows * page_size);
  scratch.sums.assign(rows * d, 0.0f);
  scratch.tops.assign(rows, -1e30f);
  scratch.totals.assign(rows, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    const T* from = q + ((start + i / group) * shape.num_heads + task.kv_head * group + i % group) * d;
    for (int64_t x = 0; x < d; ++x) scratch.queries[i * d + x] = Load(from[x]) * scale;
  }

  const int64_t last_position = first_position + task.num_queries - 1;
  const int64_t first_key = window > 0 ? std::max<int64_t>(0, first_position - window + 1) : 0;
  for (int64_t p = first_key / page_size; p <= last_position / page_size; ++p) {
    const int64_t page = batch.page_indices[task.sequence * shape.pages_per_seq + p];
    const int64_t offset = (page * shape.num_kv_heads + task.kv_head) * page_size * d;
    const float* page_keys = Widen(keys + offset, page_size * d, scratch.keys);
    const float* page_values = Widen(values + offset, page_size * d, scratch.values);
    ScorePage(scratch.queries.data(), rows, page_keys, page_size, d, scratch.turned, scratch.scores.data());
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t position = first_position + i / group;
      // Keys [begin, end) of this page are visible to this query.
      const int64_t end = std::min<int64_t>(page_size, position + 1 - p * page_size);
      const int64_t begin = window > 0 ? std::max<int64_t>(0, position - window + 1 - p * page_size) : 0;
      if (begin >= end) continue;
      float* __restrict row = scratch.scores.data() + i * page_size;
      float top = scratch.tops[i];
      for (int64_t j = begin; j < end; ++j) top = std::max(top, row[j]);
      const float correction = Exp(scratch.tops[i] - top);
      float total = 0.0f;
      for (int64_t j = begin; j < end; ++j) {
        row[j] = Exp(row[j] - top);
        total += row[j];
      }
      scratch.tops[i] = top;
      scratch.totals[i] = scratch.totals[i] * correction + total;
      float* __restrict sum = scratch.sums.data() + i * d;
      for (int64_t x = 0; x < d; ++x) sum[x] *= correction;
      const float* __restrict value = page_values + begin * d;
      for (int64_t j = begin; j < end; ++j, value += d) {
        const float weight = row[j];
        for (int64_t x = 0; x < d; ++x) sum[x] += weight * value[x];
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    T* to = out + ((start + i / group) * shape.num_heads + task.kv_head * group + i % group) * d;
    const float factor = 1.0f / scratch.totals[i];
    for (int64_t x = 0; x < d; ++x) Store(&to[x], scratch.sums[i * d + x] * factor);
  }
}

// Runs `work(i)` for i in [0, count). Helpers of the pool may come late: they find the counter at its end, and nothing
// that they then touch is gone, as they share it.
class SharedLoop {
 public:
  SharedLoop(int64_t count, std::function<void(int64_t)> work) : count_(count), work_(std::move(work)) {}

  void Help() {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      work_(i);
      if (done_.fetch_add(1) + 1 == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load() >= count_; });
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)> work_;
  std::atomic<int64_t> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

std::vector<Task> MakeTasks(const Shape& shape, const Batch& batch) {
  std::vector<Task> tasks;
  for (int32_t s = 0; s < shape.num_seqs; ++s) {
    const int32_t num_queries = batch.cu_q_lens[s + 1] - batch.cu_q_lens[s];
    for (int32_t first = 0; first < num_queries; first += kQueriesPerBlock) {
      const int32_t count = std::min<int32_t>(kQueriesPerBlock, num_queries - first);
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) tasks.push_back({s, head, first, count});
    }
  }
  return tasks;
}

template <typename T>
void Run(ffi::ThreadPool& pool, const Shape& shape, const Batch& batch, float scale, int64_t window, const T* q,
         const T* k, const T* v, T* keys, T* values, T* out) {
  const int64_t stride = shape.num_kv_heads * shape.head_dim;
  for (int64_t t = 0; t < shape.num_tokens; ++t)
    WriteToken(shape, batch.slots[t], k + t * stride, v + t * stride, keys, values);
  const int64_t num_real = batch.cu_q_lens[shape.num_seqs];
  std::memset(out + num_real * shape.num_heads * shape.head_dim, 0,
              (shape.num_tokens - num_real) * shape.num_heads * shape.head_dim * sizeof(T));
  const std::vector<Task> tasks = MakeTasks(shape, batch);
  if (tasks.empty()) return;
  auto loop = std::make_shared<SharedLoop>(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    static thread_local Scratch scratch;
    Attend(shape, batch, tasks[i], scale, window, q, keys, values, out, scratch);
  });
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, static_cast<int64_t>(tasks.size()) - 1);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->Help(); });
  loop->Help();
  loop->Wait();
}

ffi::Error RaggedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::Buffer<ffi::S32> slots,
                           ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> page_indices,
                           ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs,
                           ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_keys,
                           ffi::Result<ffi::AnyBuffer> new_values, float scale, int64_t window) {
  if (keys.untyped_data() != new_keys->untyped_data() || values.untyped_data() != new_values->untyped_data())
    return ffi::Error::Internal("the KV cache was copied: it must be donated");
  const auto q_dims = q.dimensions(), key_dims = keys.dimensions();
  const Shape shape{q_dims[0], q_dims[1], key_dims[1], q_dims[2], key_dims[2], page_indices.dimensions()[1],
                    kv_lens.dimensions()[0], num_seqs.typed_data()[0]};
  const Batch batch{slots.typed_data(), kv_lens.typed_data(), page_indices.typed_data(), cu_q_lens.typed_data()};
  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Run<T>(pool, shape, batch, scale, window, static_cast<const T*>(q.untyped_data()),
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockRaggedAttention, RaggedAttention,
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
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));
