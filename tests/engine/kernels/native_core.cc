// The matmuls without XLA and without threads, for processors that are not this one.
//
// Without arguments it prints the width of a panel. With two it reads a case from the first file, and writes the result,
// f32 [rows][panels * width], to the second. Weights of 16 bits are bf16, of fewer bits quantized. A third makes it read f32, and write each of them rounded to float16 and back:
// first one by one, then by vectors.

#include <cstdio>
#include <vector>

#include "quantized.h"

#if PENSTOCK_TILES == 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace penstock;

template <typename T>
std::vector<T> Take(std::FILE* file, int64_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, file) != static_cast<size_t>(count)) std::abort();
  return values;
}

int Round(std::FILE* in, std::FILE* out) {
  constexpr int kAtOnce = 16;
  float x[kAtOnce], y[2][kAtOnce];
  while (std::fread(x, sizeof x, 1, in) == 1) {
    Float16 halves[2][kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) Store(&halves[0][i], x[i]), y[0][i] = Load(halves[0][i]);
    for (int i = 0; i < kAtOnce; i += kLanes)
      StoreVector(halves[1] + i, LoadVector(x + i)), StoreVector(y[1] + i, LoadVector(halves[1] + i));
    if (std::fwrite(y, sizeof y, 1, out) != 1) return 1;
  }
  return std::fclose(out);
}

// Calls `run` with the first row, the number of rows and the panel of each task, and its successor's panel.
template <typename Run>
void ForEachTask(int64_t panels, int64_t rows, Run run) {
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t row = 0; row < rows; row += kRowsPerTask)
      run(row, std::min(kRowsPerTask, rows - row), panel, (panel + 1) % panels);
}

int main(int argc, char** argv) {
#if PENSTOCK_TILES == 1
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 3;  // as processor_kinds.py asks for permission
#endif
  if (argc < 3) return std::printf("%d\n", static_cast<int>(kPanel)) < 0;
  if (argc > 3) return Round(std::fopen(argv[1], "rb"), std::fopen(argv[2], "wb"));
  std::FILE* in = std::fopen(argv[1], "rb");
  const auto header = Take<int64_t>(in, 7);
  const int64_t kind = header[0], bits = header[1], rows = header[3], depth = header[4], group = header[5];
  const int64_t panels = header[6], scales_each = panels * (depth / group) * kPanel;
  const auto x = Take<float>(in, rows * depth);
  const Matmul matmul{depth, panels, panels * kPanel, Gate::kNone, nullptr};
  std::vector<float> y(rows * matmul.columns);
  const auto put = [&](int64_t row, int64_t column, const float* values, int64_t width) {
    std::copy(values, values + width, &y[row * matmul.columns + column]);
  };
  const auto write = [&] {
    std::FILE* out = std::fopen(argv[2], "wb");
    return std::fwrite(y.data(), sizeof(float), y.size(), out) != y.size();
  };
  if (bits == 16) {
    std::vector<BFloat16> rounded(x.size());
    for (size_t i = 0; i < x.size(); ++i) Store(&rounded[i], x[i]);
    const auto weights = Take<BFloat16>(in, panels * depth * kPanel);
    ForEachTask(panels, rows, [&](int64_t row, int64_t count, int64_t panel, int64_t next) {
      RunTask(matmul, row, count, panel, next, rounded.data(), weights.data(), put);
    });
    return write();
  }
  const auto codes = Take<uint32_t>(in, panels * depth * bits / 32 * kPanel);
  const auto scales = Take<float>(in, scales_each);
  const Offset offset{header[2]};
  const auto offsets = Take<float>(in, offset == Offset::kNone ? 0 : scales_each);
  const QuantizedWeights weights{depth, group, codes.data(), scales.data(), offsets.data(), ScaleType::kFloat, offset};
  const auto run = [&](auto with_bits, const auto& of_x) {
    ForEachTask(panels, rows, [&](int64_t row, int64_t count, int64_t panel, int64_t next) {
      RunQuantizedTask<with_bits()>(matmul, weights, of_x, row, count, panel, next, put);
    });
  };
  const auto run_plain = [&](auto type) {
    std::vector<decltype(type)> rounded(x.size());
    for (size_t i = 0; i < x.size(); ++i) Store(&rounded[i], x[i]);
    const PlainRows<decltype(type)> of_x{rounded.data(), depth};
    bits == 8 ? run(Bits<8>{}, of_x) : run(Bits<4>{}, of_x);
  };
  const auto run_bytes = [&](auto with_bits) {
    std::vector<uint8_t> bytes(x.size());
    std::vector<float> row_scales(rows);
    std::vector<int32_t> sums(rows * weights.Groups());
    const ByteRows<with_bits()> of_x{bytes.data(), row_scales.data(), sums.data(), depth, group};
    for (int64_t row = 0; row < rows; ++row) of_x.Quantize(x.data(), row);
    run(with_bits, of_x);
  };
  if (kind == 3) {
    bits == 8 ? run_bytes(Bits<8>{}) : run_bytes(Bits<4>{});
  } else if (kind == 2) {
    run_plain(Float16{});
  } else if (kind == 1) {
    run_plain(BFloat16{});
  } else {
    run_plain(float{});
  }
  return write();
}
