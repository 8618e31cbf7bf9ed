// Matrix tiles: 16 rows of 16 words, each one f32 or int32 of sums, two bf16 or four int8 that are neighbours in depth.
//
// They are those of Intel's AMX or, if a build asks for it, the same in plain C++, bit for bit, so that everything that
// uses tiles can be built and tested on any machine. PENSTOCK_TILES is 1 for the instructions, 2 for their emulation.
//
// TDPBF16PS rounds in an order of its own: it sums even and odd features of each 32 in two chains from zero, adds the
// two, and adds that to the sum so far. Denormals are zero, of inputs and of results. Rows that are too few for a tile
// take vectors that sum in this order, so that a row has the same bits whatever rows are beside it. Sums of int8 are
// exact in any order.

#ifndef PENSTOCK_TILES_H_
#define PENSTOCK_TILES_H_

#include <type_traits>
#include <utility>

#include "kernels.h"

#ifndef PENSTOCK_TILES
#define PENSTOCK_TILES 0
#endif

namespace penstock {

constexpr bool kHasTiles = PENSTOCK_TILES != 0;
constexpr int64_t kTileRows = 16, kTileWords = 16, kTileBytes = 64;  // kTileBytes: of a row
constexpr int64_t kTileFeatures = 2 * kTileWords;  // in bf16: where the chains of a sum begin anew

// Tiles are worth loading for this many rows; vectors are quicker for fewer.
constexpr int64_t kFewestTileRows = 5;

// ---- The order of sums, by vectors

// Returns x as it is. The compiler, which may reorder sums (-fassociative-math), does not look behind it.
inline Vector Settled(Vector x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// x * w + sum, rounded once.
inline Vector MultiplyAdd(Vector x, Vector w, Vector sum) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#else
  for (int lane = 0; lane < kLanes; ++lane) sum[lane] = std::fma(x[lane], w[lane], sum[lane]);
  return sum;
#endif
}

// The two chains of sums over 32 features.
struct Chains {
  Vector even = {}, odd = {};

  void Add(uint32_t x, Words w) {  // pairs of bf16
    even = MultiplyAdd(Vector{} + As<float>(x << 16), (Vector)(w << 16), even);
    odd = MultiplyAdd(Vector{} + As<float>(x & 0xffff0000u), (Vector)(w & 0xffff0000u), odd);
  }
  Vector AddedTo(Vector sum) const { return Settled(sum + Settled(even + odd)); }
};

// While it lives, this thread takes denormals for zeros. XLA's threads always do.
class DenormalsAreZero {
 public:
#if defined(__x86_64__)
  DenormalsAreZero() : before_(_mm_getcsr()) { Set(before_ | 0x8040u); }
  ~DenormalsAreZero() { Set(before_); }

 private:
  static void Set(uint32_t state) {
    asm volatile("" ::: "memory");  // no arithmetic moves across
    _mm_setcsr(state);
    asm volatile("" ::: "memory");
  }
  const uint32_t before_;
#elif defined(__aarch64__)
  DenormalsAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    Set(before_ | uint64_t{1} << 24);
  }
  ~DenormalsAreZero() { Set(before_); }

 private:
  static void Set(uint64_t state) { asm volatile("msr fpcr, %0" : : "r"(state) : "memory"); }
  uint64_t before_;
#endif
};

// Calls `call` with 0 to kCount - 1 as compile-time constants, because these name tiles.
template <int... i, typename Call>
inline void ForEachOf(std::integer_sequence<int, i...>, Call call) {
  (call(std::integral_constant<int, i>{}), ...);
}
template <int kCount, typename Call>
inline void Repeat(Call call) {
  ForEachOf(std::make_integer_sequence<int, kCount>{}, call);
}

// ---- Tiles

// The eight tiles of a thread: 0 to 3 are sums, 4 and 5 rows of x, and 6 and 7 weights. A thread may use them while one
// object of this class lives.
#if PENSTOCK_TILES == 1

