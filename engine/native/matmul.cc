// Matmuls with packed weights for CPUs, called by XLA through its foreign function interface.
//
// XLA's own matmul transposes the weights at every call. Here they are packed once, when a model is loaded. The scheme is Goto and van de Geijn's ("Anatomy of high-performance matrix multiplication", TOMS 34(3),
// 2008): a panel of weights at a time, in pieces that stay in the first-level cache, kRows rows of x held in registers.
//
// Packed weights are [panels, depth, kPanel] in f32, and [panels, depth / 2, kPanel, 2] in bf16: two values of a column
// side by side, as instructions for bf16 take them. A row is summed in the same order whatever other rows there are, so
// that no sequence's tokens depend on its neighbours.

#include "kernels.h"

#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace ffi = xla::ffi;

namespace penstock {
namespace {

constexpr int64_t kPanel = kLanes * kVectors;
constexpr int64_t kRowsPerTask = 96;   // their sums, 24 KiB, stay in the cache while panels pass
constexpr int64_t kDepthBytes = 32768 / kPanel;  // of a piece of a panel, per column: 32 KiB in all

// sums[R][kPanel] += x[R][depth] * weights[depth][kPanel]
template <int R>
inline void Multiply(const float* x, int64_t stride, const float* weights, int64_t depth, Vector (*sums)[kVectors]) {
  Vector held[R][kVectors];
  std::memcpy(held, sums, sizeof held);
  for (int64_t k = 0; k < depth; ++k, weights += kPanel) {
    Vector w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = LoadVector(weights + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const float value = x[r * stride + k];
      for (int v = 0; v < kVectors; ++v) held[r][v] += value * w[v];
    }
  }
  std::memcpy(sums, held, sizeof held);
}

template <int R>
inline void Multiply(const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth,
                     Vector (*sums)[kVectors]) {
  Vector held[R][kVectors];
  std::memcpy(held, sums, sizeof held);
  for (int64_t k = 0; k < depth; k += 2, weights += 2 * kPanel) {
    Words w[kVectors];
    for (int v = 0; v < kVectors; ++v) std::memcpy(&w[v], weights + 2 * v * kLanes, sizeof w[v]);
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, x + r * stride + k, sizeof pair);
#if defined(__AVX512BF16__)
      const __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
      for (int v = 0; v < kVectors; ++v)
        held[r][v] = (Vector)_mm512_dpbf16_ps((__m512)held[r][v], both, (__m512bh)w[v]);
#else
      const float first = Load(BFloat16{static_cast<uint16_t>(pair)});
      const float second = Load(BFloat16{static_cast<uint16_t>(pair >> 16)});
      for (int v = 0; v < kVectors; ++v) {
        held[r][v] += first * (Vector)(w[v] << 16);
        held[r][v] += second * (Vector)(w[v] & 0xffff0000u);
      }
#endif
    }
  }
  std::memcpy(sums, held, sizeof held);
}

template <typename T>
void MultiplyRows(int64_t rows, const T* x, int64_t stride, const T* weights, int64_t depth, Vector (*sums)[kVectors]) {
  switch (rows) {
    case 1: return Multiply<1>(x, stride, weights, depth, sums);
    case 2: return Multiply<2>(x, stride, weights, depth, sums);
    case 3: return Multiply<3>(x, stride, weights, depth, sums);
    case 4: return Multiply<4>(x, stride, weights, depth, sums);
    case 5: return Multiply<5>(x, stride, weights, depth, sums);
    default: return Multiply<kRows>(x, stride, weights, depth, sums);
  }
}

inline float Silu(float x) { return x / (1.0f + Exp(-x)); }

