// Matmuls with quantized weights: the kernels themselves, which depend on neither XLA nor threads.
//
// A weight is `scale * code - offset`, with a scale and an offset for each column and each group of input features. The
// scales and offsets of a panel are [groups, kPanel]; its codes are in lanes (codes.h).
//
// Rows may be as the model computes them (f32, bf16, f16). Then a piece of a panel is unpacked into the first-level
// cache, where the codes are exact in either type, and multiplied like any other weights. Or rows are quantized to 8
// bits too (dots.h). Then products are summed as integers, so the order of summing does not matter. In either case a
// group's sum is scaled in f32, group after group: a row's result depends only on that row.

#ifndef PENSTOCK_QUANTIZED_H_
#define PENSTOCK_QUANTIZED_H_

#include <type_traits>

#include "codes.h"
#include "dots.h"
#include "matmul.h"

namespace penstock {

enum class Offset : int64_t { PENSTOCK_OFFSETS(PENSTOCK_ENUMERATOR) };  // zeros are multiplied by the scale

// ---- A group of features, or a piece of one

template <int R>
using Rows = std::integral_constant<int, R>;

// Calls `tile` with the number of its rows, up to kRows, as a compile-time constant.
template <typename Tile>
inline void OfRows(int64_t rows, Tile&& tile) {
  switch (rows) {
    case 1: return tile(Rows<1>{});
    case 2: return tile(Rows<2>{});
    case 3: return tile(Rows<3>{});
    case 4: return tile(Rows<4>{});
    case 5: return tile(Rows<5>{});
    default: return tile(Rows<kRows>{});
  }
}

// Calls `tile` for any number of rows, kRows at a time, from `first` on. `tile` is also told whether to prefetch what
// comes next.
template <typename Tile>
inline void OfBlocks(int64_t first, int64_t rows, const Ahead& ahead, Tile&& tile) {
  for (int64_t r = first; r < rows; r += kRows) {
    if (r + kRows <= rows && ahead.IsFetchedFrom(r)) tile(r, Rows<kRows>{}, std::true_type{});
    else OfRows(std::min<int64_t>(kRows, rows - r), [&](auto count) { tile(r, count, std::false_type{}); });
  }
}

// totals[R][kPanel] += scales[kPanel] * (x[R][depth] * piece[depth][kPanel])
template <int R, bool kFetches, typename T, typename W>
__attribute__((noinline)) void ScaledTile(const T* x, int64_t stride, const W* piece, int64_t depth,
                                          const Vector* scales, Ahead* ahead, Vector (*totals)[kVectors]) {
  Vector sums[R][kVectors] = {};
  Multiply<R, kFetches ? Fetch::kAhead : Fetch::kNothing>(x, stride, piece, depth, sums, ahead);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) totals[r][v] += sums[r][v] * scales[v];
}

// The same with weights that are unpacked a few features at a time. It is faster for few rows, and bit-identical where
// it is used, because single instructions do all the rounding, or tiles.h guards it. Compilers may reorder other sums.
#if defined(__AVX512BF16__) || PENSTOCK_TILES
template <typename T>
constexpr int64_t kFewRows = std::is_same_v<T, BFloat16> ? kFewestTileRows - 1 : 0;
#else
template <typename T>
constexpr int64_t kFewRows = 0;
#endif

template <int R, typename T, int kBits>
__attribute__((noinline)) void FewTile(const T* x, int64_t stride, const uint32_t* lanes, int64_t depth, float zero,
                                       const Vector* scales, Vector (*totals)[kVectors]) {
  constexpr int64_t kAcross = 2 * kLanes;  // including pairs
  constexpr int64_t kStep = kHasTiles ? kTileFeatures : kInLane<kBits>;  // in one lane each: in registers
  static_assert(std::is_same_v<T, BFloat16>, "other types have no few rows");
  const Unpacker<T, kBits> unpack(zero);
  Vector sums[R][kVectors] = {};
  for (int64_t k = 0; k < depth; k += kStep) {
    alignas(64) T step[kStep * kPanel];
    const int64_t count = std::min(kStep, depth - k);
    for (int64_t i = 0; i < count; i += kInLane<kBits>, lanes += kPanel)
      for (int v = 0; v < kVectors; ++v) unpack(LoadWords(lanes + v * kLanes), step + i * kPanel + v * kAcross);
    Multiply<R>(x + k, stride, step, count, sums);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) totals[r][v] += sums[r][v] * scales[v];
}

