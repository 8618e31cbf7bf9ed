// Blocks of tiles of sums (tiles.h), two by two or one by four: either takes all tiles of a thread.

#ifndef PENSTOCK_TILE_BLOCK_H_
#define PENSTOCK_TILE_BLOCK_H_

#include "tiles.h"

namespace penstock {

// What words hold.
struct BFloat16Words {
  template <int sums, int x, int weights>
  static void Dot(Tiles& tiles) { tiles.DotBFloat16<sums, x, weights>(); }
};
struct Int8Words {
  template <int sums, int x, int weights>
  static void Dot(Tiles& tiles) { tiles.DotInt8<sums, x, weights>(); }
};

// kDown x kAcross tiles of sums, in the tiles of a thread. Their place in memory is `to`; strides are bytes of a row.
template <int kDown, int kAcross>
class TileBlock {
 public:
  TileBlock(Tiles& tiles, void* to, int64_t stride) : tiles_(tiles), to_(static_cast<char*>(to)), stride_(stride) {}

  void Clear() {
    Each([&](auto down, auto across) { tiles_.template Clear<Sums(down(), across())>(); });
  }
  void Load() {
    Each([&](auto down, auto across) {
      tiles_.template Load<Sums(down(), across())>(Place(down(), across()), stride_);
    });
  }
  void Store() {
    Each([&](auto down, auto across) {
      tiles_.template Store<Sums(down(), across())>(Place(down(), across()), stride_);
    });
  }

  // Adds the product of kDown tiles of x, one below the other, and kAcross tiles of weights, side by side.
  template <typename Kind>
  void Add(const void* x, int64_t x_stride, const void* weights, int64_t weights_stride) {
    Repeat<kDown>([&](auto down) {
      tiles_.template Load<4 + down()>(static_cast<const char*>(x) + down() * kTileRows * x_stride, x_stride);
    });
    Repeat<kAcross>([&](auto across) {
      constexpr int kWeights = 6 + across() % 2;
      tiles_.template Load<kWeights>(static_cast<const char*>(weights) + across() * kTileBytes, weights_stride);
      Repeat<kDown>([&](auto down) {
        Kind::template Dot<Sums(down(), across()), 4 + down(), kWeights>(tiles_);
      });
    });
  }

 private:
  // The tile of the sums at a place of the block.
  static constexpr int Sums(int down, int across) { return kDown == 1 ? across : 2 * down + across; }

  char* Place(int down, int across) const { return to_ + down * kTileRows * stride_ + across * kTileBytes; }

  template <typename Call>
  static void Each(Call call) {
    Repeat<kDown>([&](auto down) { Repeat<kAcross>([&](auto across) { call(down, across); }); });
  }

  Tiles& tiles_;
  char* const to_;
  const int64_t stride_;
};

}  // namespace penstock

#endif  // PENSTOCK_TILE_BLOCK_H_