// One panel's sums become `width` columns of y. Gated, the panel's halves are gate and up, and y gets silu(gate) * up.
template <typename U>
void Finish(const float* __restrict sums, const float* __restrict bias, bool is_gated, int64_t width,
            U* __restrict y) {
  float full[kPanel];
  for (int64_t i = 0; i < kPanel; ++i) full[i] = bias ? sums[i] + bias[i] : sums[i];
  if (is_gated)
    for (int64_t i = 0; i < kPanel / 2; ++i) full[i] = Silu(full[i]) * full[kPanel / 2 + i];
  if (width == kPanel) {
    for (int64_t i = 0; i < kPanel; ++i) Store(&y[i], full[i]);
  } else {
    for (int64_t i = 0; i < width; ++i) Store(&y[i], full[i]);
  }
}

struct Matmul {
  int64_t rows, depth, panels, columns;  // columns of y
  bool is_gated;
  const float* bias;  // [panels, kPanel], or null; grouped, that of the first group
};

template <typename T, typename U>
void RunTask(const Matmul& matmul, int64_t first_row, int64_t num_rows, int64_t panel, const T* x, const T* weights,
             U* y) {
  const int64_t piece = kDepthBytes / static_cast<int64_t>(sizeof(T));
  const T* panel_weights = weights + panel * matmul.depth * kPanel;
  alignas(64) Vector sums[kRowsPerTask][kVectors];
  std::memset(sums, 0, num_rows * sizeof sums[0]);
  for (int64_t k = 0; k < matmul.depth; k += piece)
    for (int64_t r = 0; r < num_rows; r += kRows)
      MultiplyRows(std::min<int64_t>(kRows, num_rows - r), x + (first_row + r) * matmul.depth + k, matmul.depth,
                   panel_weights + k * kPanel, std::min(piece, matmul.depth - k), sums + r);
  const int64_t width = matmul.is_gated ? kPanel / 2 : kPanel;
  const int64_t column = panel * width;
  for (int64_t r = 0; r < num_rows; ++r)
    Finish(reinterpret_cast<const float*>(sums[r]), matmul.bias ? matmul.bias + panel * kPanel : nullptr,
           matmul.is_gated, std::min(width, matmul.columns - column),
           y + (first_row + r) * matmul.columns + column);
}

template <typename T, typename U>
void Run(ffi::ThreadPool& pool, const Matmul& matmul, const void* x, const void* weights, void* y) {
  const int64_t blocks = (matmul.rows + kRowsPerTask - 1) / kRowsPerTask;
  ForEach(pool, matmul.panels * blocks, [&](int64_t i) {
    const int64_t first_row = i % blocks * kRowsPerTask;
    RunTask(matmul, first_row, std::min(kRowsPerTask, matmul.rows - first_row), i / blocks, static_cast<const T*>(x),
            static_cast<const T*>(weights), static_cast<U*>(y));
  });
}

struct RowBlock {
  int64_t group, first_row, num_rows;
};

// Rows in the order of their groups, each group with weights of its own. Rows behind all groups are left as they are,
// and the weights of a group without rows are not touched.
std::vector<RowBlock> BlocksOf(const int32_t* group_sizes, int64_t groups, int64_t rows) {
  std::vector<RowBlock> blocks;
  int64_t row = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = std::min<int64_t>(rows, row + std::max(group_sizes[group], 0));
    for (; row < end; row += blocks.back().num_rows)
      blocks.push_back({group, row, std::min(kRowsPerTask, end - row)});
  }
  return blocks;
}

template <typename T, typename U>
void RunGroups(ffi::ThreadPool& pool, const Matmul& matmul, const std::vector<RowBlock>& blocks, const void* x,
               const void* weights, void* y) {
  const int64_t num_blocks = static_cast<int64_t>(blocks.size());
  ForEach(pool, matmul.panels * num_blocks, [&](int64_t i) {
    const RowBlock& block = blocks[i % num_blocks];
    Matmul own = matmul;
    if (own.bias) own.bias += block.group * matmul.panels * kPanel;
    RunTask(own, block.first_row, block.num_rows, i / num_blocks, static_cast<const T*>(x),
            static_cast<const T*>(weights) + block.group * matmul.panels * matmul.depth * kPanel, static_cast<U*>(y));
  });
}