class Tiles {
 public:
  Tiles() = default;
  ~Tiles() {
    if (shapes_.palette != 0) asm volatile("tilerelease");  // the thread is XLA's, which has kernels of its own
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Gives tiles their sizes. If these change, the contents of the tiles are lost. The lower row of tiles, 2, 3 and 5,
  // has `lower` rows; if that is 0, as many as the upper one.
  void Shape(int64_t upper, int64_t lower, int64_t words) {
    if (upper == upper_ && lower == lower_ && words == words_) return;
    upper_ = upper, lower_ = lower, words_ = words;
    const int64_t low = lower ? lower : upper;
    const int64_t rows[] = {upper, upper, low, low, upper, low, words, words};
    shapes_.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shapes_.rows[tile] = static_cast<uint8_t>(rows[tile]);
      shapes_.bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * words : kTileBytes);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes_));
  }

  // Instructions name their tiles, so a tile is a template's parameter. They stand here as text, which needs an
  // assembler of 2020 or later but no option of the compiler.
  template <int tile>
  void Load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(from), "r"(stride) : "memory");
  }
  template <int tile>
  void Clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  void Store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(to), "r"(stride) : "memory");
  }
  template <int sums, int x, int weights>
  void DotBFloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(weights));
  }
  template <int sums, int x, int weights>
  void DotInt8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(weights));
  }

 private:
  struct alignas(64) Shapes {  // as LDTILECFG reads them
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  Shapes shapes_ = {};
  int64_t upper_ = 0, lower_ = 0, words_ = 0;
};

#else

class Tiles {
 public:
  void Shape(int64_t upper, int64_t lower, int64_t words) {
    const int64_t low = lower ? lower : upper;
    const int64_t rows[] = {upper, upper, low, low, upper, low, words, words};
    for (int tile = 0; tile < 8; ++tile) tiles_[tile].rows = rows[tile];
    for (int tile : {4, 5}) tiles_[tile].words = words;
  }

  template <int tile>
  void Load(const void* from, int64_t stride) {
    Tile& to = tiles_[tile];
    for (int64_t row = 0; row < to.rows; ++row)
      std::memcpy(to.data[row], static_cast<const char*>(from) + row * stride, 4 * to.words);
  }
  template <int tile>
  void Clear() {
    std::memset(tiles_[tile].data, 0, sizeof tiles_[tile].data);
  }
  template <int tile>
  void Store(void* to, int64_t stride) {
    const Tile& from = tiles_[tile];
    for (int64_t row = 0; row < from.rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, from.data[row], 4 * from.words);
  }
  template <int sums, int x, int weights>
  void DotBFloat16() {
    Each<sums, x, weights>([](Words* sum, const uint32_t* row, const uint32_t* column, int64_t words) {
      Chains chains;
      for (int64_t k = 0; k < words; ++k) chains.Add(row[k], LoadWords(column + k * kTileWords));
      *sum = (Words)chains.AddedTo((Vector)*sum);
    });
  }
  template <int sums, int x, int weights>
  void DotInt8() {
    Each<sums, x, weights>([](Words* sum, const uint32_t* row, const uint32_t* column, int64_t words) {
      for (int64_t k = 0; k < words; ++k)
        for (int shift = 0; shift < 32; shift += 8) {
          const Ints w = (Ints)(LoadWords(column + k * kTileWords) << (24 - shift)) >> 24;
          *sum += (Words)((static_cast<int32_t>(row[k] << (24 - shift)) >> 24) * w);
        }
    });
  }

 private:
  struct Tile {
    int64_t rows, words = kTileWords;
    alignas(kTileBytes) uint32_t data[kTileRows][kTileWords];
  };

  // Calls `add` for each row of x and each vector of its sums.
  template <int sums, int x, int weights, typename Add>
  void Each(Add add) {
    for (int64_t row = 0; row < tiles_[x].rows; ++row)
      for (int64_t column = 0; column < kTileWords; column += kLanes) {
        Words sum = LoadWords(tiles_[sums].data[row] + column);
        add(&sum, tiles_[x].data[row], tiles_[weights].data[0] + column, tiles_[x].words);
        std::memcpy(tiles_[sums].data[row] + column, &sum, sizeof sum);
      }
  }

  Tile tiles_[8];
};

#endif

// What a task holds while it runs.
struct Nothing {};
using TaskTiles = std::conditional_t<kHasTiles, Tiles, Nothing>;
using TaskRounding = std::conditional_t<kHasTiles, DenormalsAreZero, Nothing>;

}  // namespace penstock

#endif  // PENSTOCK_TILES_H_
