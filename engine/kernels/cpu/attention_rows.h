// The work of a task's rows in one stride of keys: queries as words, scores, weights as words, sums. Whatever differs
// by the type of pages is here. A row is a query with one of its heads.
//
// int8 loses nothing beyond what pages lose: a query has 15 bits, as two bytes, and a weight, with the scale of its
// value, has 16 bits relative to the largest in its stride. Their sums are exact.

#ifndef PENSTOCK_ATTENTION_ROWS_H_
#define PENSTOCK_ATTENTION_ROWS_H_

#include "attention_pages.h"
#include "attention_tiles.h"

namespace penstock {
namespace attention {

constexpr float kLowest = -1e30f;  // for a row that has seen no key: finite, so that a difference of two is 0
constexpr float kUnseen = -1e36f;  // a score whose weight is 0 even relative to kLowest, whatever the scale

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

inline Ints LoadInts(const uint32_t* from) { return (Ints)LoadWords(from); }

inline float Largest(Vector values) {
  float top = values[0];
  for (int i = 1; i < kLanes; ++i) top = std::max(top, values[i]);
  return top;
}

inline float SumOf(Vector values) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += values[i];
  return sum;
}

inline float LargestOf(const float* values, int64_t count) {  // `count` is a multiple of kLanes
  Vector top = LoadVector(values);
  for (int64_t j = kLanes; j < count; j += kLanes) {
    const Vector next = LoadVector(values + j);
    top = next > top ? next : top;
  }
  return Largest(top);
}

// e^(x * scale - top), which is at most 1, to about the precision of bf16. A NaN stays NaN.
inline Vector CoarseExp(Vector x, float scale, float top) {
#if defined(__AVX512BF16__)  // 2^floor(t), and 2^rest by a polynomial (minimax of the third degree that is 1 at 0: 9e-5)
  const Vector t = x * (scale * 1.44269504f) - top * 1.44269504f;
  const Vector r = (Vector)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const Vector y = ((7.70672403e-2f * r + 2.27644978e-1f) * r + 6.95116631e-1f) * r + 1.0f;
  return (Vector)_mm512_scalef_ps((__m512)y, (__m512)t);
#else
  return ExpOfNegative(x * scale - top);
#endif
}

// How to interpret the sums of a query's words.
struct QueryScale {
  float scale;
  int32_t extra[2];  // excess in the sums of each of its rows of words
};

// The result of weighing a row's scores in a stride.
struct Weighed {
  Vector sum;    // of the weights, by lanes
  float factor;  // for the sums of their words
};

// The operations on a row, by type of pages. A row is kWordRows rows of words. Query turns a query into words. Scores
// turns the sums of these words by keys into scores, in place. Weights turns the row's weights, e^(score * scale -
// top), into words. Sums turns the sums of those by values into f32, in place. Counts are multiples of kLanes.
template <typename C>
struct Form;

template <>
struct Form<float> {
  using KeyKind = Floats;
  using ValueKind = Floats;
  static constexpr int64_t kWordRows = 1;

  template <typename Q>
  static QueryScale Query(const Q* from, int64_t head_dim, Matrix<uint32_t> words) {
    float* to = reinterpret_cast<float*>(words.data);
    for (int64_t d = 0; d < head_dim; ++d) to[d] = Load(from[d]);
    return {};
  }

  static void Scores(Matrix<uint32_t>, int64_t, const QueryScale&, const float*) {}

  static Weighed Weights(const float* scores, int64_t count, float scale, float top, const float*,
                         Matrix<uint32_t> words) {
    Vector sum = {};
    for (int64_t j = 0; j < count; j += kLanes) {
      const Vector weights = ExpOfNegative(LoadVector(scores + j) * scale - top);
      std::memcpy(words.data + j, &weights, sizeof weights);
      sum += weights;
    }
    return {sum, 1.0f};
  }

  static void Sums(Matrix<uint32_t>, int64_t, float) {}
};

template <>
struct Form<BFloat16> {
  using KeyKind = BFloat16Pairs<kTileWords>;
  using ValueKind = BFloat16Pairs<kEven / 2>;  // a page that is even holds a multiple of kEven tokens, two in a word
  static constexpr int64_t kWordRows = 1;

  template <typename Q>
  static QueryScale Query(const Q* from, int64_t head_dim, Matrix<uint32_t> words) {
    BFloat16* to = reinterpret_cast<BFloat16*>(words.data);
    for (int64_t d = 0; d < head_dim; ++d) Store(&to[d], Load(from[d]));
    if (head_dim % 2) to[head_dim] = BFloat16{0};
    return {};
  }

  static void Scores(Matrix<uint32_t>, int64_t, const QueryScale&, const float*) {}

