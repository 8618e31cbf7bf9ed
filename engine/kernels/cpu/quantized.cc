// Matmuls with quantized weights for CPUs (quantized.h), called by XLA through its foreign function interface.

#include "quantized.h"

#include <vector>

#include "buffers.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace {

struct Task {
  int64_t group, first_row, num_rows;  // group: rows with weights of their own
};

// Tasks for rows that are sorted by group, of which there may be one. Rows after all groups are left as they are, and the
// weights of a group without rows are not touched.
std::vector<Task> TasksOf(S32& sizes, int64_t rows, int64_t panels, int64_t threads) {
  std::vector<Task> tasks;
  const bool is_grouped = sizes.element_count() > 1;
  const int64_t groups = is_grouped ? static_cast<int64_t>(sizes.element_count()) : 1;
  const int64_t rows_each = is_grouped ? kRowsPerTask : Grid(rows, panels, threads).rows_each;
  int64_t row = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t size = is_grouped ? std::max(sizes.typed_data()[group], 0) : rows;
    const int64_t end = std::min(rows, row + size);
    for (; row < end; row += tasks.back().num_rows) tasks.push_back({group, row, std::min(rows_each, end - row)});
  }
  return tasks;
}

template <int kBits, typename Rows, typename U>
void RunTasks(ffi::ThreadPool& pool, const std::vector<Task>& tasks, const Matmul& matmul,
              const QuantizedWeights& weights, const Rows& rows, U* y) {
  const int64_t count = static_cast<int64_t>(tasks.size());
  const int64_t lanes = matmul.panels * weights.depth / kInLane<kBits> * kPanel;
  const int64_t scale_bytes = matmul.panels * weights.Groups() * kPanel * (weights.scale_type == ScaleType::kFloat ? 4 : 2);
  const int64_t threads = pool.num_threads();
  ForEach(pool, matmul.panels * count, [&](int64_t i) {
    const Task& task = tasks[i % count];
    const int64_t panel = i / count, next = i + threads;
    const bool has_next = next / count < matmul.panels && next / count > panel && tasks[next % count].group == task.group;
    Matmul own = matmul;
    QuantizedWeights own_weights = weights;
    if (own.bias != nullptr) own.bias += task.group * matmul.panels * kPanel;
    own_weights.codes += task.group * lanes;
    own_weights.scales = static_cast<const char*>(weights.scales) + task.group * scale_bytes;
    own_weights.offsets = static_cast<const char*>(weights.offsets) + task.group * scale_bytes;
    RunQuantizedTask<kBits>(own, own_weights, rows, task.first_row, task.num_rows, panel, has_next ? next / count : -1,
                            [&](int64_t row, int64_t column, const float* values, int64_t width) {
                              StoreRow(width, values, y + row * matmul.columns + column);
                            });
  });
}

ffi::Error QuantizedMatmul(PENSTOCK_PARAMETERS(QuantizedMatmul)) {
  const int64_t rows = RowsOf(group_sizes, x.dimensions()[0]), depth = x.dimensions()[1];
  const auto code_dims = codes.dimensions(), scale_dims = scales.dimensions();
  const int64_t panels = code_dims[code_dims.size() - 3];
  const int64_t groups = scale_dims[scale_dims.size() - 2];
  if (code_dims[code_dims.size() - 2] * 32 / bits != depth || code_dims.back() != kPanel || depth % groups != 0)
    return ffi::Error::InvalidArgument("weights of another shape");
  const Matmul matmul{depth, panels, y->dimensions()[1], Gate{gate}, OrNull(bias)};
  const QuantizedWeights weights = QuantizedOf(codes, scales, offsets, depth, offset);
  const std::vector<Task> tasks = TasksOf(group_sizes, rows, panels, pool.num_threads());
  const auto run = [&](auto* in, auto* out) {
    using T = std::remove_pointer_t<decltype(in)>;
    const auto with_bits = [&](auto each) {
      if (bytes->element_count() == 0)
        return RunTasks<each()>(pool, tasks, matmul, weights, PlainRows<T>{in, depth}, out);
      const ByteRows<each()> quantized{bytes->typed_data(), row_scales->typed_data(),
                                       row_sums->element_count() > 0 ? row_sums->typed_data() : nullptr, depth,
                                       weights.group};
      constexpr int64_t kRowsEach = 8;
      ForEach(pool, (rows + kRowsEach - 1) / kRowsEach, [&](int64_t i) {
        for (int64_t row = i * kRowsEach; row < std::min(rows, (i + 1) * kRowsEach); ++row) quantized.Quantize(in, row);
      });
      RunTasks<each()>(pool, tasks, matmul, weights, quantized, out);
    };
    if (bits == 8) with_bits(Bits<8>{});
    else with_bits(Bits<4>{});
  };
  return OfResults(x.element_type(), y->element_type(), [&](auto* of_x, auto* of_y) {
    run(static_cast<decltype(of_x)>(x.untyped_data()), static_cast<decltype(of_y)>(y->untyped_data()));
  });
}

}  // namespace

PENSTOCK_DEFINE_KERNEL(QuantizedMatmul);

}  // namespace penstock
