// What sampling needs to know of every row of logits: the place of its first maximum, and whether it is sound.

#include "binding.h"
#include "kernels.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace {

constexpr int64_t kBlock = 16 * kLanes;  // the maximum of a block is found before its place

struct Top {
  float value;
  bool is_sound;  // no NaN, no plus infinity
};

Top TopOf(const float* x, int64_t count) {
  Vector tops[2] = {Vector{} - INFINITY, Vector{} - INFINITY};
  Words are_sound = ~Words{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes)
    for (int v = 0; v < 2; ++v) {
      const Vector values = LoadVector(x + i + v * kLanes);
      tops[v] = values > tops[v] ? values : tops[v];
      are_sound &= (Words)(values < INFINITY);
    }
  const Vector both = tops[0] > tops[1] ? tops[0] : tops[1];
  Top top{-INFINITY, true};
  for (int lane = 0; lane < kLanes; ++lane) {
    top.value = std::max(top.value, both[lane]);
    top.is_sound &= are_sound[lane] != 0;
  }
  for (; i < count; ++i) {
    top.value = x[i] > top.value ? x[i] : top.value;
    top.is_sound &= x[i] < INFINITY;
  }
  return top;
}

// Finds the first maximum of a row; its place is 0 if there is none.
void SurveyRow(const float* x, int64_t count, int32_t* place, bool* is_sound) {
  float top = -INFINITY;
  int64_t block = 0;
  bool all_sound = true;
  for (int64_t first = 0; first < count; first += kBlock) {
    const Top found = TopOf(x + first, std::min(kBlock, count - first));
    all_sound &= found.is_sound;
    if (found.value > top) top = found.value, block = first;
  }
  const int64_t end = std::min(block + kBlock, count);
  *place = 0;
  for (int64_t i = block; i < end; ++i)
    if (x[i] == top) {
      *place = static_cast<int32_t>(i);
      break;
    }
  *is_sound = all_sound;
}

ffi::Error Survey(PENSTOCK_PARAMETERS(Survey)) {
  const int64_t rows = logits.dimensions()[0], count = logits.dimensions()[1];
  ForEach(pool, rows, [&](int64_t row) {
    SurveyRow(logits.typed_data() + row * count, count, &places->typed_data()[row], &are_sound->typed_data()[row]);
  });
  return ffi::Error::Success();
}

}  // namespace

PENSTOCK_DEFINE_KERNEL(Survey);

}  // namespace penstock
