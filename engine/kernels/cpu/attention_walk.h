// The walk of one block of rows through the pages of its sequence.

#ifndef PENSTOCK_ATTENTION_WALK_H_
#define PENSTOCK_ATTENTION_WALK_H_

#include <memory>

#include "attention_rows.h"

namespace penstock {
namespace attention {

constexpr int64_t kRowsPerTask = 72;  // about: at least one query with all its heads
constexpr int64_t kRowsAtOnce = 12;  // rows whose scores in a stride stay in the first-level cache
constexpr int64_t kMostSpans = kKeysPerStride / kEven;

// How dot products of queries and keys become scores, and which keys are seen.
struct Options {
  float scale;
  int64_t window;      // 0: no window
  float soft_cap;      // 0: none
  const float* sinks;  // [num_heads], the score of one more key without a value; or null
};

// Rows in which a token's heads are contiguous; the next token's begin `stride` elements later.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  T* at(int64_t token, int64_t element) const { return data + token * stride + element; }
};

// A block of queries of one sequence.
struct Block {
  const int32_t* pages;  // of the sequence
  int64_t first_token, num_queries;
  int64_t position;              // of the first query in its sequence
  int64_t first_key, end_key;    // keys that any query sees, from the beginning of a stride
};

// Memory that grows and is not cleared.
template <typename T>
class Buffer {
 public:
  T* Get(int64_t count) {
    if (count > size_) {
      size_ = count + count / 2;
      data_ = std::make_unique<T[]>(size_ + kAlignment / sizeof(T));
    }
    const auto address = reinterpret_cast<uintptr_t>(data_.get());
    return data_.get() + (kAlignment - address % kAlignment) % kAlignment / sizeof(T);
  }

 private:
  static constexpr uintptr_t kAlignment = 64;
  int64_t size_ = 0;
  std::unique_ptr<T[]> data_;
};

// The running softmax of rows: the largest score [rows], sums of weights by lanes [rows, kLanes], and sums of values
// [rows, width].
struct Softmax {
  float *tops, *totals, *sums;
  static int64_t Size(int64_t rows, int64_t width) { return rows * (width + kLanes + 1); }
  static Softmax In(float* memory, int64_t rows, int64_t width) {
    return {memory + rows * (width + kLanes), memory + rows * width, memory};
  }
};

// The working memory of one thread, kept from call to call.
struct Scratch {
  Buffer<uint32_t> queries, products, weights, keys, values;
  Buffer<float> total, part, key_scales, value_scales, corrections, factors;
  Buffer<QueryScale> scales;
};

template <typename C>
class Walk {
 public:
  static constexpr int64_t kPack = Layout<C>::kPack, kWordRows = Form<C>::kWordRows;

  Walk(const Shape& shape, const Block& block, const Options& options, const Cache<C>& cache, Scratch& scratch)
      : shape_(shape), layout_(shape), block_(block), options_(options), cache_(cache), scratch_(scratch),
        rows_(block.num_queries * shape.group()), stride_(shape.keys_per_stride()), width_(shape.width()),
        depth_(CeilDivide(shape.head_dim, kPack)), padded_stride_(RoundUp(stride_, kEven)) {
    queries_ = {scratch.queries.Get(rows_ * kWordRows * depth_), depth_};
    const int64_t widest = std::max(padded_stride_, width_);
    products_ = {scratch.products.Get(rows_ * kWordRows * widest), widest};
    weights_ = {scratch.weights.Get(rows_ * kWordRows * padded_stride_ / kPack), padded_stride_ / kPack};
    scales_ = scratch.scales.Get(rows_);
    corrections_ = scratch.corrections.Get(rows_), factors_ = scratch.factors.Get(rows_);
    total_ = Softmax::In(scratch.total.Get(Softmax::Size(rows_, width_)), rows_, width_);
    part_ = Softmax::In(scratch.part.Get(Softmax::Size(rows_, width_)), rows_, width_);
  }

  // Attends for one KV head, over all keys. `is_last`: no head of this walk follows.
  template <typename Q, typename O>
  void Attend(int64_t head, bool is_last, Rows<const Q> queries, Rows<O> out) {
    LoadQueries(head, queries);
    Begin(head);
    const int64_t per_part = shape_.keys_per_part();
    for (int64_t first = block_.first_key; first < block_.end_key; first = (first / per_part + 1) * per_part) {
      AttendPart(head, first, part_, is_last ? -1 : head + 1);
      Merge(part_);
    }
    Finish(head, out);
  }

