// Products of 8-bit integers, summed in 32 bits: exact, with whichever vector instructions the processor has.

#ifndef PENSTOCK_DOTS_H_
#define PENSTOCK_DOTS_H_

#include <limits>

#include "codes.h"
#include "tiles.h"

namespace penstock {

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr uint32_t kUnsigned = 0x80808080u;  // the instruction takes unsigned x: 128 is added to it
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
  // In 16 bits, because instructions that take bytes saturate, which would not be exact.
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

// The same with codes of 0 to 15, which need no sign: x is signed, whatever the instruction.
inline Ints DotOfSmall(Ints sums, Words codes, Words x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return Dot(sums, codes, x);
#elif defined(__AVX512BW__)  // the sum of two products fits into 16 bits
  return sums + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)codes, (__m512i)x), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, (__m256i)x), _mm256_set1_epi16(1));
#else
  return Dot(sums, codes, x);
#endif
}

// What is added to rows in memory that are multiplied by codes of so many bits: tiles take signed x.
template <int kBits>
constexpr uint32_t kStored = kHasTiles || kBits == 4 ? 0 : kUnsigned;

// Quantizes a row to 8 bits, in the order of the weights' bytes: the values nearest to x / scale, with the largest at
// 127. Returns the scale, which is NaN for a row with an infinity or a NaN.
template <int kBits, typename T>
__attribute__((noinline)) float QuantizeRow(const T* x, int64_t depth, uint8_t* to) {
  uint32_t most = 0;  // as bits, which are ordered like magnitudes, with NaN last
  for (int64_t k = 0; k < depth; ++k) {
    const float size = std::fabs(Load(x[k]));
    uint32_t bits;
    std::memcpy(&bits, &size, sizeof bits);
    most = std::max(most, bits);
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const bool is_finite = most < 0x7f800000u;
  const float inverse = is_finite && largest > 1e-36f ? 127.0f / largest : 0.0f;  // for less it would be infinite
  constexpr int kAdded = kStored<kBits> ? 128 : 0;
  if (inverse == 0.0f) {
    std::memset(to, kAdded, depth);
    return is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t k = 0; k < depth; ++k)
    to[k] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(Load(x[k]) * inverse)) + kAdded);
  for (int64_t k = 0; k < depth; k += kInLane<kBits>) {
    uint8_t lanes[kInLane<kBits>];
    std::memcpy(lanes, to + k, sizeof lanes);
    for (int place = 0; place < kInLane<kBits>; ++place) to[k + place] = lanes[FeatureOf<kBits>(place)];
  }
  return largest / 127.0f;
}

}  // namespace penstock

#endif  // PENSTOCK_DOTS_H_