// The same by tiles, for any number of rows.
template <typename T, typename W>
__attribute__((noinline)) void ScaledTiles(TaskTiles& tiles, const T* x, int64_t stride, int64_t rows, const W* weights,
                                           int64_t words, const Vector* scales, Ahead* ahead,
                                           Vector (*totals)[kVectors]) {
  alignas(64) Vector sums[kRowsPerTask][kVectors];
  std::memset(sums, 0, rows * sizeof sums[0]);
  MultiplyByTiles<BFloat16Words>(tiles, rows, LinesOf(x, stride), weights, words, sums, ahead);
  for (int64_t r = 0; r < rows; ++r)
    for (int v = 0; v < kVectors; ++v) totals[r][v] += sums[r][v] * scales[v];
}

// The same for integers. What was added to x makes the sums larger by `added`; if `adds`, that is still to be summed.
template <int R, bool adds, bool kFetches>
__attribute__((noinline)) void DotTile(const uint8_t* x, int64_t stride, const uint32_t* lanes, int64_t depth,
                                       const Vector* scales, Ahead* ahead, Ints* added, Vector (*totals)[kVectors]) {
  Ints sums[R][kVectors] = {}, larger[kVectors] = {};
  for (int64_t k = 0; k < depth; k += 4, lanes += kPanel) {
    if constexpr (kFetches) ahead->Fetch();
    else FetchStream(lanes);
    Words w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = LoadWords(lanes + v * kLanes);
    if (adds)
      for (int v = 0; v < kVectors; ++v) larger[v] = Dot(larger[v], kUnsigned - Words{}, w[v]);
    for (int r = 0; r < R; ++r) {
      uint32_t lane;
      std::memcpy(&lane, x + r * stride + k, sizeof lane);
      lane ^= kUnsigned ^ kStored<8>;
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Dot(sums[r][v], lane - Words{}, w[v]);
    }
  }
  if (adds) std::memcpy(added, larger, sizeof larger);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      totals[r][v] += __builtin_convertvector(sums[r][v] - added[v], Vector) * scales[v];
}