  template <typename Q>
  void LoadQueries(int64_t head, Rows<const Q> queries) {
    for (int64_t i = 0; i < rows_; ++i)
      scales_[i] = Form<C>::Query(queries.at(Token(i), Element(head, i)), shape_.head_dim,
                                  {queries_.data + i * kWordRows * depth_, depth_});
  }

  // Attends to keys from `first` to the end of their part. `next_head`, unless it is -1, comes after the last key: its
  // first keys are prefetched.
  void AttendPart(int64_t head, int64_t first, const Softmax& part, int64_t next_head) {
    std::fill(part.tops, part.tops + rows_, kLowest);
    std::fill(part.totals, part.totals + rows_ * kLanes, 0.0f);
    std::fill(part.sums, part.sums + rows_ * width_, 0.0f);
    const int64_t per_part = shape_.keys_per_part();
    const int64_t end = std::min((first / per_part + 1) * per_part, block_.end_key);
    for (; first < end; first += stride_) {
      const bool is_end = first + stride_ >= block_.end_key;
      AttendStride(head, first, is_end ? next_head : head, is_end ? block_.first_key : first + stride_, part);
    }
  }

  // Starts the softmax of all parts.
  void Begin(int64_t head) {
    for (int64_t i = 0; i < rows_; ++i) {
      total_.tops[i] = options_.sinks ? options_.sinks[head * shape_.group() + i % shape_.group()] : kLowest;
      StoreVector(total_.totals + i * kLanes, Vector{options_.sinks ? 1.0f : 0.0f});
    }
    std::fill(total_.sums, total_.sums + rows_ * width_, 0.0f);
  }

  void Merge(const Softmax& part) {
    for (int64_t i = 0; i < rows_; ++i) {
      const float top = std::max(total_.tops[i], part.tops[i]);
      const float before = Exp(total_.tops[i] - top), now = Exp(part.tops[i] - top);
      total_.tops[i] = top;
      float* total = total_.totals + i * kLanes;
      StoreVector(total, LoadVector(total) * before + LoadVector(part.totals + i * kLanes) * now);
      float* __restrict sums = total_.sums + i * width_;
      const float* __restrict more = part.sums + i * width_;
      for (int64_t d = 0; d < width_; ++d) sums[d] = sums[d] * before + more[d] * now;
    }
  }

  template <typename O>
  void Finish(int64_t head, Rows<O> out) const {
    for (int64_t i = 0; i < rows_; ++i) {
      O* to = out.at(Token(i), Element(head, i));
      const float factor = 1.0f / SumOf(LoadVector(total_.totals + i * kLanes));
      for (int64_t d = 0; d < shape_.head_dim; ++d) Store(&to[d], total_.sums[i * width_ + d] * factor);
    }
  }

 private:
  // Neighbouring keys: one page each, or all together.
  struct Stride {
    int64_t count;  // keys that any row sees, counted from the first
    int64_t num_spans;
    Span keys[kMostSpans], values[kMostSpans];
  };

  // Words of a row of weights that are multiplied by values. Blocks are whole, so that a row's sums do not depend on the
  // last key that other rows see: further weights are 0.
  int64_t ValueWords(int64_t count) const {
    constexpr int64_t kBlock = std::max<int64_t>(1, Form<C>::ValueKind::kBlock);
    return RoundUp(CeilDivide(count, kPack), kBlock);
  }

  int64_t Token(int64_t row) const { return block_.first_token + row / shape_.group(); }
  int64_t Element(int64_t head, int64_t row) const {  // row = query * group + head within the group
    return (head * shape_.group() + row % shape_.group()) * shape_.head_dim;
  }

