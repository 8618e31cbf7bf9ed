// The operations around the matmuls of a mixture of experts, called by XLA through its foreign function interface: the
// choice of a token's experts, sorting rows by expert, and the weighted sum of results.
//
// XLA computes the same, but it compiles each of its operations anew for every layer of every step, and there are many.

#include "kernels.h"

#include <vector>

#include "binding.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace {

constexpr int64_t kTokensPerTask = 16;

template <typename Work>
void ForEachToken(ffi::ThreadPool& pool, int64_t tokens, Work work) {
  ForEach(pool, (tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task) {
    const int64_t end = std::min(tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) work(token);
  });
}

// Finds the `count` largest of `values`, largest first; of equal ones the first. NaNs give an arbitrary choice.
void Largest(const std::vector<float>& values, int64_t count, int32_t* places) {
  std::vector<bool> is_taken(values.size());
  for (int64_t n = 0; n < count; ++n) {
    int64_t best = -1;
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i)
      if (!is_taken[i] && (best < 0 || values[i] > values[best])) best = i;
    is_taken[best] = true;
    places[n] = static_cast<int32_t>(best);
  }
}

struct Router {
  int64_t experts, chosen;
  bool is_sigmoid, is_normalized;
  float scale;
  int64_t groups, groups_chosen;
  const float* correction;  // [experts], or null
};

void KeepBestGroups(const Router& router, std::vector<float>& choice) {
  const int64_t size = router.experts / router.groups;
  std::vector<float> scores(router.groups);
  for (int64_t group = 0; group < router.groups; ++group) {
    const std::vector<float> own(choice.begin() + group * size, choice.begin() + (group + 1) * size);
    int32_t best[2];
    Largest(own, 2, best);
    scores[group] = own[best[0]] + own[best[1]];
  }
  std::vector<int32_t> kept(router.groups_chosen);
  Largest(scores, router.groups_chosen, kept.data());
  for (int64_t i = 0; i < router.experts; ++i)
    if (std::find(kept.begin(), kept.end(), i / size) == kept.end()) choice[i] = -INFINITY;
}

void Softmax(std::vector<float>& values) {
  const float most = *std::max_element(values.begin(), values.end());
  float total = 0.0f;
  for (float& value : values) total += value = Exp(value - most);
  for (float& value : values) value /= total;
}

void RouteToken(const Router& router, const float* logits, int32_t* chosen, float* weights) {
  const std::vector<float> plain(logits, logits + router.experts);
  std::vector<float> scores = plain;
  if (router.is_sigmoid)
    for (float& score : scores) score = 1.0f / (1.0f + Exp(-score));
  else
    Softmax(scores);
  // Logits have the order of their softmax, and fewer equal values.
  std::vector<float> choice = router.is_sigmoid || router.correction || router.groups > 1 ? scores : plain;
  if (router.correction)
    for (int64_t i = 0; i < router.experts; ++i) choice[i] += router.correction[i];
  if (router.groups > 1) KeepBestGroups(router, choice);
  Largest(choice, router.chosen, chosen);
  float total = 1.0f;
  if (router.is_normalized) {
    total = 1e-20f;  // if all have underflowed
    for (int64_t n = 0; n < router.chosen; ++n) total += scores[chosen[n]];
  }
  for (int64_t n = 0; n < router.chosen; ++n) weights[n] = scores[chosen[n]] / total * router.scale;
}

ffi::Error Route(PENSTOCK_PARAMETERS(Route)) {
  const int64_t tokens = logits.dimensions()[0];
  const Router router{logits.dimensions()[1], chosen->dimensions()[1], is_sigmoid, is_normalized, scale, groups,
                      groups_chosen, correction.element_count() ? correction.typed_data() : nullptr};
  ForEachToken(pool, tokens, [&](int64_t token) {
    RouteToken(router, logits.typed_data() + token * router.experts, chosen->typed_data() + token * router.chosen,
               weights->typed_data() + token * router.chosen);
  });
  return ffi::Error::Success();
}

ffi::Error GroupRows(PENSTOCK_PARAMETERS(GroupRows)) {
  const int64_t tokens = chosen.dimensions()[0], each = chosen.dimensions()[1];
  const int64_t experts = group_sizes->element_count();
  const int64_t row_bytes = x.size_bytes() / tokens;
  const int32_t* expert = chosen.typed_data();
  int32_t *place = places->typed_data(), *sizes = group_sizes->typed_data();
  std::fill(sizes, sizes + experts, 0);
  for (int64_t i = 0; i < tokens * each; ++i)
    if (expert[i] >= 0 && expert[i] < experts) ++sizes[expert[i]];
  std::vector<int32_t> next(experts);
  for (int64_t e = 1; e < experts; ++e) next[e] = next[e - 1] + sizes[e - 1];
  for (int64_t i = 0; i < tokens * each; ++i)
    place[i] = expert[i] >= 0 && expert[i] < experts ? next[expert[i]]++ : -1;
  const char* from = static_cast<const char*>(x.untyped_data());
  char* to = static_cast<char*>(rows->untyped_data());
  ForEachToken(pool, tokens, [&](int64_t token) {
    for (int64_t i = token * each; i < (token + 1) * each; ++i)
      if (place[i] >= 0) std::memcpy(to + place[i] * row_bytes, from + token * row_bytes, row_bytes);
  });
  return ffi::Error::Success();
}

ffi::Error SumRows(PENSTOCK_PARAMETERS(SumRows)) {
  const int64_t tokens = places.dimensions()[0], each = places.dimensions()[1], width = rows.dimensions()[1];
  ForEachToken(pool, tokens, [&](int64_t token) {
    float* __restrict sum = y->typed_data() + token * width;
    std::fill(sum, sum + width, 0.0f);
    for (int64_t i = token * each; i < (token + 1) * each; ++i) {
      if (places.typed_data()[i] < 0) continue;
      const float weight = weights.typed_data()[i];
      const float* __restrict row = rows.typed_data() + places.typed_data()[i] * width;
      for (int64_t column = 0; column < width; ++column) sum[column] += weight * row[column];
    }
  });
  return ffi::Error::Success();
}

}  // namespace

PENSTOCK_DEFINE_KERNEL(Route);
PENSTOCK_DEFINE_KERNEL(GroupRows);
PENSTOCK_DEFINE_KERNEL(SumRows);

}  // namespace penstock
