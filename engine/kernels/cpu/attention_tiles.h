// The two matmuls of attention: queries by keys, and weights by values.
//
// A page holds its elements in 32-bit words: one f32, two bf16 or four int8, neighbours along the axis that is summed
// over, as the processors' dot products take them. So both matmuls multiply rows of words by a matrix of words,
// whatever the type. A row's result does not depend on the other rows.

#ifndef PENSTOCK_ATTENTION_TILES_H_
#define PENSTOCK_ATTENTION_TILES_H_

#include <type_traits>
#include <utility>

#include "kernels.h"

namespace penstock {
namespace attention {

// sum += x * w, by lanes.
struct Floats {
  using Sum = Vector;
  static Sum Dot(Sum sum, Words x, Words w) { return sum + (Vector)x * (Vector)w; }
};

// Sums two products, in f32.
struct BFloat16Pairs {
  using Sum = Vector;
  static Sum Dot(Sum sum, Words x, Words w) {
#if defined(__AVX512BF16__)
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Vector)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)w);
#else
    sum += (Vector)(x << 16) * (Vector)(w << 16);
    return sum + (Vector)(x & 0xffff0000u) * (Vector)(w & 0xffff0000u);
#endif
  }
};

// Sums four products of unsigned bytes and signed bytes, exactly.
inline Ints DotBytes(Ints sum, Words plain, Words with_sign) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)plain, (__m512i)with_sign);
#elif defined(__AVX512BW__)
  const __m512i low = _mm512_set1_epi16(0x00ff), a = (__m512i)plain, b = (__m512i)with_sign;
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
  return sum + (Ints)even + (Ints)_mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)plain, (__m256i)with_sign);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i low = _mm256_set1_epi16(0x00ff), a = (__m256i)plain, b = (__m256i)with_sign;
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  return sum + (Ints)even + (Ints)_mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)plain, (int8x16_t)with_sign);
#elif defined(__ARM_FEATURE_DOTPROD)  // for signed bytes: subtract 128, then add 128 times the sum of the other bytes
  const Ints missing = (Ints)vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), (int8x16_t)with_sign);
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)(plain ^ 0x80808080u), (int8x16_t)with_sign) + (missing << 7);
#else
  for (int shift = 0; shift < 32; shift += 8)
    sum += (Ints)((plain >> shift) & 0xffu) * ((Ints)(with_sign << (24 - shift)) >> 24);
  return sum;
#endif
}

// Codes of keys, plus 128, times bytes of queries: the result is too large by 128 times the sum of those.
struct KeyBytes {
  using Sum = Ints;
  static Sum Dot(Sum sum, Words x, Words w) { return DotBytes(sum, w ^ 0x80808080u, x); }
};

// Codes of values times bytes of weights, which are unsigned.
struct ValueBytes {
  using Sum = Ints;
  static Sum Dot(Sum sum, Words x, Words w) { return DotBytes(sum, x, w); }
};

template <typename T>
struct Matrix {
  T* data;
  int64_t stride;  // elements between rows
};

constexpr int kFewRows = 8;  // rows in one tile: the matrix, which may come from memory, is read once
constexpr int kSecondLevel = 2;  // cache level that can have more lines in flight than the first

// sums[R][V vectors] += x[R][depth] * w[depth][V vectors]. If few rows read w, which then comes from memory, it
// prefetches what lies `ahead` bytes after it.
template <typename Kind, int R, int V>
inline void AddTile(Matrix<const uint32_t> x, Matrix<const uint32_t> w, int64_t depth, int64_t ahead,
                    typename Kind::Sum (&sums)[R][V]) {
  const uint32_t* from = w.data;
  for (int64_t k = 0; k < depth; ++k, from += w.stride) {
    Words row[V];
    for (int v = 0; v < V; ++v) {
      row[v] = LoadWords(from + v * kLanes);
      if (R <= kFewRows) __builtin_prefetch(reinterpret_cast<const char*>(from + v * kLanes) + ahead, 0, kSecondLevel);
    }
    for (int r = 0; r < R; ++r) {
      const Words value = Words{} + x.data[r * x.stride + k];
      for (int v = 0; v < V; ++v) sums[r][v] = Kind::Dot(sums[r][v], value, row[v]);
    }
  }
}

// Number of vectors in a tile of R rows whose sums stay in registers.
constexpr int Width(int rows) {
  const int sums = kRows * kVectors;
  return 4 * rows <= sums ? 4 : 2 * rows <= sums ? 2 : 1;
}

// Keys or values of neighbouring tokens, as their matmul takes them.
struct Span {
  const uint32_t* words;
  int64_t stride;  // words between rows
  int64_t ahead;   // bytes from here to the data needed next
};

// out[r][c .. c + V vectors] = x[r] * the concatenated spans, each of which has `depth` rows except the last.
template <typename Kind, int R, int V>
inline void MultiplyColumns(Matrix<const uint32_t> x, const Span* spans, int64_t depth, int64_t whole_depth, int64_t c,
                            Matrix<uint32_t> out) {
  typename Kind::Sum sums[R][V] = {};
  for (int64_t done = 0; done < whole_depth; done += depth, ++spans)
    AddTile<Kind, R, V>({x.data + done, x.stride}, {spans->words + c, spans->stride},
                        std::min(depth, whole_depth - done), spans->ahead, sums);
  for (int r = 0; r < R; ++r) std::memcpy(out.data + r * out.stride + c, sums[r], sizeof sums[r]);
}

// A function of its own, so that profiles and the tests of the library's instructions can find it.
template <typename Kind, int R>
__attribute__((noinline)) void MultiplyRows(Matrix<const uint32_t> x, const Span* spans, int64_t depth, int64_t whole_depth,
                         int64_t columns, Matrix<uint32_t> out) {
  constexpr int V = Width(R);
  int64_t c = 0;
  for (; c + V * kLanes <= columns; c += V * kLanes)
    MultiplyColumns<Kind, R, V>(x, spans, depth, whole_depth, c, out);
  if constexpr (V > 2)
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
      MultiplyColumns<Kind, R, 2>(x, spans, depth, whole_depth, c, out);
  if constexpr (V > 1)
    for (; c < columns; c += kLanes) MultiplyColumns<Kind, R, 1>(x, spans, depth, whole_depth, c, out);
}

template <typename Kind, int... R>
inline void MultiplyFew(int64_t rows, Matrix<const uint32_t> x, const Span* spans, int64_t depth, int64_t whole_depth,
                        int64_t columns, Matrix<uint32_t> out, std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? MultiplyRows<Kind, R + 1>(x, spans, depth, whole_depth, columns, out) : void()), ...);
}

// out[rows][columns] = x[rows][whole_depth] * spans; `columns` is a multiple of kLanes.
template <typename Kind>
void Multiply(int64_t rows, Matrix<const uint32_t> x, const Span* spans, int64_t depth, int64_t whole_depth,
              int64_t columns, Matrix<uint32_t> out) {
  for (; rows > kFewRows; rows -= kRows, x.data += kRows * x.stride, out.data += kRows * out.stride)
    MultiplyRows<Kind, kRows>(x, spans, depth, whole_depth, columns, out);
  MultiplyFew<Kind>(rows, x, spans, depth, whole_depth, columns, out, std::make_integer_sequence<int, kFewRows>());
}

}  // namespace attention
}  // namespace penstock

#endif  // PENSTOCK_ATTENTION_TILES_H_
