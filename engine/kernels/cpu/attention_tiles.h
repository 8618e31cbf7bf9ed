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
#include "tile_block.h"

namespace penstock {
namespace attention {

// sum += x * w, by lanes.
struct Floats {
  using Sum = Vector;
  static constexpr int64_t kBlock = 0;
  static Sum Dot(Sum sum, Words x, Words w) { return sum + (Vector)x * (Vector)w; }
};

// Sums two products, in f32. With tiles (tiles.h) kWords words make a block, which is summed by itself.
template <int64_t kWords>
struct BFloat16Pairs {
  using Sum = Vector;
  static constexpr int64_t kBlock = kHasTiles ? kWords : 0;
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
  static constexpr int64_t kBlock = 0;
  static Sum Dot(Sum sum, Words x, Words w) { return DotBytes(sum, w ^ 0x80808080u, x); }
};

// Codes of values times bytes of weights, which are unsigned.
struct ValueBytes {
  using Sum = Ints;
  static constexpr int64_t kBlock = 0;
  static Sum Dot(Sum sum, Words x, Words w) { return DotBytes(sum, x, w); }
};

template <typename T>
struct Matrix {
  T* data;
  int64_t stride;  // elements between rows
};

constexpr int kFewRows = 8;  // rows in one tile: the matrix, which may come from memory, is read once
constexpr int kSecondLevel = 2;  // cache level that can have more lines in flight than the first

// Keys or values of neighbouring tokens, as their matmul takes them.
struct Span {
  const uint32_t* words;
  int64_t stride;  // words between rows
  int64_t ahead;   // bytes from here to the data needed next
};

// A matrix of spans: of keys, side by side, or of values, one below the other. `columns` and `depth` are those of each
// span but the last, which may have fewer.
struct Spans {
  const Span* spans;
  int64_t columns, depth;
};

// V vectors of columns, each of which may lie in another span. They are read row after row. Whoever reads them first, when
// they may come from memory, prefetches what is needed next.
template <bool kFetches, int V>
struct Columns {
  const uint32_t* from[V];
  int64_t ahead[V], stride, place = 0;

  Columns(const Spans& all, int64_t done, int64_t c) {
    const Span* below = all.spans + done / all.depth;
    stride = below->stride;
    for (int v = 0; v < V; ++v, c += kLanes) {
      const Span& span = below[c / all.columns];
      from[v] = span.words + c % all.columns, ahead[v] = span.ahead;
    }
  }
  Words Read(int v) const {
    const uint32_t* at = from[v] + place;
    if constexpr (kFetches) __builtin_prefetch(reinterpret_cast<const char*>(at) + ahead[v], 0, kSecondLevel);
    return LoadWords(at);
  }
  void Next() { place += stride; }
};

// AddTile in the order in which tiles sum, for rows that are too few for tiles: each block has its own chains of sums.
template <typename Kind, bool kFetches, int R, int V>
inline void AddBlocks(Matrix<const uint32_t> x, Columns<kFetches, V> w, int64_t depth, Vector (&sums)[R][V]) {
  for (int64_t done = 0; done < depth; done += Kind::kBlock) {
    Chains chains[R][V];
    for (int64_t k = done; k < std::min(done + Kind::kBlock, depth); ++k, w.Next())
      for (int v = 0; v < V; ++v) {
        const Words row = w.Read(v);
        for (int r = 0; r < R; ++r) chains[r][v].Add(x.data[r * x.stride + k], row);
      }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = chains[r][v].AddedTo(sums[r][v]);
  }
}

// sums[R][V vectors] += x[R][depth] * w[depth][V vectors].
template <typename Kind, bool kFetches, int R, int V>
inline void AddTile(Matrix<const uint32_t> x, Columns<kFetches, V> w, int64_t depth, typename Kind::Sum (&sums)[R][V]) {
  if constexpr (Kind::kBlock > 0) return AddBlocks<Kind>(x, w, depth, sums);
  for (int64_t k = 0; k < depth; ++k, w.Next()) {
    Words row[V];
    for (int v = 0; v < V; ++v) row[v] = w.Read(v);
    for (int r = 0; r < R; ++r) {
      const Words value = Words{} + x.data[r * x.stride + k];
      for (int v = 0; v < V; ++v) sums[r][v] = Kind::Dot(sums[r][v], value, row[v]);
    }
  }
}

// Number of vectors in a tile of R rows whose sums stay in registers, also those of chains.
constexpr int Width(int rows, bool has_chains) {
  const int sums = has_chains ? kRows * kVectors / 3 : kRows * kVectors;
  return 4 * rows <= sums ? 4 : 2 * rows <= sums ? 2 : 1;
}

// out[r][c .. c + V vectors] = x[r][whole_depth] * w.
template <typename Kind, bool kFetches, int R, int V>
inline void MultiplyColumns(Matrix<const uint32_t> x, const Spans& w, int64_t whole_depth, int64_t c,
                            Matrix<uint32_t> out) {
  typename Kind::Sum sums[R][V] = {};
  for (int64_t done = 0; done < whole_depth; done += w.depth)
    AddTile<Kind>({x.data + done, x.stride}, Columns<kFetches, V>(w, done, c), std::min(w.depth, whole_depth - done), sums);
  for (int r = 0; r < R; ++r)  // vector by vector: whole rows would pass through memory
    for (int v = 0; v < V; ++v) std::memcpy(out.data + r * out.stride + c + v * kLanes, &sums[r][v], sizeof sums[r][v]);
}

// Multiplies `rows` rows, in tiles of R. Columns that one tile reads stay in the first-level cache for the next tile.
// It is a function of its own, so that profiles and the tests of the library's instructions can find it.
template <typename Kind, int R>
__attribute__((noinline)) void MultiplyRows(int64_t rows, Matrix<const uint32_t> x, const Spans& w, int64_t whole_depth,
                                            int64_t columns, Matrix<uint32_t> out) {
  constexpr int V = Width(R, Kind::kBlock > 0);
  int64_t c = 0;
  const auto down = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    MultiplyColumns<Kind, true, R, kWidth>(x, w, whole_depth, c, out);
    if constexpr (R == kRows)  // there are more tiles only of kRows
      for (int64_t row = R; row < rows; row += R)
        MultiplyColumns<Kind, false, R, kWidth>({x.data + row * x.stride, x.stride}, w, whole_depth, c,
                                                {out.data + row * out.stride, out.stride});
    c += kWidth * kLanes;
  };
  while (c + V * kLanes <= columns) down(std::integral_constant<int, V>());
  if constexpr (V > 2)
    while (c + 2 * kLanes <= columns) down(std::integral_constant<int, 2>());
  if constexpr (V > 1)
    while (c < columns) down(std::integral_constant<int, 1>());
}

template <typename Kind, int... R>
inline void MultiplyFew(int64_t rows, Matrix<const uint32_t> x, const Spans& w, int64_t whole_depth, int64_t columns,
                        Matrix<uint32_t> out, std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? MultiplyRows<Kind, R + 1>(rows, x, w, whole_depth, columns, out) : void()), ...);
}

