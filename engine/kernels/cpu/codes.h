// Codes of quantized weights, and how they are unpacked to floats.
//
// A 32-bit lane holds codes of one column: those of 8 features in 4 bits, or of 4 in 8 bits. Codes of even features are
// in its low half, those of odd ones in its high half, both from the low bits on. So a shift or a mask leaves the two
// codes of a pair of features in the two halves, where bf16 instructions need them. A panel is [depth / features in a
// lane, kPanel] of such lanes.

#ifndef PENSTOCK_CODES_H_
#define PENSTOCK_CODES_H_

#include <type_traits>

#include "matmul.h"

namespace penstock {

inline void StoreLanes(void* to, Words value) { std::memcpy(to, &value, sizeof value); }

template <int kBits>
constexpr int64_t kInLane = 32 / kBits;

template <int kBits>
using Bits = std::integral_constant<int, kBits>;

// 4-bit codes are unsigned, and `zero` is subtracted. 8-bit codes are signed.
template <int kBits>
inline Vector ValueOf(Words lanes, int feature, float zero) {
  const int shift = 16 * (feature % 2) + kBits * (feature / 2);
  if (kBits == 8) return __builtin_convertvector((Ints)(lanes << (24 - shift)) >> 24, Vector);
  return __builtin_convertvector((Ints)(lanes >> shift & 15u), Vector) - zero;
}

// Integer products take lanes of bytes: the codes of four features of a column. A lane of 8-bit codes is such a lane. A
// lane of 4-bit codes makes two, low bits first. BytesOf makes each; FeatureOf returns the feature whose code is at a
// place in all their bytes.
template <int kBits>
constexpr int kByteLanes = 8 / kBits;

template <int kBits>
inline Words BytesOf(Words lanes, int number) {
  return kBits == 8 ? lanes : lanes >> kBits * number & 0x0f0f0f0fu;
}

template <int kBits>
constexpr int FeatureOf(int place) {
  const int shift = 8 * (place % 4) + kBits * (place / 4);
  return 2 * (shift % 16 / kBits) + shift / 16;
}

// Unpacks lanes into the rows of an f32 panel, also if rows are float16, or into the pairs of rows of a bf16 one.
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
  __m512i values;  // by code, whatever the bit above it
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
    for (int feature = 0; feature < kInLane<kBits>; feature += 2) {  // integers: nothing is rounded
      const Words first = (Words)ValueOf<kBits>(lanes, feature, zero);
      const Words second = (Words)ValueOf<kBits>(lanes, feature + 1, zero);
      StoreLanes(to + feature * kPanel, first >> 16 | (second & 0xffff0000u));
    }
  }
};

constexpr int64_t kUnpackedBytes = 16384;  // for a piece of a panel: half of the first-level cache

// Unpacks `depth` features of a panel, as Multiply takes them, and prefetches what follows them.
template <typename T, int kBits>
__attribute__((noinline)) void UnpackPiece(const uint32_t* lanes, int64_t depth, float zero, T* piece) {
  constexpr int64_t kAcross = kLanes * (sizeof(T) == 2 ? 2 : 1);  // a vector of lanes, of bf16 with its pairs
  const Unpacker<T, kBits> unpack(zero);
  const int64_t ahead = depth / kInLane<kBits> * kPanel;
  for (int64_t k = 0; k < depth; k += kInLane<kBits>, lanes += kPanel)
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(lanes + ahead + v * kLanes);
      unpack(LoadWords(lanes + v * kLanes), piece + k * kPanel + v * kAcross);
    }
}

// Unpacks `depth` features of a panel to lanes of bytes.
template <int kBits>
__attribute__((noinline)) void UnpackBytes(const uint32_t* lanes, int64_t depth, uint32_t* piece) {
  for (int64_t k = 0; k < depth; k += kInLane<kBits>, lanes += kPanel)
    for (int number = 0; number < kByteLanes<kBits>; ++number, piece += kPanel)
      for (int v = 0; v < kVectors; ++v)
        StoreLanes(piece + v * kLanes, BytesOf<kBits>(LoadWords(lanes + v * kLanes), number));
}

}  // namespace penstock

#endif  // PENSTOCK_CODES_H_
