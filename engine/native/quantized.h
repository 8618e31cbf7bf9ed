// Matmuls with quantized weights: the kernels themselves, which know neither XLA nor threads.
//
// A weight is `scale * code - offset`, with a scale and an offset for each column and each group of input features. A
// lane of 32 bits holds codes of one column, of 8 features in 4 bits or of 4 in 8 bits: those of even features in its
// low half, those of odd ones in its high half, both from the low bits on. So a shift or a mask leaves the two codes of
// a pair of features in the two halves, where instructions for bf16 want them. A panel is [depth / features in a lane,
// kPanel] of such lanes, its scales and offsets are [groups, kPanel].
//
// Rows are either as the model computes them (f32, bf16): then a piece of a panel is unpacked into the first-level
// cache, where the codes are exact in either type, and multiplied as any other weights. Or they are quantized to 8 bits
// too: then products are summed in whole numbers, which no order of summing changes. Either way a group's sum is scaled
// in f32, group after group: a row's result depends on nothing but that row.

#ifndef PENSTOCK_QUANTIZED_H_
#define PENSTOCK_QUANTIZED_H_

#include <limits>
#include <type_traits>

#include "matmul.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace penstock {

typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline Words LoadLanes(const uint32_t* from) {
  Words result;
  std::memcpy(&result, from, sizeof result);
  return result;
}
inline void StoreLanes(void* to, Words value) { std::memcpy(to, &value, sizeof value); }

struct Half {
  uint16_t bits;
};

inline Vector LoadVector(const Half* from) {
  HalfWords halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__) && defined(__AVX__)
  return (Vector)_mm256_cvtph_ps((__m128i)halves);
#else
  // The bits of an f32 that is 2^-112 times as large, which holds for the smallest too.
  const Words bits = __builtin_convertvector(halves, Words);
  const Vector size = (Vector)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (Vector)((Words)size | ((bits & 0x8000u) << 16));
#endif
}

// ---- Codes

template <int kBits>
constexpr int64_t kInLane = 32 / kBits;

// Codes of 4 bits have no sign: `zero` is subtracted. Those of 8 bits have one.
template <int kBits>
inline Vector ValueOf(Words lanes, int feature, float zero) {
  const int shift = 16 * (feature % 2) + kBits * (feature / 2);
  if (kBits == 8) return __builtin_convertvector((Ints)(lanes << (24 - shift)) >> 24, Vector);
  return __builtin_convertvector((Ints)(lanes >> shift & 15u), Vector) - zero;
}

// What unpacks lanes into the rows of a panel of f32, or the pairs of rows of one of bf16.
template <typename T, int kBits>
struct Unpacker;

template <int kBits>
struct Unpacker<float, kBits> {
  float zero;
  explicit Unpacker(float zero) : zero(zero) {}
  void operator()(Words lanes, float* to) const {
    for (int feature = 0; feature < kInLane<kBits>; ++feature)
      StoreLanes(to + feature * kPanel, (Words)ValueOf<kBits>(lanes, feature, zero));
  }
};

#if defined(__AVX512BW__)
template <>
struct Unpacker<BFloat16, 4> {
  __m512i values;  // of a code, whatever the bit above it
  explicit Unpacker(float zero) {
    alignas(64) BFloat16 table[32];
    for (int code = 0; code < 32; ++code) Store(&table[code], static_cast<float>(code % 16) - zero);
    values = _mm512_load_si512(table);
  }
  void operator()(Words lanes, BFloat16* to) const {
    const __m512i codes = (__m512i)lanes;
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(codes, values));
    _mm512_storeu_si512(to + 2 * kPanel, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), values));
    _mm512_storeu_si512(to + 4 * kPanel, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), values));
    _mm512_storeu_si512(to + 6 * kPanel, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), values));
  }
};
#endif