  void AttendStride(int64_t head, int64_t first, int64_t next_head, int64_t next_first, const Softmax& part) {
    Stride stride = shape_.is_even() ? SpansOf(head, first) : Gathered(head, first);
    if constexpr (std::is_same_v<C, int8_t>) CopyScales(head, first, stride.count);
    LookAhead(next_head, next_first, stride);
    const int64_t span_keys = shape_.is_even() ? shape_.page_size : padded_stride_;
    Multiply<typename Form<C>::KeyKind>(tiles_, rows_ * kWordRows, {queries_.data, depth_},
                                        {stride.keys, span_keys, depth_}, depth_, RoundUp(stride.count, kLanes), products_);
    Weigh(first, stride.count, part);
    Multiply<typename Form<C>::ValueKind>(tiles_, rows_ * kWordRows, {weights_.data, weights_.stride},
                                          {stride.values, width_, span_keys / kPack}, ValueWords(stride.count), width_,
                                          products_);
    for (int64_t i = 0; i < rows_; ++i) {
      uint32_t* words = products_.data + i * kWordRows * products_.stride;
      Form<C>::Sums({words, products_.stride}, width_, factors_[i]);
      const float* __restrict more = reinterpret_cast<const float*>(words);
      float* __restrict sums = part.sums + i * width_;
      for (int64_t d = 0; d < width_; ++d) sums[d] = sums[d] * corrections_[i] + more[d];
    }
  }

  // Turns the scores of a stride into weights, and adds them to their rows' softmax. Each kind of work is done for some
  // rows before the next kind: a row waits for each of its results, so several are in flight.
  void Weigh(int64_t first, int64_t count, const Softmax& part) {
    const float scale = options_.soft_cap > 0 ? 1.0f : options_.scale;  // capped scores are scaled already
    for (int64_t begin = 0; begin < rows_; begin += kRowsAtOnce) {
      const int64_t end = std::min(begin + kRowsAtOnce, rows_);
      for (int64_t i = begin; i < end; ++i) corrections_[i] = LargestScore(i, first, count) * scale;
      for (int64_t i = begin; i < end; ++i) {
        const float top = std::max(part.tops[i], corrections_[i]);
        corrections_[i] = Exp(part.tops[i] - top);
        part.tops[i] = top;
      }
      for (int64_t i = begin; i < end; ++i) {
        float* scores = reinterpret_cast<float*>(products_.data + i * kWordRows * products_.stride);
        const Weighed weighed =
            Form<C>::Weights(scores, RoundUp(count, kEven), scale, part.tops[i], value_scales_,
                             {weights_.data + i * kWordRows * weights_.stride, weights_.stride});
        factors_[i] = weighed.factor;
        float* total = part.totals + i * kLanes;
        StoreVector(total, LoadVector(total) * corrections_[i] + weighed.sum);
      }
    }
  }

  // Computes a row's scores in a stride, capped if options say so, and returns the largest. Those that the row does not
  // see become kUnseen.
  float LargestScore(int64_t i, int64_t first, int64_t count) {
    const int64_t position = block_.position + i / shape_.group(), window = options_.window;
    const int64_t padded = RoundUp(count, kEven);
    const int64_t begin = window > 0 ? std::clamp<int64_t>(position - window + 1 - first, 0, count) : 0;
    const int64_t end = std::clamp(position + 1 - first, begin, count);
    uint32_t* products = products_.data + i * kWordRows * products_.stride;
    Form<C>::Scores({products, products_.stride}, padded, scales_[i], key_scales_);
    float* scores = reinterpret_cast<float*>(products);
    if (options_.soft_cap > 0)
      for (int64_t j = begin; j < end; ++j)
        scores[j] = options_.soft_cap * Tanh(scores[j] * (options_.scale / options_.soft_cap));
    std::fill(scores, scores + begin, kUnseen);
    std::fill(scores + end, scores + padded, kUnseen);
    return LargestOf(scores, padded);
  }

  Stride SpansOf(int64_t head, int64_t first) const {
    Stride stride;
    stride.count = std::min(stride_, block_.end_key - first);
    stride.num_spans = CeilDivide(stride.count, shape_.page_size);
    const int32_t* pages = block_.pages + first / shape_.page_size;
    for (int64_t s = 0; s < stride.num_spans; ++s) {
      const C* keys = cache_.keys + layout_.Key(pages[s], head);
      const C* values = cache_.values + layout_.Value(pages[s], head);
      stride.keys[s] = {reinterpret_cast<const uint32_t*>(keys), shape_.page_size, 0};
      stride.values[s] = {reinterpret_cast<const uint32_t*>(values), shape_.head_dim, 0};
    }
    return stride;
  }

