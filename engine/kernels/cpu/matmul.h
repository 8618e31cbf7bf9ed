// Matmuls with packed weights: the kernel itself, which depends on neither XLA nor threads.
//
// The scheme is Goto and van de Geijn's ("Anatomy of high-performance matrix multiplication", TOMS 34(3), 2008): one
// panel of weights at a time, in pieces that stay in the second-level cache, with kRows rows of x held in registers.
// Pieces for the first-level cache were 5 % slower, because sums are loaded and stored once for each.
//
// Packed weights are [panels, depth, kPanel] in f32 and f16, and [panels, depth / 2, kPanel, 2] in bf16: two values of
// a column side by side, as bf16 instructions take them. A row is summed in the same order whatever other rows there
// are, so that no sequence's tokens depend on its neighbours.

#ifndef PENSTOCK_MATMUL_H_
#define PENSTOCK_MATMUL_H_

#include "ahead.h"
#include "bfloat16.h"
#include "kernels.h"
#include "layout.h"
#include "tile_matmul.h"
#include "tiles.h"

namespace penstock {

constexpr int64_t kRowsPerTask = 96;   // their sums, 24 KiB, stay in the cache while panels pass
constexpr int64_t kPieceBytes = 131072;  // for a piece of a panel: half of the second-level cache or less

// sums[R][kPanel] += x[R][depth] * weights[depth][kPanel]
template <int R, Fetch kFetch = Fetch::kNothing>
inline void Multiply(const float* x, int64_t stride, const float* weights, int64_t depth, Vector (*sums)[kVectors],
                     Ahead* ahead = nullptr) {
  Vector held[R][kVectors];
  std::memcpy(held, sums, sizeof held);
  for (int64_t k = 0; k < depth; ++k, weights += kPanel) {
    if constexpr (kFetch == Fetch::kAhead) ahead->Fetch();
    if constexpr (kFetch == Fetch::kStream) FetchStream(weights);
    Vector w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = LoadVector(weights + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const float value = x[r * stride + k];
      for (int v = 0; v < kVectors; ++v) held[r][v] += value * w[v];
    }
  }
  std::memcpy(sums, held, sizeof held);
}

constexpr int64_t kWidened = 128;  // features of a row: kRows of them take 3 KiB

// Multiplies f16 rows, which are widened some features at a time and then treated like f32; weights may have either
// type.
template <int R, Fetch kFetch = Fetch::kNothing, typename W>
inline void Multiply(const Float16* x, int64_t stride, const W* weights, int64_t depth, Vector (*sums)[kVectors],
                     Ahead* ahead = nullptr) {
  constexpr int64_t kSteps = 4 / sizeof(W);  // steps that read as many bytes as one in f32
  alignas(64) float wide[R][kWidened];
  Vector held[R][kVectors];
  std::memcpy(held, sums, sizeof held);
  for (int64_t done = 0; done < depth; done += kWidened) {
    const int64_t count = std::min(kWidened, depth - done);
    for (int r = 0; r < R; ++r) StoreRow(count, x + r * stride + done, wide[r]);
    for (int64_t k = 0; k < count; ++k, weights += kPanel) {
      if (k % kSteps == 0) {
        if constexpr (kFetch == Fetch::kAhead) ahead->Fetch();
        if constexpr (kFetch == Fetch::kStream) FetchStream(weights);
      }
      Vector w[kVectors];
      for (int v = 0; v < kVectors; ++v) w[v] = LoadVector(weights + v * kLanes);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v) held[r][v] += wide[r][k] * w[v];
    }
  }
  std::memcpy(sums, held, sizeof held);
}

template <Fetch kFetch, typename T>
void MultiplyRows(int64_t rows, const T* x, int64_t stride, const T* weights, int64_t depth, Vector (*sums)[kVectors],
                  Ahead* ahead) {
  switch (rows) {
    case 1: return Multiply<1, kFetch>(x, stride, weights, depth, sums, ahead);
    case 2: return Multiply<2, kFetch>(x, stride, weights, depth, sums, ahead);
    case 3: return Multiply<3, kFetch>(x, stride, weights, depth, sums, ahead);
    case 4: return Multiply<4, kFetch>(x, stride, weights, depth, sums, ahead);
    case 5: return Multiply<5, kFetch>(x, stride, weights, depth, sums, ahead);
    default: return Multiply<kRows, kFetch>(x, stride, weights, depth, sums, ahead);
  }
}

// sums = x[num_rows][depth] * panel[depth][kPanel], for up to kRowsPerTask rows. `next`, if there is one, is the panel
// that this thread will multiply by next.
template <typename T>
void MultiplyPanel(const T* x, int64_t num_rows, const T* panel, int64_t depth, const T* next,
                   Vector (*sums)[kVectors]) {
  constexpr int64_t kPiece = kPieceBytes / kPanel / static_cast<int64_t>(sizeof(T));
  const auto bytes = [&](int64_t k) { return std::min(kPiece, depth - k) * kPanel * static_cast<int64_t>(sizeof(T)); };
  TaskTiles tiles;
  std::memset(sums, 0, num_rows * sizeof sums[0]);
  for (int64_t k = 0; k < depth; k += kPiece) {
    Ahead ahead;
    if (k + kPiece < depth) ahead = {reinterpret_cast<const char*>(panel + (k + kPiece) * kPanel), bytes(k + kPiece)};
    else if (next != nullptr) ahead = {reinterpret_cast<const char*>(next), bytes(0)};
    if constexpr (kHasTiles && std::is_same_v<T, BFloat16>)
      if (num_rows >= kFewestTileRows) {
        MultiplyByTiles<BFloat16Words>(tiles, num_rows, LinesOf(x + k, depth), panel + k * kPanel,
                                       std::min(kPiece, depth - k) / 2, sums, &ahead);
        continue;
      }
    ahead.has_four_blocks = HasFourBlocks(num_rows);
    for (int64_t r = 0; r < num_rows; r += kRows) {
      const int64_t count = std::min(kPiece, depth - k), rows = std::min<int64_t>(kRows, num_rows - r);
      const auto multiply = ahead.IsFetchedFrom(r) ? MultiplyRows<Fetch::kAhead, T> : MultiplyRows<Fetch::kStream, T>;
      multiply(rows, x + r * depth + k, depth, panel + k * kPanel, count, sums + r, &ahead);
    }
  }
}

