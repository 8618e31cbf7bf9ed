// Prefetching of weights, while others are multiplied.

#ifndef PENSTOCK_AHEAD_H_
#define PENSTOCK_AHEAD_H_

#include "kernels.h"

namespace penstock {

constexpr int64_t kPanel = kLanes * kVectors;  // columns of weights that lie side by side

// Prefetches the next weights from memory to the second-level cache while others are multiplied. Each step through the
// depth fetches half as many as it reads, so that two blocks of rows fetch a piece of a panel. Otherwise the first rows
// of each piece wait for it.
struct Ahead {
  static constexpr int64_t kLine = 64;
  static constexpr int64_t kLines = std::max<int64_t>(1, kPanel * 2 / kLine);  // a step reads 4 bytes per column
  const char* from = nullptr;
  int64_t bytes = 0;

  void Fetch() {
    for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(from + i * kLine, 0, 2);
    from += kLines * kLine, bytes -= kLines * kLine;
  }
};

}  // namespace penstock

#endif  // PENSTOCK_AHEAD_H_