#if defined(__AVX512VBMI__)
template <>
struct Unpacker<BFloat16, 8> {
  __m512i low[4], high[4];  // bytes of the values of codes 0 to 63, 64 to 127, -128 to -65 and -64 to -1
  explicit Unpacker(float) {
    alignas(64) uint8_t bytes[2][256];
    for (int code = 0; code < 256; ++code) {
      BFloat16 value;
      Store(&value, static_cast<float>(static_cast<int8_t>(code)));
      bytes[0][code] = static_cast<uint8_t>(value.bits), bytes[1][code] = static_cast<uint8_t>(value.bits >> 8);
    }
    for (int part = 0; part < 4; ++part) {
      low[part] = _mm512_load_si512(bytes[0] + 64 * part);
      high[part] = _mm512_load_si512(bytes[1] + 64 * part);
    }
  }
  static __m512i Of(const __m512i* table, __m512i codes, __mmask64 is_negative) {
    const __m512i positive = _mm512_permutex2var_epi8(table[0], codes, table[1]);
    return _mm512_mask_mov_epi8(positive, is_negative, _mm512_permutex2var_epi8(table[2], codes, table[3]));
  }
  void operator()(Words lanes, BFloat16* to) const {
    const __m512i codes = (__m512i)lanes, first = _mm512_set1_epi16(0xff);
    const __mmask64 is_negative = _mm512_movepi8_mask(codes);
    const __m512i lows = Of(low, codes, is_negative), highs = Of(high, codes, is_negative);
    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_and_si512(lows, first), _mm512_slli_epi16(highs, 8)));
    _mm512_storeu_si512(to + 2 * kPanel,
                        _mm512_or_si512(_mm512_andnot_si512(first, highs), _mm512_srli_epi16(lows, 8)));
  }
};
#endif

template <int kBits>
struct Unpacker<BFloat16, kBits> {
  float zero;
  explicit Unpacker(float zero) : zero(zero) {}
  void operator()(Words lanes, BFloat16* to) const {
    for (int feature = 0; feature < kInLane<kBits>; feature += 2) {  // whole numbers: nothing is rounded
      const Words first = (Words)ValueOf<kBits>(lanes, feature, zero);
      const Words second = (Words)ValueOf<kBits>(lanes, feature + 1, zero);
      StoreLanes(to + feature * kPanel, first >> 16 | (second & 0xffff0000u));
    }
  }
};

// Unpacks `depth` features of a panel, as Multiply takes them, and fetches what comes behind them.
template <typename T, int kBits>
__attribute__((noinline)) void UnpackPiece(const uint32_t* lanes, int64_t depth, float zero, T* piece) {
  constexpr int64_t kAcross = kLanes * (sizeof(T) == 2 ? 2 : 1);  // a vector of lanes, of bf16 with its pairs
  const Unpacker<T, kBits> unpack(zero);
  const int64_t ahead = depth / kInLane<kBits> * kPanel;
  for (int64_t k = 0; k < depth; k += kInLane<kBits>, lanes += kPanel)
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(lanes + ahead + v * kLanes);
      unpack(LoadLanes(lanes + v * kLanes), piece + k * kPanel + v * kAcross);
    }
}

// ---- Rows of whole numbers

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr uint32_t kUnsigned = 0x80808080u;  // the instruction takes x without a sign: 128 is added to it
inline Ints Dot(Ints sums, Words x, Words weights) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)weights);
#else
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)x, (__m256i)weights);
#endif
}
#else
constexpr uint32_t kUnsigned = 0;
#if defined(__AVX512BW__)
inline Ints Dot(Ints sums, Words x, Words weights) {
  const auto low = [](Words w) { return _mm512_srai_epi16(_mm512_slli_epi16((__m512i)w, 8), 8); };
  const auto high = [](Words w) { return _mm512_srai_epi16((__m512i)w, 8); };
  return sums + (Ints)_mm512_madd_epi16(low(x), low(weights)) + (Ints)_mm512_madd_epi16(high(x), high(weights));
}
#elif defined(__AVX2__)
inline Ints Dot(Ints sums, Words x, Words weights) {
  // In 16 bits: instructions that take bytes saturate, which would not be exact.
  const auto low = [](Words w) { return _mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8); };
  const auto high = [](Words w) { return _mm256_srai_epi16((__m256i)w, 8); };
  return sums + (Ints)_mm256_madd_epi16(low(x), low(weights)) + (Ints)_mm256_madd_epi16(high(x), high(weights));
}
#elif defined(__ARM_FEATURE_DOTPROD)
inline Ints Dot(Ints sums, Words x, Words weights) {
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)x, (int8x16_t)weights);
}
#else
inline Ints Dot(Ints sums, Words x, Words weights) {
  for (int shift = 0; shift < 32; shift += 8)
    sums += ((Ints)(x << (24 - shift)) >> 24) * ((Ints)(weights << (24 - shift)) >> 24);
  return sums;
}
#endif
#endif

