// Products of rows and weights in bf16, summed in f32 in the order of the processor's quickest instructions: of AMX's
// tiles, Arm's BFMMLA or VDPBF16PS, or of vectors that are unpacked to f32. kInstructions names the order.
//
// Multiply: sums[R][kPanel] += x[R][depth] * weights[depth][kPanel]. A pair of features of a column lies in a word.

#ifndef PENSTOCK_BFLOAT16_H_
#define PENSTOCK_BFLOAT16_H_

#include "ahead.h"
#include "kernels.h"
#include "tiles.h"

namespace penstock {

#if PENSTOCK_TILES
constexpr const char* kInstructions = PENSTOCK_TILES == 1 ? "TDPBF16PS" : "TDPBF16PS, emulated";

// Sums some columns at once: two chains for each of their sums fill the registers.
template <int R, Fetch kFetch = Fetch::kNothing>
inline void Multiply(const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth,
                     Vector (*sums)[kVectors], Ahead* ahead = nullptr) {
  constexpr int V = R == 1 ? kVectors : R <= 4 ? std::min(kVectors, 2) : 1;
  for (int64_t done = 0; done < depth; done += kTileFeatures, weights += kTileFeatures * kPanel) {
    const int64_t count = std::min(kTileFeatures, depth - done);
    for (int first = 0; first < kVectors; first += V) {
      Chains chains[R][V];
      const BFloat16* from = weights + 2 * first * kLanes;
      for (int64_t k = 0; k < count; k += 2, from += 2 * kPanel) {
        if constexpr (kFetch == Fetch::kAhead)
          if (first == 0) ahead->Fetch();
        Words w[V];
        for (int v = 0; v < V; ++v) std::memcpy(&w[v], from + 2 * v * kLanes, sizeof w[v]);
        for (int r = 0; r < R; ++r) {
          uint32_t pair;
          std::memcpy(&pair, x + r * stride + done + k, sizeof pair);
          for (int v = 0; v < V; ++v) chains[r][v].Add(pair, w[v]);
        }
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][first + v] = chains[r][v].AddedTo(sums[r][first + v]);
    }
  }
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr const char* kInstructions = "BFMMLA";

// A BFMMLA sums two pairs of features one after the other, for two rows and two columns. A BFDOT sums one pair, for one
// row and four columns, and rounds the same.
template <int R, Fetch kFetch = Fetch::kNothing>
inline void Multiply(const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth,
                     Vector (*sums)[kVectors], Ahead* ahead = nullptr) {
  constexpr int kTwos = R / 2;
  const auto low = [](float32x4_t of) { return vget_low_f32(of); };
  const auto high = [](float32x4_t of) { return vget_high_f32(of); };
  const auto words = [&](int64_t k, int v) {
    return vld1q_u32(reinterpret_cast<const uint32_t*>(weights + k * kPanel) + v * kLanes);
  };
  const auto features = [&](int row, int64_t k) { return reinterpret_cast<const uint16_t*>(x + row * stride + k); };
  const auto dot = [&](int row, int64_t k) {
    uint32_t pair;
    std::memcpy(&pair, features(row, k), sizeof pair);
    for (int v = 0; v < kVectors; ++v)
      sums[row][v] = (Vector)vbfdotq_f32((float32x4_t)sums[row][v], vreinterpretq_bf16_u32(vdupq_n_u32(pair)),
                                         vreinterpretq_bf16_u32(words(k, v)));
  };
  float32x4_t both[kTwos + 1][kVectors][2];  // of two rows: two columns each
  for (int two = 0; two < kTwos; ++two)
    for (int v = 0; v < kVectors; ++v) {
      const float32x4_t upper = (float32x4_t)sums[2 * two][v], lower = (float32x4_t)sums[2 * two + 1][v];
      both[two][v][0] = vcombine_f32(low(upper), low(lower)), both[two][v][1] = vcombine_f32(high(upper), high(lower));
    }
  const int64_t whole = depth / 4 * 4;
  for (int64_t k = 0; k < whole; k += 4) {
    if constexpr (kFetch == Fetch::kAhead) ahead->Fetch(), ahead->Fetch();
    bfloat16x8_t rows[kTwos + 1];
    for (int two = 0; two < kTwos; ++two) {
      const uint16x4_t upper = vld1_u16(features(2 * two, k)), lower = vld1_u16(features(2 * two + 1, k));
      rows[two] = vreinterpretq_bf16_u16(vcombine_u16(upper, lower));
    }
    for (int v = 0; v < kVectors; ++v) {
      const uint32x4_t first = words(k, v), second = words(k + 2, v);
      const bfloat16x8_t left = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
      const bfloat16x8_t right = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
      for (int two = 0; two < kTwos; ++two) {
        both[two][v][0] = vbfmmlaq_f32(both[two][v][0], rows[two], left);
        both[two][v][1] = vbfmmlaq_f32(both[two][v][1], rows[two], right);
      }
    }
    if constexpr (R % 2 == 1) dot(R - 1, k), dot(R - 1, k + 2);
  }
  for (int two = 0; two < kTwos; ++two)
    for (int v = 0; v < kVectors; ++v) {
      const float32x4_t left = both[two][v][0], right = both[two][v][1];
      sums[2 * two][v] = (Vector)vcombine_f32(low(left), low(right));
      sums[2 * two + 1][v] = (Vector)vcombine_f32(high(left), high(right));
    }
  if (whole < depth)
    for (int row = 0; row < R; ++row) dot(row, whole);
}
#else
#if defined(__AVX512BF16__)
constexpr const char* kInstructions = "VDPBF16PS";
#else
constexpr const char* kInstructions = "unpacked to f32";
#endif

template <int R, Fetch kFetch = Fetch::kNothing>
inline void Multiply(const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth,
                     Vector (*sums)[kVectors], Ahead* ahead = nullptr) {
  Vector held[R][kVectors];
  std::memcpy(held, sums, sizeof held);
  for (int64_t k = 0; k < depth; k += 2, weights += 2 * kPanel) {
    if constexpr (kFetch == Fetch::kAhead) ahead->Fetch();
    if constexpr (kFetch == Fetch::kStream) FetchStream(weights);
    Words w[kVectors];
    for (int v = 0; v < kVectors; ++v) std::memcpy(&w[v], weights + 2 * v * kLanes, sizeof w[v]);
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, x + r * stride + k, sizeof pair);
#if defined(__AVX512BF16__)
      const __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
      for (int v = 0; v < kVectors; ++v)
        held[r][v] = (Vector)_mm512_dpbf16_ps((__m512)held[r][v], both, (__m512bh)w[v]);
#else
      const float first = Load(BFloat16{static_cast<uint16_t>(pair)});
      const float second = Load(BFloat16{static_cast<uint16_t>(pair >> 16)});
      for (int v = 0; v < kVectors; ++v) {
        held[r][v] += first * (Vector)(w[v] << 16);
        held[r][v] += second * (Vector)(w[v] & 0xffff0000u);
      }
#endif
    }
  }
  std::memcpy(sums, held, sizeof held);
}
#endif

}  // namespace penstock

#endif  // PENSTOCK_BFLOAT16_H_
