// Matmuls of a panel by tiles (tiles.h).
//
// A panel's lines are rows of words, just as tiles take weights, so they are loaded from where they lie. A block of 32
// rows is multiplied by two columns of tiles at once, and one of 16 rows by four: either takes four tiles of sums.

#ifndef PENSTOCK_TILE_MATMUL_H_
#define PENSTOCK_TILE_MATMUL_H_

#include "ahead.h"
#include "tile_block.h"

namespace penstock {

struct Lines {
  const char* data;
  int64_t stride;  // bytes
};

// Rows whose features are `stride` elements apart.
template <typename T>
inline Lines LinesOf(const T* x, int64_t stride) {
  return {reinterpret_cast<const char*>(x), stride * static_cast<int64_t>(sizeof(T))};
}

// sums[kDown tiles][kAcross tiles] += x * weights, for `steps` tiles along the depth.
template <typename Kind, int kDown, int kAcross>
inline void MultiplyTiles(Tiles& tiles, Lines x, const char* weights, int64_t steps, char* sums, Ahead* ahead) {
  constexpr int64_t kPanelBytes = 4 * kPanel;
  constexpr int64_t kFetches = kTileWords * kAcross * kTileBytes / kPanelBytes;  // a word of depth each
  constexpr int64_t kStep = kTileWords * kPanelBytes;
  TileBlock<kDown, kAcross> block(tiles, sums, kPanelBytes);
  block.Load();
  for (int64_t step = 0; step < steps; ++step, weights += kStep, x.data += kTileBytes) {
    if (ahead != nullptr && ahead->bytes > 0)
      for (int64_t i = 0; i < kFetches; ++i) ahead->Fetch();
    block.template Add<Kind>(x.data, x.stride, weights, kPanelBytes);
  }
  block.Store();
}

// sums[rows][kPanel] += x[rows][words] * weights[words][kPanel], with sums of f32 or int32.
template <typename Kind>
__attribute__((noinline)) void MultiplyByTiles(Tiles& tiles, int64_t rows, Lines x, const void* weights, int64_t words,
                                               void* sums, Ahead* ahead) {
  constexpr int kAcross = static_cast<int>(kPanel / kTileWords), kTwo = std::min(kAcross, 2);
  static_assert(kPanel % kTileWords == 0, "panels are whole tiles wide");
  const auto part = [&](int64_t row, int64_t first, int64_t width, int64_t steps) {
    const int64_t upper = std::min(kTileRows, rows - row), lower = std::min(kTileRows, rows - row - upper);
    const Lines from{x.data + row * x.stride + first * 4, x.stride};
    const char* panel = static_cast<const char*>(weights) + first * kPanel * 4;
    char* to = static_cast<char*>(sums) + row * kPanel * 4;
    Ahead* next = row == 0 ? nullptr : ahead;  // the first rows may still be waiting for their own weights
    tiles.Shape(upper, lower, width);
    if (lower == 0) return MultiplyTiles<Kind, 1, kAcross>(tiles, from, panel, steps, to, next);
    for (int64_t column = 0; column < kAcross; column += kTwo)
      MultiplyTiles<Kind, 2, kTwo>(tiles, from, panel + column * kTileBytes, steps, to + column * kTileBytes, next);
  };
  const int64_t whole = words / kTileWords * kTileWords;
  for (int64_t row = 0; row < rows; row += 2 * kTileRows) {
    if (whole > 0) part(row, 0, kTileWords, whole / kTileWords);
    if (words > whole) part(row, whole, words - whole, 1);
  }
}

}  // namespace penstock

#endif  // PENSTOCK_TILE_MATMUL_H_