// A row in 8 bits, in lanes as weights are: the nearest to x / scale, where the largest is 127. Gives the scale. A row
// with an infinity or what is no number has a scale that is no number.
template <typename T>
__attribute__((noinline)) float QuantizeRow(const T* x, int64_t depth, uint8_t* to) {
  uint32_t most = 0;  // as bits, which are ordered as sizes are, and what is no number last
  for (int64_t k = 0; k < depth; ++k) {
    const float size = std::fabs(Load(x[k]));
    uint32_t bits;
    std::memcpy(&bits, &size, sizeof bits);
    most = std::max(most, bits);
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const bool is_finite = most < 0x7f800000u;
  const float inverse = is_finite && largest > 1e-36f ? 127.0f / largest : 0.0f;  // of less it would be infinite
  constexpr int kAdded = kUnsigned ? 128 : 0;
  if (inverse == 0.0f) {
    std::memset(to, kAdded, depth);
    return is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t k = 0; k < depth; ++k)
    to[k] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(Load(x[k]) * inverse)) + kAdded);
  for (int64_t k = 0; k < depth; k += 4) {
    uint32_t lane;
    std::memcpy(&lane, to + k, sizeof lane);
    lane = (lane & 0xff0000ffu) | (lane & 0xff00u) << 8 | (lane & 0xff0000u) >> 8;
    std::memcpy(to + k, &lane, sizeof lane);
  }
  return largest / 127.0f;
}

// ---- A group of features, or a piece of one

template <int R>
using Rows = std::integral_constant<int, R>;

// Calls `tile` with how many rows it has, up to kRows, known when it is compiled.
template <typename Tile>
inline void OfRows(int64_t rows, Tile&& tile) {
  switch (rows) {
    case 1: return tile(Rows<1>{});
    case 2: return tile(Rows<2>{});
    case 3: return tile(Rows<3>{});
    case 4: return tile(Rows<4>{});
    case 5: return tile(Rows<5>{});
    default: return tile(Rows<kRows>{});
  }
}

// totals[R][kPanel] += scales[kPanel] * (x[R][depth] * piece[depth][kPanel])
template <int R, typename T>
__attribute__((noinline)) void ScaledTile(const T* x, int64_t stride, const T* piece, int64_t depth,
                                          const Vector* scales, Vector (*totals)[kVectors]) {
  Vector sums[R][kVectors] = {};
  Multiply<R>(x, stride, piece, depth, sums);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) totals[r][v] += sums[r][v] * scales[v];
}

// The same of weights that are unpacked in registers, a lane's features at a time: quicker for few rows, and the same to
// the bit where it is used, for an instruction does all that is rounded. Other sums compilers may put into another order.
#if defined(__AVX512BF16__)
template <typename T>
constexpr int64_t kFewRows = sizeof(T) == 2 ? 4 : 0;
#else
template <typename T>
constexpr int64_t kFewRows = 0;
#endif

template <int R, typename T, int kBits>
__attribute__((noinline)) void FewTile(const T* x, int64_t stride, const uint32_t* lanes, int64_t depth, float zero,
                                       const Vector* scales, Vector (*totals)[kVectors]) {
  constexpr int64_t kAcross = kLanes * (sizeof(T) == 2 ? 2 : 1);
  const Unpacker<T, kBits> unpack(zero);
  Vector sums[R][kVectors] = {};
  for (int64_t k = 0; k < depth; k += kInLane<kBits>, lanes += kPanel) {
    alignas(64) T step[kInLane<kBits> * kPanel];
    for (int v = 0; v < kVectors; ++v) unpack(LoadLanes(lanes + v * kLanes), step + v * kAcross);
    Multiply<R>(x + k, stride, step, kInLane<kBits>, sums);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) totals[r][v] += sums[r][v] * scales[v];
}

