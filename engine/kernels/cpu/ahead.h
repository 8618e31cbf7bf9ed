// Prefetching of weights, while others are multiplied.

#ifndef PENSTOCK_AHEAD_H_
#define PENSTOCK_AHEAD_H_

#include "kernels.h"

namespace penstock {

constexpr int64_t kPanel = kLanes * kVectors;  // columns of weights that lie side by side

// Prefetches the next weights from memory to the second-level cache while some rows are multiplied, block by block;
// otherwise the first rows wait for them. Each step through the depth fetches half as many as it reads, so that two blocks
// of rows fetch a piece of a panel; or a quarter, where there are four blocks, which gives memory more time.
struct Ahead {
  static constexpr int64_t kLine = 64;
  static constexpr int64_t kLines = std::max<int64_t>(1, kPanel * 2 / kLine);  // half: a step reads 4 bytes per column
  const char* from = nullptr;
  int64_t bytes = 0;
  bool has_four_blocks = false;

  // Whether the block of rows from `row` on fetches. The first of few blocks does not, because it may still be waiting for
  // its own weights. The first of four does, because its weights are there: on Zen 5, 24 to 64 rows of bf16 then take
  // 0.83 to 0.95 of their time.
  bool IsFetchedFrom(int64_t row) const { return bytes > 0 && (row > 0 || has_four_blocks); }

  void Fetch() {
    __builtin_prefetch(from, 0, 2);
    const int64_t lines = has_four_blocks ? 1 : kLines;
    for (int64_t i = 1; i < lines; ++i) __builtin_prefetch(from + i * kLine, 0, 2);
    from += lines * kLine, bytes -= lines * kLine;
  }
};

constexpr bool HasFourBlocks(int64_t rows) { return rows > 3 * kRows; }

// What a step through the depth prefetches: nothing, as its weights are in a cache; or the weights that come soon, of this
// panel (bf16 on Arm and in the order of tiles leaves that to the processor); or other weights, by Ahead.
enum class Fetch { kNothing, kStream, kAhead };

constexpr int64_t kStreamBytes = 6144;

// Prefetches the weights that lie kStreamBytes after those of this step to the first-level cache. Processors prefetch too,
// but with 4 to 16 rows more multiplying leaves them behind: on Zen 5 bf16 takes 0.72 to 0.88 of its time. After the end of
// a panel these are weights of the next one.
inline void FetchStream(const void* weights) {
  const char* from = static_cast<const char*>(weights) + kStreamBytes;
  for (int64_t i = 0; i < 2 * Ahead::kLines; ++i) __builtin_prefetch(from + i * Ahead::kLine);
}

}  // namespace penstock

#endif  // PENSTOCK_AHEAD_H_
