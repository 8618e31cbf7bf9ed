// The gated delta rule (Yang et al., arXiv 2412.06464), for one token and one value head. Its matrix [keys, values] is
// read once for key and query, and once to be updated, row by row, always in the same order.

#ifndef PENSTOCK_DELTA_RULE_H_
#define PENSTOCK_DELTA_RULE_H_

#include "rows.h"

namespace penstock {

// The inputs of one token and one value head.
struct DeltaToken {
  const float *q, *k;  // [keys]
  const float* v;      // [values]
  float beta, decay;
  float qk;  // the scalar product of q and k
};

constexpr int kDeltaVectors = kLanes == 16 ? 8 : 4;  // vectors of columns that are summed at once, for q and for k

// Computes columns [0, vectors * kLanes) of `to` from those of `from`, which may be the same memory.
template <int vectors>
inline void DeltaColumns(const DeltaToken& token, int64_t keys, int64_t stride, const float* from, const float* v,
                         float* to, float* result) {
  Vector of_q[vectors] = {}, of_k[vectors] = {};
  for (int64_t i = 0; i < keys; ++i) {
    for (int j = 0; j < vectors; ++j) {
      const Vector row = LoadVector(from + i * stride + j * kLanes);
      of_q[j] += token.q[i] * row;
      of_k[j] += token.k[i] * row;
    }
  }
  for (int j = 0; j < vectors; ++j) {
    of_k[j] = token.beta * (LoadVector(v + j * kLanes) - token.decay * of_k[j]);  // the change
    StoreVector(result + j * kLanes, token.decay * of_q[j] + token.qk * of_k[j]);
  }
  for (int64_t i = 0; i < keys; ++i) {
    for (int j = 0; j < vectors; ++j) {
      const int64_t at = i * stride + j * kLanes;
      StoreVector(to + at, token.decay * LoadVector(from + at) + token.k[i] * of_k[j]);
    }
  }
}

// Updates the last columns, fewer than kLanes.
inline void DeltaRest(const DeltaToken& token, int64_t keys, int64_t stride, int64_t columns, const float* from,
                      const float* v, float* to, float* result) {
  for (int64_t j = 0; j < columns; ++j) {
    float of_q = 0.0f, of_k = 0.0f;
    for (int64_t i = 0; i < keys; ++i) {
      of_q += token.q[i] * from[i * stride + j];
      of_k += token.k[i] * from[i * stride + j];
    }
    const float change = token.beta * (v[j] - token.decay * of_k);
    result[j] = token.decay * of_q + token.qk * change;
    for (int64_t i = 0; i < keys; ++i)
      to[i * stride + j] = token.decay * from[i * stride + j] + token.k[i] * change;
  }
}

// Computes what the query reads, `result` [values], and the matrix after the token. Never inlined, so that all tokens
// run the very same instructions.
__attribute__((noinline)) inline void DeltaRule(const DeltaToken& token, int64_t keys, int64_t values,
                                                const float* from, float* to, float* result) {
  constexpr int64_t kMost = kDeltaVectors * kLanes;
  int64_t j = 0;
  for (; j + kMost <= values; j += kMost)
    DeltaColumns<kDeltaVectors>(token, keys, values, from + j, token.v + j, to + j, result + j);
  for (; j + kLanes <= values; j += kLanes)
    DeltaColumns<1>(token, keys, values, from + j, token.v + j, to + j, result + j);
  DeltaRest(token, keys, values, values - j, from + j, token.v + j, to + j, result + j);
}

}  // namespace penstock

#endif  // PENSTOCK_DELTA_RULE_H_