// The same of whole numbers. What was added to x makes the sums larger by `added`; `adds`: that is still to be summed.
template <int R, bool adds>
__attribute__((noinline)) void DotTile(const uint8_t* x, int64_t stride, const uint32_t* lanes, int64_t depth,
                                       const Vector* scales, Ints* added, Vector (*totals)[kVectors]) {
  Ints sums[R][kVectors] = {}, larger[kVectors] = {};
  for (int64_t k = 0; k < depth; k += 4, lanes += kPanel) {
    Words w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = LoadLanes(lanes + v * kLanes);
    if (adds)
      for (int v = 0; v < kVectors; ++v) larger[v] = Dot(larger[v], kUnsigned - Words{}, w[v]);
    for (int r = 0; r < R; ++r) {
      uint32_t lane;
      std::memcpy(&lane, x + r * stride + k, sizeof lane);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Dot(sums[r][v], lane - Words{}, w[v]);
    }
  }
  if (adds) std::memcpy(added, larger, sizeof larger);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      totals[r][v] += __builtin_convertvector(sums[r][v] - added[v], Vector) * scales[v];
}

// Rows as the model computes them.
template <typename T>
struct PlainRows {
  const T* x;
  int64_t depth;

  float Scale(int64_t) const { return 1.0f; }

  float Sum(int64_t row, int64_t first, int64_t count) const {
    const T* from = x + row * depth + first;
    Vector parts = {};  // the same ones wherever in memory the row is
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) parts += LoadVector(from + k);
    float sum = 0.0f;
    for (; k < count; ++k) sum += Load(from[k]);
    for (int lane = 0; lane < kLanes; ++lane) sum += parts[lane];
    return sum;
  }

  // totals += scales * (rows' `count` features from `first` on, times those of a panel)
  template <int kBits>
  void Multiply(int64_t row, int64_t num_rows, int64_t first, int64_t count, const uint32_t* lanes, float zero,
                const Vector* scales, Vector (*totals)[kVectors]) const {
    constexpr int64_t kPiece = kPieceBytes / kPanel / static_cast<int64_t>(sizeof(T));
    alignas(64) T piece[kPiece * kPanel];
    for (int64_t k = 0; k < count; k += kPiece) {
      const int64_t depth_here = std::min(kPiece, count - k);
      const uint32_t* here = lanes + k / kInLane<kBits> * kPanel;
      if (num_rows <= kFewRows<T>) {
        OfRows(num_rows, [&](auto tile) {
          if constexpr (tile() <= kFewRows<T>)
            FewTile<tile(), T, kBits>(x + row * depth + first + k, depth, here, depth_here, zero, scales, totals);
        });
        continue;
      }
      UnpackPiece<T, kBits>(here, depth_here, zero, piece);
      for (int64_t r = 0; r < num_rows; r += kRows)
        OfRows(std::min<int64_t>(kRows, num_rows - r), [&](auto tile) {
          ScaledTile<tile()>(x + (row + r) * depth + first + k, depth, piece, depth_here, scales, totals + r);
        });
    }
  }
};

// Rows that are quantized.
struct ByteRows {
  const uint8_t* x;
  const float* scales;  // of each row
  int64_t depth;

  float Scale(int64_t row) const { return scales[row]; }

  float Sum(int64_t row, int64_t first, int64_t count) const {
    int32_t sum = 0;
    for (int64_t k = first; k < first + count; ++k)
      sum += kUnsigned ? x[row * depth + k] - 128 : static_cast<int8_t>(x[row * depth + k]);
    return static_cast<float>(sum);
  }

  // A group is summed at once: what is rounded does not depend on how long pieces are.
  template <int kBits>
  void Multiply(int64_t row, int64_t num_rows, int64_t first, int64_t count, const uint32_t* lanes, float,
                const Vector* weight_scales, Vector (*totals)[kVectors]) const {
    static_assert(kBits == 8, "codes of 4 bits are multiplied with rows that are not quantized");
    const uint8_t* from = x + row * depth + first;
    Ints added[kVectors] = {};
    int64_t r = 0;
    if (kUnsigned) {
      r = std::min<int64_t>(num_rows, kRows - 2);  // there are registers for so many beside what is added
      OfRows(r, [&](auto tile) { DotTile<tile(), true>(from, depth, lanes, count, weight_scales, added, totals); });
    }
    for (; r < num_rows; r += kRows)
      OfRows(std::min<int64_t>(kRows, num_rows - r), [&](auto tile) {
        DotTile<tile(), false>(from + r * depth, depth, lanes, count, weight_scales, added, totals + r);
      });
  }
};

