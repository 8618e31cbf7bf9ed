// The half of a layer that is a short convolution between two gates, in place of attention.

#ifndef PENSTOCK_SHORT_CONV_H_
#define PENSTOCK_SHORT_CONV_H_

#include "linear.h"
#include "states.h"

namespace penstock {

constexpr int64_t kChannelsEach = 512;  // channels of a sequence per task

template <typename T>
struct ShortConvHalf {
  StateBatch batch;
  KeptInputs<T> kept;
  const float *taps, *bias;  // [taps, channels], and [channels] or null
  Linear<T> joined, out;     // columns: the gates before and after the convolution, and its input
  Residual<T> residual;

  void Run(Team& team) const {
    static thread_local Buffer normed, projected, mixed, whole;
    static thread_local StateWrites kept_writes;
    StateWrites& writes = kept_writes;  // this thread's, shared by its team
    const int64_t rows = residual.rows, channels = kept.channels, stride = joined.shape.columns;
    const T* x = residual.Read(team, nullptr, normed);
    T* parts = projected.Of<T>(rows * stride);
    joined.Multiply(team, rows, x, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      StoreRow(width, values, parts + row * stride + column);
    });
    writes.Build(batch);
    T* y = mixed.Of<T>(rows * channels);
    const int64_t pieces = (channels + kChannelsEach - 1) / kChannelsEach;
    team.Run(batch.num_seqs * pieces, [&](int64_t i) {
      const int64_t first = i % pieces * kChannelsEach;
      Convolve(Sequence(batch, i / pieces), writes, first, std::min(kChannelsEach, channels - first), parts, y);
    });
    residual.Add(team, out, y, whole);
  }

  // Convolves some channels of one sequence.
  __attribute__((noinline)) void Convolve(const Sequence& sequence, const StateWrites& writes, int64_t first,
                                          int64_t size, const T* parts, T* y) const {
    static thread_local Buffer memory;
    const int64_t channels = kept.channels, stride = joined.shape.columns;
    Window<T> window(kept, first, size, memory.Of<T>(kept.taps * size));
    window.Begin(sequence.read);
    for (int64_t token = sequence.begin; token < sequence.end; ++token) {
      const T *before = parts + token * stride + first, *behind = before + channels, *inputs = behind + channels;
      T* newest = window.newest();
      for (int64_t c = 0; c < size; c += kLanes)
        StoreUpTo(newest + c, LoadUpTo(before + c, size - c) * LoadUpTo(inputs + c, size - c), size - c);
      T* result = y + token * channels + first;
      window.Convolve(taps + first, channels, [&](int64_t c, Vector total, int64_t left) {
        if (bias != nullptr) total += LoadUpTo(bias + first + c, left);
        StoreUpTo(result + c, total * LoadUpTo(behind + c, left), left);
      });
      window.Advance();
      writes.ForEach(token, [&](int64_t slot) { window.Keep(slot); });
    }
  }
};

}  // namespace penstock

#endif  // PENSTOCK_SHORT_CONV_H_