ffi::Error PackedMatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::Buffer<ffi::F32> bias,
                        ffi::Result<ffi::AnyBuffer> y, bool is_gated) {
  const auto x_dims = x.dimensions(), w_dims = weights.dimensions(), y_dims = y->dimensions();
  const int64_t depth = x_dims[1];
  const int64_t num_weights = static_cast<int64_t>(weights.element_count());
  if (w_dims.front() * depth * kPanel != num_weights) return ffi::Error::InvalidArgument("weights of another shape");
  if (x.element_type() != weights.element_type()) return ffi::Error::InvalidArgument("x and weights differ in type");
  const Matmul matmul{x_dims[0], depth, w_dims.front(), y_dims[1], is_gated,
                      bias.element_count() ? bias.typed_data() : nullptr};
  const bool is_wide = y->element_type() == ffi::F32;
  if (x.element_type() == ffi::F32 && is_wide)
    Run<float, float>(pool, matmul, x.untyped_data(), weights.untyped_data(), y->untyped_data());
  else if (x.element_type() == ffi::BF16 && is_wide)
    Run<BFloat16, float>(pool, matmul, x.untyped_data(), weights.untyped_data(), y->untyped_data());
  else if (x.element_type() == ffi::BF16 && y->element_type() == ffi::BF16)
    Run<BFloat16, BFloat16>(pool, matmul, x.untyped_data(), weights.untyped_data(), y->untyped_data());
  else
    return ffi::Error::InvalidArgument("only f32 and bf16 are supported");
  return ffi::Error::Success();
}

ffi::Error GroupedMatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights,
                         ffi::Buffer<ffi::F32> bias,  // [groups, panels * kPanel], or empty
                         ffi::Buffer<ffi::S32> group_sizes, ffi::Result<ffi::AnyBuffer> y, bool is_gated) {
  const auto x_dims = x.dimensions(), w_dims = weights.dimensions(), y_dims = y->dimensions();
  const int64_t depth = x_dims[1], groups = w_dims[0], panels = w_dims[1];
  const int64_t num_weights = static_cast<int64_t>(weights.element_count());
  if (groups * panels * depth * kPanel != num_weights) return ffi::Error::InvalidArgument("weights of another shape");
  if (static_cast<int64_t>(group_sizes.element_count()) != groups)
    return ffi::Error::InvalidArgument("as many sizes as groups are needed");
  if (x.element_type() != weights.element_type()) return ffi::Error::InvalidArgument("x and weights differ in type");
  const Matmul matmul{x_dims[0], depth, panels, y_dims[1], is_gated,
                      bias.element_count() ? bias.typed_data() : nullptr};
  const std::vector<RowBlock> blocks = BlocksOf(group_sizes.typed_data(), groups, matmul.rows);
  const bool is_wide = y->element_type() == ffi::F32;
  if (x.element_type() == ffi::F32 && is_wide)
    RunGroups<float, float>(pool, matmul, blocks, x.untyped_data(), weights.untyped_data(), y->untyped_data());
  else if (x.element_type() == ffi::BF16 && is_wide)
    RunGroups<BFloat16, float>(pool, matmul, blocks, x.untyped_data(), weights.untyped_data(), y->untyped_data());
  else if (x.element_type() == ffi::BF16 && y->element_type() == ffi::BF16)
    RunGroups<BFloat16, BFloat16>(pool, matmul, blocks, x.untyped_data(), weights.untyped_data(), y->untyped_data());
  else
    return ffi::Error::InvalidArgument("only f32 and bf16 are supported");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" int64_t PenstockPanelWidth() { return penstock::kPanel; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockPackedMatmul, penstock::PackedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("is_gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockGroupedMatmul, penstock::GroupedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("is_gated"));