// ---- A task: a panel and some rows

enum class ScaleType { kFloat, kBFloat16, kHalf };
enum class Offset : int64_t { kNone = 0, kZeros = 1, kMinimums = 2 };  // zeros are times the scale

struct QuantizedWeights {
  int64_t depth, group;          // features, and how many of them share a scale
  const uint32_t* codes;         // [panels, depth / features in a lane, kPanel]
  const void *scales, *offsets;  // [panels, groups, kPanel]
  ScaleType scale_type;          // of both
  Offset offset;

  int64_t Groups() const { return depth / group; }

  void LoadScales(const void* from, int64_t panel, int64_t number, Vector* to) const {
    const int64_t at = (panel * Groups() + number) * kPanel;
    for (int v = 0; v < kVectors; ++v) switch (scale_type) {
        case ScaleType::kFloat: to[v] = LoadVector(static_cast<const float*>(from) + at + v * kLanes); break;
        case ScaleType::kBFloat16: to[v] = LoadVector(static_cast<const BFloat16*>(from) + at + v * kLanes); break;
        case ScaleType::kHalf: to[v] = LoadVector(static_cast<const Half*>(from) + at + v * kLanes); break;
      }
  }
};

// totals[num_rows][kPanel] = rows * weights of a panel
template <int kBits, typename Rows>
void MultiplyQuantized(const QuantizedWeights& weights, const Rows& rows, int64_t first_row, int64_t num_rows,
                       int64_t panel, Vector (*totals)[kVectors]) {
  constexpr int64_t kEach = kInLane<kBits>;
  const uint32_t* lanes = weights.codes + panel * weights.depth / kEach * kPanel;
  const float zero = kBits == 4 && weights.offset == Offset::kNone ? 8.0f : 0.0f;
  std::memset(totals, 0, num_rows * sizeof totals[0]);
  for (int64_t number = 0; number < weights.Groups(); ++number) {
    const int64_t first = number * weights.group;
    Vector scales[kVectors], offsets[kVectors];
    weights.LoadScales(weights.scales, panel, number, scales);
    rows.template Multiply<kBits>(first_row, num_rows, first, weights.group, lanes + first / kEach * kPanel, zero,
                                  scales, totals);
    if (weights.offset == Offset::kNone) continue;
    weights.LoadScales(weights.offsets, panel, number, offsets);
    if (weights.offset == Offset::kZeros)
      for (int v = 0; v < kVectors; ++v) offsets[v] *= scales[v];
    for (int64_t r = 0; r < num_rows; ++r) {
      const float sum = rows.Sum(first_row + r, first, weights.group);
      for (int v = 0; v < kVectors; ++v) totals[r][v] -= sum * offsets[v];
    }
  }
  for (int64_t r = 0; r < num_rows; ++r)
    for (int v = 0; v < kVectors; ++v) totals[r][v] *= rows.Scale(first_row + r);
}

// As RunTask of matmul.h.
template <int kBits, typename Rows, typename Put>
void RunQuantizedTask(const Matmul& matmul, const QuantizedWeights& weights, const Rows& rows, int64_t first_row,
                      int64_t num_rows, int64_t panel, Put&& put) {
  alignas(64) Vector totals[kRowsPerTask][kVectors];
  alignas(64) float full[kPanel];
  MultiplyQuantized<kBits>(weights, rows, first_row, num_rows, panel, totals);
  const int64_t column = panel * (matmul.gate == Gate::kNone ? kPanel : kPanel / 2);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t width = Finish(totals[r], matmul.bias ? matmul.bias + panel * kPanel : nullptr, matmul.gate, full);
    put(first_row + r, column, full, std::min(width, matmul.columns - column));
  }
}

}  // namespace penstock

#endif  // PENSTOCK_QUANTIZED_H_
