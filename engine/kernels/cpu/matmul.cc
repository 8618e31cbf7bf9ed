// Matmuls with packed weights for CPUs (matmul.h), called by XLA through its foreign function interface.
//
// XLA's own matmul transposes the weights in every call. Here they are packed once, when a model is loaded.

#include "matmul.h"

#include <vector>

#include "buffers.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace {

template <typename U>
auto StoreInto(U* y, int64_t columns) {
  return [=](int64_t row, int64_t column, const float* values, int64_t width) {
    StoreRow(width, values, y + row * columns + column);
  };
}

ffi::Error PackedMatmul(PENSTOCK_PARAMETERS(PackedMatmul)) {
  if (x.element_type() != weights.element_type()) return ffi::Error::InvalidArgument("x and weights differ in type");
  const auto x_dims = x.dimensions(), w_dims = weights.dimensions(), y_dims = y->dimensions();
  const int64_t rows = RowsOf(num_rows, x_dims[0]);
  const int64_t depth = x_dims[1], panels = w_dims.front();
  if (panels * depth * kPanel != static_cast<int64_t>(weights.element_count()))
    return ffi::Error::InvalidArgument("weights of another shape");
  const Matmul matmul{depth, panels, y_dims[1], Gate{gate}, bias.element_count() ? bias.typed_data() : nullptr};
  return OfResults(x.element_type(), y->element_type(), [&](auto* of_x, auto* of_y) {
    using T = std::remove_pointer_t<decltype(of_x)>;
    using U = std::remove_pointer_t<decltype(of_y)>;
    const Grid grid(rows, panels, pool.num_threads());
    const auto put = StoreInto(static_cast<U*>(y->untyped_data()), matmul.columns);
    ForEach(pool, grid.size(), [&](int64_t i) {
      RunTask(matmul, grid.FirstRow(i), grid.NumRows(i), grid.Panel(i), grid.NextPanel(i),
              static_cast<const T*>(x.untyped_data()), static_cast<const T*>(weights.untyped_data()), put);
    });
  });
}

struct RowBlock {
  int64_t group, first_row, num_rows;
};

// Blocks of rows that are sorted by group; each group has weights of its own. Rows after all groups are left as they
// are, and the weights of a group without rows are not touched.
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

ffi::Error GroupedMatmul(PENSTOCK_PARAMETERS(GroupedMatmul)) {
  if (x.element_type() != weights.element_type()) return ffi::Error::InvalidArgument("x and weights differ in type");
  const auto x_dims = x.dimensions(), w_dims = weights.dimensions(), y_dims = y->dimensions();
  const int64_t rows = x_dims[0], depth = x_dims[1], groups = w_dims[0], panels = w_dims[1];
  if (groups * panels * depth * kPanel != static_cast<int64_t>(weights.element_count()))
    return ffi::Error::InvalidArgument("weights of another shape");
  if (static_cast<int64_t>(group_sizes.element_count()) != groups)
    return ffi::Error::InvalidArgument("as many sizes as groups are needed");
  const Matmul matmul{depth, panels, y_dims[1], Gate{gate}, bias.element_count() ? bias.typed_data() : nullptr};
  const std::vector<RowBlock> blocks = BlocksOf(group_sizes.typed_data(), groups, rows);
  const int64_t num_blocks = static_cast<int64_t>(blocks.size());
  return OfResults(x.element_type(), y->element_type(), [&](auto* of_x, auto* of_y) {
    using T = std::remove_pointer_t<decltype(of_x)>;
    using U = std::remove_pointer_t<decltype(of_y)>;
    const auto put = StoreInto(static_cast<U*>(y->untyped_data()), matmul.columns);
    ForEach(pool, panels * num_blocks, [&](int64_t i) {
      const RowBlock& block = blocks[i % num_blocks];
      Matmul own = matmul;
      if (own.bias) own.bias += block.group * panels * kPanel;
      RunTask(own, block.first_row, block.num_rows, i / num_blocks, -1, static_cast<const T*>(x.untyped_data()),
              static_cast<const T*>(weights.untyped_data()) + block.group * panels * depth * kPanel, put);
    });
  });
}

}  // namespace

PENSTOCK_DEFINE_KERNEL(PackedMatmul);
PENSTOCK_DEFINE_KERNEL(GroupedMatmul);

}  // namespace penstock

extern "C" int64_t PenstockPanelWidth() { return penstock::kPanel; }

extern "C" const char* PenstockInstructions() { return penstock::kInstructions; }
