// Operations on one token's features: norms, rotary positions, and the buffers in between.

#ifndef PENSTOCK_ROWS_H_
#define PENSTOCK_ROWS_H_

#include <vector>

#include "kernels.h"

namespace penstock {

// Root-mean-square norm, or one that subtracts the mean too.
struct Norm {
  const float* factors;  // [size]; null: there is no norm
  float eps;
  bool is_layer;
};

// y may be x.
template <typename In, typename Out>
void NormRow(const Norm& norm, int64_t size, const In* x, Out* y) {
  float mean = 0.0f, square = 0.0f;
  if (norm.is_layer) {
    for (int64_t i = 0; i < size; ++i) mean += Load(x[i]);
    mean /= static_cast<float>(size);
  }
  for (int64_t i = 0; i < size; ++i) {
    const float value = Load(x[i]) - mean;
    square += value * value;
  }
  const float inverse = 1.0f / std::sqrt(square / static_cast<float>(size) + norm.eps);
  for (int64_t i = 0; i < size; ++i) Store(&y[i], (Load(x[i]) - mean) * inverse * norm.factors[i]);
}

// The cosines and sines of one token's position.
struct Rotation {
  const float* cos;
  const float* sin;
  int64_t pairs;  // leading pairs of features that rotate; the others stay as they are
  bool is_interleaved;
};

inline void RotateHead(const Rotation& rotation, float* __restrict head) {
  if (rotation.is_interleaved) {
    for (int64_t p = 0; p < rotation.pairs; ++p) {
      const float first = head[2 * p], second = head[2 * p + 1];
      head[2 * p] = first * rotation.cos[p] - second * rotation.sin[p];
      head[2 * p + 1] = second * rotation.cos[p] + first * rotation.sin[p];
    }
    return;
  }
  float* __restrict half = head + rotation.pairs;
  for (int64_t p = 0; p < rotation.pairs; ++p) {
    const float first = head[p], second = half[p];
    head[p] = first * rotation.cos[p] - second * rotation.sin[p];
    half[p] = second * rotation.cos[p] + first * rotation.sin[p];
  }
}

// x += scale * y, rounded once.
template <typename T>
inline void AddRow(int64_t size, float scale, const float* __restrict y, T* __restrict x) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) StoreVector(x + i, LoadVector(x + i) + scale * LoadVector(y + i));
  for (; i < size; ++i) Store(&x[i], Load(x[i]) + scale * y[i]);
}

// Loads the next features of a row that has `left` left, with zeros after its end.
template <typename T>
inline Vector LoadUpTo(const T* from, int64_t left) {
  if (left >= kLanes) return LoadVector(from);
  T padded[kLanes] = {};
  std::memcpy(padded, from, left * sizeof(T));
  return LoadVector(padded);
}
template <typename T>
inline void StoreUpTo(T* to, Vector values, int64_t left) {
  if (left >= kLanes) return StoreVector(to, values);
  T padded[kLanes];
  StoreVector(padded, values);
  std::memcpy(to, padded, left * sizeof(T));
}

inline Vector Sigmoid(Vector x) {
  const Vector power = ExpOfNegative(x < 0.0f ? x : -x);  // a NaN stays one
  return (x < 0.0f ? power : Vector{} + 1.0f) / (1.0f + power);
}

// Memory that is kept from step to step and grows.
class Buffer {
 public:
  template <typename T>
  T* Of(int64_t count) {
    const size_t needed = static_cast<size_t>(count) * sizeof(T) + kAlignment;
    if (bytes_.size() < needed) bytes_ = std::vector<char>(needed);
    const uintptr_t start = reinterpret_cast<uintptr_t>(bytes_.data());
    return reinterpret_cast<T*>((start + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  static constexpr uintptr_t kAlignment = 64;
  std::vector<char> bytes_;
};

}  // namespace penstock

#endif  // PENSTOCK_ROWS_H_