// The function by which a gated panel's first half acts on its second: columns come in pairs, a gate and an up, half a
// panel apart.
enum class Gate : int64_t { PENSTOCK_GATES(PENSTOCK_ENUMERATOR) };

inline float Activated(Gate gate, float x) {
  switch (gate) {
    case Gate::kGeluTanh: return 0.5f * x * (1.0f + Tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Gate::kGelu: return 0.5f * x * (1.0f + Erf(0.7071067812f * x));
    case Gate::kRelu: return std::max(x, 0.0f);
    default: return x;
  }
}

inline Vector Silu(Vector x) {
  const Vector power = ExpOfNegative(x < 0.0f ? x : -x);  // a NaN stays one
  return x * (x < 0.0f ? power : Vector{} + 1.0f) / (1.0f + power);
}

template <Gate gate>
inline void ActivateHalf(float* __restrict full) {
  if constexpr (gate == Gate::kSilu) {
    for (int64_t i = 0; i < kPanel / 2; i += kLanes)
      StoreVector(full + i, Silu(LoadVector(full + i)) * LoadVector(full + kPanel / 2 + i));
    return;
  }
  for (int64_t i = 0; i < kPanel / 2; ++i) full[i] = Activated(gate, full[i]) * full[kPanel / 2 + i];
}

// Completes a row's sums of one panel, with bias and gate. Returns how many columns of y they are.
inline int64_t Finish(const Vector* sums, const float* __restrict bias, Gate gate, float* __restrict full) {
  std::memcpy(full, sums, kPanel * sizeof(float));
  if (bias != nullptr)
    for (int64_t i = 0; i < kPanel; ++i) full[i] += bias[i];
  switch (gate) {
    case Gate::kNone: return kPanel;
    case Gate::kSilu: ActivateHalf<Gate::kSilu>(full); break;
    case Gate::kGeluTanh: ActivateHalf<Gate::kGeluTanh>(full); break;
    case Gate::kGelu: ActivateHalf<Gate::kGelu>(full); break;
    case Gate::kRelu: ActivateHalf<Gate::kRelu>(full); break;
  }
  return kPanel / 2;
}

struct Matmul {
  int64_t depth, panels, columns;  // columns of y
  Gate gate;
  const float* bias;  // [panels, kPanel], or null
};

// Multiplies rows [first_row, first_row + num_rows) of x by one panel; `put(row, column, values, width)` receives the
// results. `next_panel` is that of this thread's next task, or -1.
template <typename T, typename Put>
void RunTask(const Matmul& matmul, int64_t first_row, int64_t num_rows, int64_t panel, int64_t next_panel, const T* x,
             const T* weights, Put&& put) {
  alignas(64) Vector sums[kRowsPerTask][kVectors];
  alignas(64) float full[kPanel];
  const TaskRounding rounding;
  const int64_t panel_size = matmul.depth * kPanel;
  MultiplyPanel(x + first_row * matmul.depth, num_rows, weights + panel * panel_size, matmul.depth,
                next_panel < 0 ? nullptr : weights + next_panel * panel_size, sums);
  const int64_t column = panel * (matmul.gate == Gate::kNone ? kPanel : kPanel / 2);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t width = Finish(sums[r], matmul.bias ? matmul.bias + panel * kPanel : nullptr, matmul.gate, full);
    put(first_row + r, column, full, std::min(width, matmul.columns - column));
  }
}

// The division of a matmul's rows and panels into tasks: few per thread, so that threads end together, but with enough
// rows each that loading a panel pays off.
struct Grid {
  int64_t rows, panels, threads, rows_each;

  Grid(int64_t rows, int64_t panels, int64_t threads)
      : rows(rows), panels(panels), threads(threads), rows_each(kRowsPerTask) {
    constexpr int64_t kFewestRows = 4 * kRows, kTasksEach = 8;
    while (rows_each > kFewestRows && panels * Blocks() < kTasksEach * threads) rows_each /= 2;
  }
  int64_t Blocks() const { return (rows + rows_each - 1) / rows_each; }
  int64_t size() const { return panels * Blocks(); }
  int64_t Panel(int64_t task) const { return task / Blocks(); }  // neighbours share one
  // Returns the panel of the task that this thread most likely takes next, if it is another panel; otherwise -1.
  int64_t NextPanel(int64_t task) const {
    const int64_t next = task + threads;
    return next < size() && Panel(next) != Panel(task) ? Panel(next) : -1;
  }
  int64_t FirstRow(int64_t task) const { return task % Blocks() * rows_each; }
  int64_t NumRows(int64_t task) const { return std::min(rows_each, rows - FirstRow(task)); }
};

}  // namespace penstock

#endif  // PENSTOCK_MATMUL_H_