// The same for 4-bit codes, of which `zeros` are subtracted: one for all, times the sum of each row. They are the
// unsigned operand of instructions that take one, so nothing is added to x.
template <int R, bool kFetches>
__attribute__((noinline)) void SmallDotTile(const uint8_t* x, int64_t stride, const uint32_t* lanes, int64_t depth,
                                            const int32_t* zeros, const Vector* scales, Ahead* ahead,
                                            Vector (*totals)[kVectors]) {
  Ints sums[R][kVectors] = {};
  for (int64_t k = 0; k < depth; k += kInLane<4>, lanes += kPanel) {
    if constexpr (kFetches) ahead->Fetch();
    else FetchStream(lanes);
    for (int number = 0; number < kByteLanes<4>; ++number) {
      Words w[kVectors];
      for (int v = 0; v < kVectors; ++v) w[v] = BytesOf<4>(LoadWords(lanes + v * kLanes), number);
      for (int r = 0; r < R; ++r) {
        uint32_t lane;
        std::memcpy(&lane, x + r * stride + k + 4 * number, sizeof lane);
        for (int v = 0; v < kVectors; ++v) sums[r][v] = DotOfSmall(sums[r][v], w[v], lane - Words{});
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      totals[r][v] += __builtin_convertvector(sums[r][v] - zeros[r], Vector) * scales[v];
}

// The same as the last two, by tiles, for any number of rows.
template <int kBits, typename T>
__attribute__((noinline)) void DotTiles(TaskTiles& tiles, const T* x, int64_t stride, int64_t rows,
                                        const uint32_t* lanes, int64_t depth, const int32_t* zeros,
                                        const Vector* scales, Ahead* ahead, Vector (*totals)[kVectors]) {
  static_assert(sizeof(T) == 1, "rows are bytes");
  alignas(64) Ints sums[kRowsPerTask][kVectors];
  std::memset(sums, 0, rows * sizeof sums[0]);
  if constexpr (kBits == 8) {
    MultiplyByTiles<Int8Words>(tiles, rows, LinesOf(x, stride), lanes, depth / 4, sums, ahead);
  } else {
    constexpr int64_t kPiece = kUnpackedBytes / kPanel;
    alignas(64) uint32_t piece[kPiece / 4 * kPanel];
    for (int64_t k = 0; k < depth; k += kPiece) {
      const int64_t here = std::min(kPiece, depth - k);
      UnpackBytes<kBits>(lanes + k / kInLane<kBits> * kPanel, here, piece);
      MultiplyByTiles<Int8Words>(tiles, rows, LinesOf(x + k, stride), piece, here / 4, sums, ahead);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int v = 0; v < kVectors; ++v)
      totals[r][v] += __builtin_convertvector(sums[r][v] - zeros[r], Vector) * scales[v];
}

// Rows as the model computes them.
template <typename T>
struct PlainRows {
  using Weight = std::conditional_t<std::is_same_v<T, Float16>, float, T>;  // the unpacked type
  const T* x;
  int64_t depth;

  float Scale(int64_t) const { return 1.0f; }

  float Sum(int64_t row, int64_t first, int64_t count) const {
    const T* from = x + row * depth + first;
    Vector parts = {};  // the same parts wherever in memory the row is
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) parts += LoadVector(from + k);
    float sum = 0.0f;
    for (; k < count; ++k) sum += Load(from[k]);
    for (int lane = 0; lane < kLanes; ++lane) sum += parts[lane];
    return sum;
  }

  // totals += scales * (rows' `count` features from `first` on, times those of a panel)
  template <int kBits>
  void Multiply(TaskTiles& tiles, int64_t row, int64_t num_rows, int64_t first, int64_t count, const uint32_t* lanes,
                float zero, const Vector* scales, Ahead& ahead, Vector (*totals)[kVectors]) const {
    constexpr int64_t kPiece = kUnpackedBytes / kPanel / static_cast<int64_t>(sizeof(Weight));
    alignas(64) Weight piece[kPiece * kPanel];
    for (int64_t k = 0; k < count; k += kPiece) {
      const int64_t depth_here = std::min(kPiece, count - k);
      const uint32_t* here = lanes + k / kInLane<kBits> * kPanel;
      if (num_rows <= kFewRows<T>) {
        OfRows(num_rows, [&](auto tile) {
          if constexpr (tile() <= kFewRows<T>)
            FewTile<tile(), T, kBits>(x + row * depth + first + k, depth, here, depth_here, zero, scales, totals);
        });
        continue;
      }
      UnpackPiece<Weight, kBits>(here, depth_here, zero, piece);
      if constexpr (kHasTiles && std::is_same_v<T, BFloat16>) {  // fewer rows have been multiplied above
        ScaledTiles(tiles, x + row * depth + first + k, depth, num_rows, piece, depth_here / 2, scales, &ahead, totals);
        continue;
      }
      OfBlocks(0, num_rows, ahead, [&](int64_t r, auto tile, auto fetches) {
        ScaledTile<tile(), fetches()>(x + (row + r) * depth + first + k, depth, piece, depth_here, scales, &ahead,
                                      totals + r);
      });
    }
  }
};

// Quantized rows, for weights of kBits.
template <int kBits>
struct ByteRows {
  uint8_t* x;
  float* scales;  // of each row
  int32_t* sums;  // of each row's groups; null if NeedsSums is false
  int64_t depth, group;

  static constexpr bool NeedsSums(Offset offset) { return kBits == 4 || offset != Offset::kNone; }

  template <typename T>
  void Quantize(const T* from, int64_t row) const {
    scales[row] = QuantizeRow<kBits>(from + row * depth, depth, x + row * depth);
    if (sums == nullptr) return;
    for (int64_t first = 0; first < depth; first += group) {
      int32_t sum = 0;
      for (int64_t k = first; k < first + group; ++k)
        sum += kStored<kBits> ? x[row * depth + k] - 128 : static_cast<int8_t>(x[row * depth + k]);
      sums[(row * depth + first) / group] = sum;
    }
  }

  float Scale(int64_t row) const { return scales[row]; }

  float Sum(int64_t row, int64_t first, int64_t) const {
    return static_cast<float>(sums[(row * depth + first) / group]);
  }

  // A group is summed at once, so that rounding does not depend on the length of pieces.
  template <int kBitsOfWeights>
  void Multiply(TaskTiles& tiles, int64_t row, int64_t num_rows, int64_t first, int64_t count, const uint32_t* lanes,
                float zero, const Vector* weight_scales, Ahead& ahead, Vector (*totals)[kVectors]) const {
    static_assert(kBitsOfWeights == kBits, "the rows are in the order of other weights");
    const uint8_t* from = x + row * depth + first;
    int32_t zeros[kRowsPerTask] = {};
    if constexpr (kBits == 4)
      if (zero != 0.0f)
        for (int64_t r = 0; r < num_rows; ++r)
          zeros[r] = static_cast<int32_t>(zero) * sums[((row + r) * depth + first) / group];
    if constexpr (kHasTiles)
      if (num_rows >= kFewestTileRows)
        return DotTiles<kBits>(tiles, from, depth, num_rows, lanes, count, zeros, weight_scales, &ahead, totals);
    if constexpr (kBits == 4)
      OfBlocks(0, num_rows, ahead, [&](int64_t r, auto tile, auto fetches) {
        SmallDotTile<tile(), fetches()>(from + r * depth, depth, lanes, count, zeros + r, weight_scales, &ahead,
                                        totals + r);
      });
    else
      MultiplyByVectors(from, num_rows, lanes, count, weight_scales, ahead, totals);
  }

 private:
  void MultiplyByVectors(const uint8_t* from, int64_t num_rows, const uint32_t* lanes, int64_t count,
                         const Vector* weight_scales, Ahead& ahead, Vector (*totals)[kVectors]) const {
    Ints added[kVectors] = {};
    int64_t r = 0;
    if (kUnsigned) {
      r = std::min<int64_t>(num_rows, kRows - 2);  // the registers that are left beside what is added
      OfRows(r, [&](auto tile) {
        DotTile<tile(), true, false>(from, depth, lanes, count, weight_scales, &ahead, added, totals);
      });
    }
    OfBlocks(r, num_rows, ahead, [&](int64_t r, auto tile, auto fetches) {
      DotTile<tile(), false, fetches()>(from + r * depth, depth, lanes, count, weight_scales, &ahead, added, totals + r);
    });
  }
};

// ---- A task: a panel and some rows

enum class ScaleType { kFloat, kBFloat16, kFloat16 };

struct QuantizedWeights {
  int64_t depth, group;          // features, and the number of them that share a scale
  const uint32_t* codes;         // [panels, depth / features in a lane, kPanel]
  const void *scales, *offsets;  // [panels, groups, kPanel]
  ScaleType scale_type;          // of both
  Offset offset;

  int64_t Groups() const { return depth / group; }

  void LoadScales(const void* from, int64_t panel, int64_t number, Vector* to) const {
    const int64_t at = (panel * Groups() + number) * kPanel;
    for (int v = 0; v < kVectors; ++v) switch (scale_type) {
        case ScaleType::kFloat: to[v] = LoadVector(static_cast<const float*>(from) + at + v * kLanes); break;
        case ScaleType::kBFloat16: to[v] = LoadVector(static_cast<const BFloat16*>(from) + at + v * kLanes); break;
        case ScaleType::kFloat16: to[v] = LoadVector(static_cast<const Float16*>(from) + at + v * kLanes); break;
      }
  }
};

// totals[num_rows][kPanel] = rows * weights of a panel
template <int kBits, typename Rows>
void MultiplyQuantized(const QuantizedWeights& weights, const Rows& rows, int64_t first_row, int64_t num_rows,
                       int64_t panel, int64_t next_panel, Vector (*totals)[kVectors]) {
  constexpr int64_t kEach = kInLane<kBits>;
  const int64_t panel_size = weights.depth / kEach * kPanel;
  const uint32_t* lanes = weights.codes + panel * panel_size;
  Ahead ahead;
  if (next_panel >= 0) ahead = {reinterpret_cast<const char*>(weights.codes + next_panel * panel_size), panel_size * 4};
  ahead.has_four_blocks = !kHasTiles && HasFourBlocks(num_rows);
  const float zero = kBits == 4 && weights.offset == Offset::kNone ? 8.0f : 0.0f;
  TaskTiles tiles;
  std::memset(totals, 0, num_rows * sizeof totals[0]);
  for (int64_t number = 0; number < weights.Groups(); ++number) {
    const int64_t first = number * weights.group;
    Vector scales[kVectors], offsets[kVectors];
    weights.LoadScales(weights.scales, panel, number, scales);
    rows.template Multiply<kBits>(tiles, first_row, num_rows, first, weights.group, lanes + first / kEach * kPanel,
                                  zero, scales, ahead, totals);
    if (weights.offset == Offset::kNone) continue;
    weights.LoadScales(weights.offsets, panel, number, offsets);
    if (weights.offset == Offset::kZeros)
      for (int v = 0; v < kVectors; ++v) offsets[v] *= scales[v];
    for (int64_t r = 0; r < num_rows; ++r) {
      const float sum = rows.Sum(first_row + r, first, weights.group);
      for (int v = 0; v < kVectors; ++v) totals[r][v] -= sum * offsets[v];
    }
  }
  for (int64_t r = 0; r < num_rows; ++r)
    for (int v = 0; v < kVectors; ++v) totals[r][v] *= rows.Scale(first_row + r);
}

// Runs a task like RunTask of matmul.h.
template <int kBits, typename Rows, typename Put>
void RunQuantizedTask(const Matmul& matmul, const QuantizedWeights& weights, const Rows& rows, int64_t first_row,
                      int64_t num_rows, int64_t panel, int64_t next_panel, Put&& put) {
  alignas(64) Vector totals[kRowsPerTask][kVectors];
  alignas(64) float full[kPanel];
  const TaskRounding rounding;
  MultiplyQuantized<kBits>(weights, rows, first_row, num_rows, panel, next_panel, totals);
  const int64_t column = panel * (matmul.gate == Gate::kNone ? kPanel : kPanel / 2);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t width = Finish(totals[r], matmul.bias ? matmul.bias + panel * kPanel : nullptr, matmul.gate, full);
    put(first_row + r, column, full, std::min(width, matmul.columns - column));
  }
}

}  // namespace penstock

#endif  // PENSTOCK_QUANTIZED_H_