  // Sums the rounded weights, so that those of a row add up to 1.
  static Weighed Weights(const float* scores, int64_t count, float scale, float top, const float*,
                         Matrix<uint32_t> words) {
    Vector sum = {};
    int64_t j = 0;
#if defined(__AVX512BF16__)  // two vectors at once, summed by multiplying with 1
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (; j + 2 * kLanes <= count; j += 2 * kLanes) {
      const Vector low = CoarseExp(LoadVector(scores + j), scale, top);
      const Vector high = CoarseExp(LoadVector(scores + j + kLanes), scale, top);
      const __m512bh weights = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      std::memcpy(words.data + j / 2, &weights, sizeof weights);
      sum = (Vector)_mm512_dpbf16_ps((__m512)sum, weights, ones);
    }
#endif
    for (; j < count; j += kLanes) {
      const HalfWords weights = Rounded(CoarseExp(LoadVector(scores + j), scale, top));
      std::memcpy(words.data + j / 2, &weights, sizeof weights);
      sum += (Vector)(__builtin_convertvector(weights, Words) << 16);
    }
    return {sum, 1.0f};
  }

  static void Sums(Matrix<uint32_t>, int64_t, float) {}
};

// Numbers in two bytes: a row of words for the upper ones, and one for the lower ones.
template <>
struct Form<int8_t> {
  using KeyKind = KeyBytes;
  using ValueKind = ValueBytes;
  static constexpr int64_t kWordRows = 2;
  static constexpr float kMostOfQuery = 127 * 128, kMostOfWeight = 65535;

  template <typename Q>
  static QueryScale Query(const Q* from, int64_t head_dim, Matrix<uint32_t> words) {
    float top = 0.0f, spoiled = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) {
      top = std::max(top, std::fabs(Load(from[d])));
      spoiled += Load(from[d]) * 0.0f;
    }
    const float inverse = InverseOf(top) * kMostOfQuery;
    QueryScale result{(top + spoiled) / kMostOfQuery, {0, 0}};
    int8_t* high = reinterpret_cast<int8_t*>(words.data);
    int8_t* low = reinterpret_cast<int8_t*>(words.data + words.stride);
    std::memset(high, 0, CeilDivide(head_dim, 4) * 4);
    std::memset(low, 0, CeilDivide(head_dim, 4) * 4);
    for (int64_t d = 0; d < head_dim; ++d) {
      const int32_t code = inverse > 0.0f && IsFinite(Load(from[d])) ? static_cast<int32_t>(std::rint(Load(from[d]) * inverse)) : 0;
      const int32_t upper = (code + 64) >> 7;
      high[d] = static_cast<int8_t>(upper), low[d] = static_cast<int8_t>(code - upper * 128);
      result.extra[0] += 128 * high[d], result.extra[1] += 128 * low[d];
    }
    return result;
  }

  static void Scores(Matrix<uint32_t> sums, int64_t count, const QueryScale& query, const float* key_scales) {
    for (int64_t j = 0; j < count; j += kLanes) {
      const Vector high = ToFloats(LoadInts(sums.data + j) - query.extra[0]);
      const Vector low = ToFloats(LoadInts(sums.data + sums.stride + j) - query.extra[1]);
      const Vector scores = (high * 128.0f + low) * (LoadVector(key_scales + j) * query.scale);
      std::memcpy(sums.data + j, &scores, sizeof scores);
    }
  }

  static Weighed Weights(float* scores, int64_t count, float scale, float top, const float* value_scales,
                         Matrix<uint32_t> words) {
    Vector sum = {}, most = {};
    for (int64_t j = 0; j < count; j += kLanes) {
      const Vector weights = ExpOfNegative(LoadVector(scores + j) * scale - top);
      const Vector scaled = weights * LoadVector(value_scales + j);
      StoreVector(scores + j, scaled);
      sum += weights;
      most = scaled > most ? scaled : most;
    }
    const float largest = Largest(most), inverse = InverseOf(largest) * kMostOfWeight;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Words codes = (Words)__builtin_convertvector(LoadVector(scores + j) * inverse + 0.5f, Ints);
      const Bytes high = __builtin_convertvector(codes >> 8, Bytes), low = __builtin_convertvector(codes & 255u, Bytes);
      std::memcpy(words.data + j / 4, &high, sizeof high);
      std::memcpy(words.data + words.stride + j / 4, &low, sizeof low);
    }
    return {sum, inverse > 0.0f ? largest / kMostOfWeight : 0.0f};
  }

  static void Sums(Matrix<uint32_t> sums, int64_t count, float factor) {
    for (int64_t d = 0; d < count; d += kLanes) {
      const Vector high = ToFloats(LoadInts(sums.data + d)), low = ToFloats(LoadInts(sums.data + sums.stride + d));
      const Vector wide = (high * 256.0f + low) * factor;
      std::memcpy(sums.data + d, &wide, sizeof wide);
    }
  }
};

}  // namespace attention
}  // namespace penstock

#endif  // PENSTOCK_ATTENTION_ROWS_H_