  // Prefetches a page's values while its keys are read, and the keys of a page of the next stride while values are
  // read.
  void LookAhead(int64_t next_head, int64_t next_first, Stride& stride) const {
    if (!shape_.is_even()) return;
    const auto fetch = [](Span& span, const void* next) {
      span.ahead = static_cast<const char*>(next) - reinterpret_cast<const char*>(span.words);
    };
    for (int64_t s = 0; s < stride.num_spans; ++s) fetch(stride.keys[s], stride.values[s].words);
    if (next_head < 0) return;
    const int32_t* pages = block_.pages + next_first / shape_.page_size;
    const int64_t num_pages = CeilDivide(std::min(stride_, block_.end_key - next_first), shape_.page_size);
    for (int64_t s = 0; s < std::min(num_pages, stride.num_spans); ++s) {
      fetch(stride.values[s], cache_.keys + layout_.Key(pages[s], next_head));
      if constexpr (std::is_same_v<C, int8_t>)
        for (int64_t j = 0; j < shape_.page_size; j += kEven) {
          __builtin_prefetch(cache_.key_scales + layout_.Scale(pages[s], next_head) + j);
          __builtin_prefetch(cache_.value_scales + layout_.Scale(pages[s], next_head) + j);
        }
    }
  }

  // Gathers the keys of a stride, for pages or heads whose sizes are not whole vectors.
  Stride Gathered(int64_t head, int64_t first) {
    const int64_t count = std::min(stride_, block_.end_key - first);
    const int64_t value_words = ValueWords(count) * width_;
    uint32_t* key_words = scratch_.keys.Get(depth_ * padded_stride_);
    uint32_t* words = scratch_.values.Get(value_words);
    std::memset(key_words, 0, depth_ * padded_stride_ * 4);
    std::memset(words, 0, value_words * 4);
    C* values = reinterpret_cast<C*>(words);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t page = block_.pages[(first + j) / shape_.page_size], place = (first + j) % shape_.page_size;
      const C* from = cache_.keys + layout_.Key(page, head);
      for (int64_t d = 0; d < depth_; ++d)
        std::memcpy(key_words + d * padded_stride_ + j, from + layout_.KeyAt(place, d * kPack), 4);
      from = cache_.values + layout_.Value(page, head);
      for (int64_t d = 0; d < shape_.head_dim; ++d)
        values[(j / kPack * width_ + d) * kPack + j % kPack] = from[layout_.ValueAt(place, d)];
    }
    Stride stride{count, 1};
    stride.keys[0] = {key_words, padded_stride_, 0};
    stride.values[0] = {words, width_, 0};
    return stride;
  }

  void CopyScales(int64_t head, int64_t first, int64_t count) {
    float* keys = scratch_.key_scales.Get(padded_stride_);
    float* values = scratch_.value_scales.Get(padded_stride_);
    key_scales_ = keys, value_scales_ = values;
    for (int64_t done = 0; done < count; done += shape_.page_size) {
      const int64_t from = layout_.Scale(block_.pages[(first + done) / shape_.page_size], head);
      std::memcpy(keys + done, cache_.key_scales + from, shape_.page_size * 4);
      std::memcpy(values + done, cache_.value_scales + from, shape_.page_size * 4);
    }
    for (int64_t j = CeilDivide(count, shape_.page_size) * shape_.page_size; j < padded_stride_; ++j)
      keys[j] = values[j] = 0.0f;
  }

  const Shape& shape_;
  const Layout<C> layout_;
  const Block& block_;
  const Options& options_;
  const Cache<C>& cache_;
  Scratch& scratch_;
  const int64_t rows_, stride_, width_, depth_, padded_stride_;
  const TaskRounding rounding_{};
  TaskTiles tiles_;
  Matrix<uint32_t> queries_, products_, weights_;
  QueryScale* scales_;
  float *corrections_, *factors_;
  const float *key_scales_ = nullptr, *value_scales_ = nullptr;
  Softmax total_, part_;
};

}  // namespace attention
}  // namespace penstock

#endif  // PENSTOCK_ATTENTION_WALK_H_
