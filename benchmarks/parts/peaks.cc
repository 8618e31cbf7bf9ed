// Prints the operations per second of one core, in GFLOP/s or GOP/s from registers, for each instruction for products
// that it has: a name and a rate on each line.

#include <chrono>
#include <cstdio>

#include "tiles.h"

#if PENSTOCK_TILES == 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using penstock::Ints;
using penstock::kLanes;
using penstock::Vector;
using penstock::Words;

constexpr int kSums = 12, kRounds = 200000, kRepeats = 7;  // so many sums hide an instruction's latency

// Prints the fastest of several runs of `step`, which computes `operations`.
template <typename Step>
void Print(const char* name, double operations, Step step) {
  double fastest = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < kRounds; ++round) step();
    fastest = std::min(fastest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::printf("%s %.0f\n", name, operations * kRounds / fastest * 1e-9);
}

// `dot` adds products to a sum; each lane's are `products`.
template <typename Sum, typename Dot>
void PrintDots(const char* name, int products, Dot dot) {
  Sum sums[kSums] = {};
  Words x = Words{} + 1u, w = Words{} + 2u;
#if defined(__x86_64__)
  asm volatile("" : "+x"(x), "+x"(w));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x), "+w"(w));
#endif
  Print(name, 2.0 * products * kLanes * kSums, [&] {
    for (Sum& sum : sums) sum = dot(sum, x, w);
  });
  volatile float used = 0;
  for (const Sum& sum : sums) used = used + static_cast<float>(sum[0]);
}

}  // namespace

int main() {
  PrintDots<Vector>("FMA", 1, [](Vector sum, Words x, Words w) {
    return penstock::MultiplyAdd((Vector)x, (Vector)w, sum);
  });
#if defined(__AVX512BF16__)
  PrintDots<Vector>("VDPBF16PS", 2, [](Vector sum, Words x, Words w) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
  });
#endif
#if defined(__AVX512VNNI__)
  PrintDots<Ints>("VPDPBUSD", 4, [](Ints sum, Words x, Words w) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
  });
#endif
#if defined(__ARM_FEATURE_DOTPROD)
  PrintDots<Ints>("SDOT", 4, [](Ints sum, Words x, Words w) {
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)x, (int8x16_t)w);
  });
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  PrintDots<Vector>("BFMMLA", 4, [](Vector sum, Words x, Words w) {
    return (Vector)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)w);
  });
#endif
#if PENSTOCK_TILES == 1
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;
  penstock::Tiles tiles;
  tiles.Shape(penstock::kTileRows, penstock::kTileRows, penstock::kTileWords);
  const double words = 4.0 * penstock::kTileRows * penstock::kTileWords * penstock::kTileWords;
  Print("TDPBF16PS", 2 * 2 * words, [&] {
    tiles.DotBFloat16<0, 4, 6>(), tiles.DotBFloat16<1, 4, 7>();
    tiles.DotBFloat16<2, 5, 6>(), tiles.DotBFloat16<3, 5, 7>();
  });
  Print("TDPBSSD", 2 * 4 * words, [&] {
    tiles.DotInt8<0, 4, 6>(), tiles.DotInt8<1, 4, 7>();
    tiles.DotInt8<2, 5, 6>(), tiles.DotInt8<3, 5, 7>();
  });
#endif
}