// out[kDown tiles][kAcross tiles] = x * the spans, from word `begin` to `end` of the depth and by `words` of them at
// once; it adds to out unless `begin` is 0. If few rows read the spans, it prefetches as AddTile does.
template <int kDown, int kAcross>
inline void MultiplyTiles(Tiles& tiles, Matrix<const uint32_t> x, const Span* spans, int64_t depth, int64_t begin,
                          int64_t end, int64_t words, int64_t c, Matrix<uint32_t> out) {
  TileBlock<kDown, kAcross> block(tiles, out.data + c, out.stride * 4);
  if (begin == 0) block.Clear();
  else block.Load();
  for (int64_t k = begin; k < end; k += words) {
    const Span& span = spans[k / depth];
    const uint32_t* from = span.words + k % depth * span.stride + c;
    if (kDown == 1)
      for (int64_t i = 0; i < words; ++i)
        for (int across = 0; across < kAcross; ++across)
          __builtin_prefetch(reinterpret_cast<const char*>(from + i * span.stride + across * kTileWords) + span.ahead,
                             0, kSecondLevel);
    block.template Add<BFloat16Words>(x.data + k, x.stride * 4, from, span.stride * 4);
  }
  block.Store();
}

// The same as Multiply, by tiles. Blocks lie in one span each, or there is one span.
template <typename Kind>
__attribute__((noinline)) void MultiplyByTiles(Tiles& tiles, int64_t rows, Matrix<const uint32_t> x, const Span* spans,
                                               int64_t depth, int64_t whole_depth, int64_t columns,
                                               Matrix<uint32_t> out) {
  const auto part = [&](int64_t begin, int64_t end, int64_t words) {
    for (int64_t row = 0; row < rows; row += 2 * kTileRows) {
      const int64_t upper = std::min(kTileRows, rows - row), lower = std::min(kTileRows, rows - row - upper);
      const Matrix<const uint32_t> from{x.data + row * x.stride, x.stride};
      const Matrix<uint32_t> to{out.data + row * out.stride, out.stride};
      tiles.Shape(upper, lower, words);
      int64_t c = 0;
      if (lower > 0)
        for (; c + 2 * kTileWords <= columns; c += 2 * kTileWords)
          MultiplyTiles<2, 2>(tiles, from, spans, depth, begin, end, words, c, to);
      else
        for (; c + 4 * kTileWords <= columns; c += 4 * kTileWords)
          MultiplyTiles<1, 4>(tiles, from, spans, depth, begin, end, words, c, to);
      for (; c < columns; c += kTileWords)
        if (lower > 0) MultiplyTiles<2, 1>(tiles, from, spans, depth, begin, end, words, c, to);
        else MultiplyTiles<1, 1>(tiles, from, spans, depth, begin, end, words, c, to);
    }
  };
  const int64_t whole = whole_depth / Kind::kBlock * Kind::kBlock;
  if (whole > 0) part(0, whole, Kind::kBlock);
  if (whole < whole_depth) part(whole, whole_depth, whole_depth - whole);
}

// out[rows][columns] = x[rows][whole_depth] * w; `columns`, of each span too, is a multiple of kLanes.
template <typename Kind>
void Multiply(TaskTiles& tiles, int64_t rows, Matrix<const uint32_t> x, const Spans& w, int64_t whole_depth,
              int64_t columns, Matrix<uint32_t> out) {
  if constexpr (Kind::kBlock > 0)
    if (rows >= kFewestTileRows && columns % kTileWords == 0) {
      for (int64_t c = 0; c < columns; c += w.columns)
        MultiplyByTiles<Kind>(tiles, rows, x, w.spans + c / w.columns, w.depth, whole_depth,
                              std::min(w.columns, columns - c), {out.data + c, out.stride});
      return;
    }
  const int64_t many = rows > kFewRows ? CeilDivide(rows - kFewRows, kRows) * kRows : 0;
  if (many > 0) MultiplyRows<Kind, kRows>(many, x, w, whole_depth, columns, out);
  MultiplyFew<Kind>(rows - many, {x.data + many * x.stride, x.stride}, w, whole_depth, columns,
                    {out.data + many * out.stride, out.stride}, std::make_integer_sequence<int, kFewRows>());
}

}  // namespace attention
}  // namespace penstock

#endif  // PENSTOCK_ATTENTION_TILES_H_
