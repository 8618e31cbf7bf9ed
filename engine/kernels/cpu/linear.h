// Linear layers of a step, computed by a team of threads, and the residual stream between them.

#ifndef PENSTOCK_LINEAR_H_
#define PENSTOCK_LINEAR_H_

#include "buffers.h"
#include "matmul.h"
#include "quantized.h"
#include "rows.h"
#include "team.h"

namespace penstock {

namespace ffi = xla::ffi;

constexpr int64_t kRowsEach = 4;  // rows per task in a phase that goes row by row

template <typename Work>
void ForEachRow(Team& team, int64_t rows, Work work) {
  team.Run((rows + kRowsEach - 1) / kRowsEach, [&](int64_t i) {
    const int64_t end = std::min(rows, (i + 1) * kRowsEach);
    for (int64_t row = i * kRowsEach; row < end; ++row) work(row);
  });
}

// Receives columns [column, column + width) of a row of a matmul's result. Refers to the function that it is made from.
class Put {
 public:
  template <typename Function>
  Put(const Function& function)  // NOLINT: implicit, for lambdas written in a matmul's call
      : function_(&function), call_([](const void* put, int64_t row, int64_t column, const float* values, int64_t width) {
          (*static_cast<const Function*>(put))(row, column, values, width);
        }) {}
  void operator()(int64_t row, int64_t column, const float* values, int64_t width) const {
    call_(function_, row, column, values, width);
  }

 private:
  const void* function_;
  void (*call_)(const void*, int64_t, int64_t, const float*, int64_t);
};

// A linear layer as XLA passes it: weights in panels, or codes with scales and maybe offsets.
struct LinearBuffers {
  ffi::AnyBuffer weights, scales, offsets;
  F32 bias;
  int64_t offset;
  bool reads_bytes;  // its rows are quantized
};

// A linear layer, and its multiplication by a team. T is the type of the rows.
template <typename T>
struct Linear {
  LinearBuffers buffers;
  Matmul shape;

  Linear(const LinearBuffers& buffers, int64_t depth, int64_t columns, Gate gate)
      : buffers(buffers), shape{depth, buffers.weights.dimensions().front(), columns, gate, OrNull(buffers.bias)} {}

  void Multiply(Team& team, int64_t rows, const T* x, const Put& put) const {
    if (buffers.weights.element_type() != ffi::U32) {
      const T* weights = static_cast<const T*>(buffers.weights.untyped_data());
      return RunGrid(team, rows, [&](int64_t first_row, int64_t num_rows, int64_t panel, int64_t next_panel) {
        RunTask(shape, first_row, num_rows, panel, next_panel, x, weights, put);
      });
    }
    const QuantizedWeights weights =
        QuantizedOf(buffers.weights, buffers.scales, buffers.offsets, shape.depth, buffers.offset);
    const auto with_bits = [&](auto bits) {
      if (buffers.reads_bytes)
        MultiplyQuantized<bits()>(team, rows, weights, Quantized<bits()>(team, rows, weights, x), put);
      else
        MultiplyQuantized<bits()>(team, rows, weights, PlainRows<T>{x, shape.depth}, put);
    };
    if (buffers.weights.dimensions()[1] * kInLane<8> == shape.depth) with_bits(Bits<8>{});
    else with_bits(Bits<4>{});
  }

 private:
  template <typename Work>
  void RunGrid(Team& team, int64_t rows, const Work& work) const {
    const Grid grid(rows, shape.panels, team.size());
    team.Run(grid.size(), [&](int64_t i) { work(grid.FirstRow(i), grid.NumRows(i), grid.Panel(i), grid.NextPanel(i)); });
  }

  template <int kBits, typename Rows>
  void MultiplyQuantized(Team& team, int64_t rows, const QuantizedWeights& weights, const Rows& x,
                         const Put& put) const {
    RunGrid(team, rows, [&](int64_t first_row, int64_t num_rows, int64_t panel, int64_t next_panel) {
      RunQuantizedTask<kBits>(shape, weights, x, first_row, num_rows, panel, next_panel, put);
    });
  }

  template <int kBits>
  ByteRows<kBits> Quantized(Team& team, int64_t rows, const QuantizedWeights& weights, const T* x) const {
    static thread_local Buffer kept_bytes, kept_scales, kept_sums;
    const bool has_sums = ByteRows<kBits>::NeedsSums(weights.offset);
    const ByteRows<kBits> quantized{kept_bytes.Of<uint8_t>(rows * shape.depth), kept_scales.Of<float>(rows),
                                    has_sums ? kept_sums.Of<int32_t>(rows * weights.Groups()) : nullptr, shape.depth,
                                    weights.group};
    ForEachRow(team, rows, [&](int64_t row) { quantized.Quantize(x, row); });
    return quantized;
  }
};

// A residual stream [rows, size]: a half reads it through a norm, and adds its result to it.
template <typename T>
struct Residual {
  T* x;
  int64_t rows, size;
  float scale;     // of the result that is added
  Norm before, after;

  // Returns the input of the half's first matmul: from `source` or, if there is none, the stream itself.
  const T* Read(Team& team, const T* source, Buffer& buffer) const {
    const T* from = source != nullptr ? source : x;
    if (before.factors == nullptr) return from;
    T* normed = buffer.Of<T>(rows * size);
    ForEachRow(team, rows, [&](int64_t row) { NormRow(before, size, from + row * size, normed + row * size); });
    return normed;
  }

  // Adds the product of inner and the half's last matmul.
  void Add(Team& team, const Linear<T>& linear, const T* inner, Buffer& buffer) const {
    if (after.factors == nullptr) {
      linear.Multiply(team, rows, inner, [&](int64_t row, int64_t column, const float* values, int64_t width) {
        AddRow(width, scale, values, x + row * size + column);
      });
      return;
    }
    float* whole = buffer.Of<float>(rows * size);
    linear.Multiply(team, rows, inner, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      std::memcpy(whole + row * size + column, values, width * sizeof(float));
    });
    ForEachRow(team, rows, [&](int64_t row) {
      float* own = whole + row * size;
      NormRow(after, size, own, own);
      AddRow(size, scale, own, x + row * size);
    });
  }
};

}  // namespace penstock

#endif  // PENSTOCK_LINEAR_H_
