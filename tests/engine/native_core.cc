// The kernels for quantized weights without XLA and without threads, for processors that are not this one.
//
// Without arguments it prints the width of a panel. With two it reads a case from the first file, and writes the result,
// f32 [rows][panels * width], to the second.

#include <cstdio>
#include <vector>

#include "quantized.h"

using namespace penstock;

template <typename T>
std::vector<T> Take(std::FILE* file, int64_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, file) != static_cast<size_t>(count)) std::abort();
  return values;
}

int main(int argc, char** argv) {
  if (argc < 3) return std::printf("%d\n", static_cast<int>(kPanel)) < 0;
  std::FILE* in = std::fopen(argv[1], "rb");
  const auto header = Take<int64_t>(in, 7);
  const int64_t kind = header[0], bits = header[1], rows = header[3], depth = header[4], group = header[5];
  const int64_t panels = header[6], scales_each = panels * (depth / group) * kPanel;
  const auto x = Take<float>(in, rows * depth);
  const auto codes = Take<uint32_t>(in, panels * depth * bits / 32 * kPanel);
  const auto scales = Take<float>(in, scales_each);
  const Offset offset{header[2]};
  const auto offsets = Take<float>(in, offset == Offset::kNone ? 0 : scales_each);
  const QuantizedWeights weights{depth, group, codes.data(), scales.data(), offsets.data(), ScaleType::kFloat, offset};
  const Matmul matmul{depth, panels, panels * kPanel, Gate::kNone, nullptr};
  std::vector<float> y(rows * matmul.columns);
  const auto run = [&](auto with_bits, const auto& of_x) {
    for (int64_t panel = 0; panel < panels; ++panel)
      for (int64_t row = 0; row < rows; row += kRowsPerTask)
        RunQuantizedTask<with_bits()>(matmul, weights, of_x, row, std::min(kRowsPerTask, rows - row), panel,
                                      (panel + 1) % panels,
                                      [&](int64_t row, int64_t column, const float* values, int64_t width) {
                                        std::copy(values, values + width, &y[row * matmul.columns + column]);
                                      });
  };
  constexpr std::integral_constant<int, 8> kEight;
  constexpr std::integral_constant<int, 4> kFour;
  std::vector<BFloat16> halves(x.size());
  for (size_t i = 0; i < x.size(); ++i) Store(&halves[i], x[i]);
  if (kind == 2) {
    std::vector<uint8_t> bytes(x.size());
    std::vector<float> row_scales(rows);
    for (int64_t row = 0; row < rows; ++row) row_scales[row] = QuantizeRow(&x[row * depth], depth, &bytes[row * depth]);
    run(kEight, ByteRows{bytes.data(), row_scales.data(), depth});
  } else if (kind == 1) {
    const PlainRows<BFloat16> of_x{halves.data(), depth};
    bits == 8 ? run(kEight, of_x) : run(kFour, of_x);
  } else {
    const PlainRows<float> of_x{x.data(), depth};
    bits == 8 ? run(kEight, of_x) : run(kFour, of_x);
  }
  std::FILE* out = std::fopen(argv[2], "wb");
  return std::fwrite(y.data(), sizeof(float), y.size(), out) != y.size();
}
