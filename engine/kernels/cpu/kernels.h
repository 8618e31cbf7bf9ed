// The basis of all CPU kernels: bfloat16 and float16, the widest vectors, and functions that compilers vectorise.

#ifndef PENSTOCK_KERNELS_H_
#define PENSTOCK_KERNELS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace penstock {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {  // IEEE 754
  uint16_t bits;
};

// Reinterprets the bits of one type as another of the same size.
template <typename To, typename From>
inline To As(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are neither left out nor made up");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// The value of a float16's bits. F is float and W uint32_t, or both are vectors of them. No intermediate f32 is
// subnormal: XLA's threads flush those to 0.
template <typename F, typename W>
inline F WideOf(W bits) {
  const W size = bits & 0x7fffu;
  const F tiny = As<F>(size | 0x3f000000u) - 0.5f;  // an f32's spacing at 0.5 is the smallest float16
  const W normal = (size << 13) + (112u << 23);
  const W wide = size < 0x7c00u ? normal : (normal | 0x7f800000u);
  return As<F>((size < 0x0400u ? As<W>(tiny) : wide) | (bits & 0x8000u) << 16);
}

// The bits of the nearest float16, ties to even; a NaN stays NaN.
template <typename F, typename W>
inline W Float16BitsOf(F x) {
  const W bits = As<W>(x), sign = bits & 0x80000000u, size = bits ^ sign;
  const W tiny = As<W>(As<F>(size) + 0.5f) - 0x3f000000u;
  const W normal = (size - (112u << 23) + 0x0fffu + ((size >> 13) & 1u)) >> 13;
  const W huge = size > 0x7f800000u ? W{} + 0x7e00u : W{} + 0x7c00u;
  return (size < (113u << 23) ? tiny : size < (143u << 23) ? normal : huge) | sign >> 16;
}

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

#if defined(__F16C__)
inline float Load(Float16 value) { return _cvtsh_ss(value.bits); }
inline void Store(Float16* to, float value) { to->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float Load(Float16 value) { return WideOf<float, uint32_t>(value.bits); }
inline void Store(Float16* to, float value) { to->bits = static_cast<uint16_t>(Float16BitsOf<float, uint32_t>(value)); }
#endif

// The widest vectors of the processor. A tile of kRows rows and kVectors vectors fits into its registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4, kRows = 6;  // 24 sums in 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kVectors = 2, kRows = 6;  // 12 in 16
#else
constexpr int kLanes = 4, kVectors = 4, kRows = 6;  // 24 in 32
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfWords __attribute__((vector_size(kLanes * 2)));

inline Words LoadWords(const uint32_t* from) {
  Words result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

inline Vector LoadVector(const float* from) {
  Vector result;
  std::memcpy(&result, from, sizeof result);
  return result;
}
inline Vector LoadVector(const BFloat16* from) {
  HalfWords halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Vector)(__builtin_convertvector(halves, Words) << 16);
}

inline Vector LoadVector(const Float16* from) {
  HalfWords halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__) && defined(__AVX__)
  return (Vector)_mm256_cvtph_ps((__m128i)halves);
#else
  return WideOf<Vector, Words>(__builtin_convertvector(halves, Words));
#endif
}

inline void StoreVector(float* to, Vector values) { std::memcpy(to, &values, sizeof values); }

// Rounds to bf16, to nearest, ties to even; a NaN stays NaN.
inline HalfWords Rounded(Vector x) {
#if defined(__AVX512BF16__)
  return (HalfWords)_mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x;
  const Words rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
  return __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0u, HalfWords);
#endif
}

inline void StoreVector(BFloat16* to, Vector values) {
  const HalfWords halves = Rounded(values);
  std::memcpy(to, &halves, sizeof halves);
}

inline void StoreVector(Float16* to, Vector values) {
#if defined(__AVX512F__)
  const HalfWords halves = (HalfWords)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__) && defined(__AVX__)
  const HalfWords halves = (HalfWords)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
#else
  const HalfWords halves = __builtin_convertvector(Float16BitsOf<Vector, Words>(values), HalfWords);
#endif
  std::memcpy(to, &halves, sizeof halves);
}

// y = x, rounded where T is narrower.
template <typename From, typename T>
inline void StoreRow(int64_t size, const From* __restrict x, T* __restrict y) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) StoreVector(y + i, LoadVector(x + i));
  for (; i < size; ++i) Store(&y[i], Load(x[i]));
}

inline Vector ToFloats(Ints value) { return __builtin_convertvector(value, Vector); }

// e^r for r in [-log(2) / 2, log(2) / 2], by Cephes' expf. T is float or Vector.
template <typename T>
inline T ExpOfRest(T r) {
  T y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  return y * r * r + r + 1.0f;
}

// e^x within 2 ulp, in a form that compilers vectorise: 2^n times a polynomial of the remainder. Outside [-87, 88] the
// result is that of the nearer end.
inline float Exp(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);  // a NaN stays one
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return ExpOfRest(r) * power;
}

// e^x for x <= 0 within 2 ulp; 0 below -87. A NaN stays NaN.
inline Vector ExpOfNegative(Vector x) {
  const Vector least = Vector{} - 87.0f;
  const Vector in = x < least ? least : x;
  const Ints n = __builtin_convertvector(in * 1.44269504f - 0.5f, Ints);  // to nearest, because the conversion rounds towards 0
  const Vector whole = ToFloats(n);
  const Vector r = (in - whole * 0.693359375f) + whole * 2.12194440e-4f;
  const Vector power = (Vector)((n + 127) << 23);
  return x < least ? Vector{} : ExpOfRest(r) * power;
}

// The hyperbolic tangent within 2 ulp, in a form that compilers vectorise: a polynomial near 0 (Cephes' tanhf), and e^2x
// elsewhere.
inline float Tanh(float x) {
  const float square = x * x;
  float near = -5.70498872745e-3f;
  near = near * square + 2.06390887954e-2f;
  near = near * square - 5.37397155531e-2f;
  near = near * square + 1.33314422036e-1f;
  near = near * square - 3.33332819422e-1f;
  near = near * square * x + x;
  const float size = std::fabs(x);
  const float far = std::copysign(1.0f - 2.0f / (Exp(2.0f * size) + 1.0f), x);  // a NaN stays one
  return size < 0.625f ? near : far;
}

// The error function within 4e-7, in a form that compilers vectorise: a quotient of polynomials, up to where no f32
// lies between it and 1.
inline float Erf(float x) {
  const float t = std::min(std::max(x, -4.0f), 4.0f);  // a NaN stays one
  const float s = t * t;
  float above = -2.72614225801306e-10f;
  for (float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f,
                  -2.95459980854025e-03f, -1.60960333262415e-02f})
    above = above * s + c;
  float below = -1.45660718464996e-05f;
  for (float c : {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f})
    below = below * s + c;
  return t * above / below;
}

}  // namespace penstock

#endif  // PENSTOCK_KERNELS_H_
