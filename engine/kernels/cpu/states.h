// The states that a step reads and writes, and short convolutions, whose states are their last inputs.
//
// Code that keeps a state goes through a sequence's tokens one by one, each with the same functions on the same sizes.
// So a token's result depends neither on how its prompt was split, nor on what else is in the step.

#ifndef PENSTOCK_STATES_H_
#define PENSTOCK_STATES_H_

#include <vector>

#include "rows.h"

namespace penstock {

// The states of a step, as in `StateBatch` of recurrence.py, with the ends of the sequences' tokens.
struct StateBatch {
  int64_t num_seqs, num_writes;
  const int32_t* cu_q_lens;  // [num_seqs + 1]
  const int32_t* positions;  // [tokens]
  const int32_t *reads;      // [num_seqs]: slots
  const int32_t *ends, *writes;  // [num_writes]: tokens, and the slots of the states after them; slot 0 is the sink

  int64_t num_tokens() const { return cu_q_lens[num_seqs]; }
};

// The slots that receive the state after each token.
class StateWrites {
 public:
  void Build(const StateBatch& batch) {
    const int64_t tokens = batch.num_tokens();
    first_.assign(tokens, -1);
    next_.assign(batch.num_writes, -1);
    writes_ = batch.writes;
    for (int64_t i = 0; i < batch.num_writes; ++i) {
      if (batch.writes[i] <= 0 || batch.ends[i] >= tokens) continue;
      next_[i] = first_[batch.ends[i]];
      first_[batch.ends[i]] = static_cast<int32_t>(i);
    }
  }

  // Returns the first slot, or 0.
  int64_t First(int64_t token) const { return first_[token] < 0 ? 0 : writes_[first_[token]]; }

  template <typename Take>
  void ForEach(int64_t token, Take take) const {
    for (int32_t i = first_[token]; i >= 0; i = next_[i]) take(writes_[i]);
  }

 private:
  std::vector<int32_t> first_, next_;  // places in `writes`
  const int32_t* writes_ = nullptr;
};

// A sequence of a step, for code that goes through its tokens.
struct Sequence {
  int64_t begin, end;  // tokens
  int64_t read;        // the slot of its state; -1: begins with zeros

  Sequence(const StateBatch& batch, int64_t number)
      : begin(batch.cu_q_lens[number]),
        end(batch.cu_q_lens[number + 1]),
        read(begin < end && batch.positions[begin] > 0 ? batch.reads[number] : -1) {}
};

// The states of a convolution: [slots, taps - 1, channels], oldest input first.
template <typename T>
struct KeptInputs {
  T* states;
  int64_t taps, channels;

  T* At(int64_t slot, int64_t place) const { return states + (slot * (taps - 1) + place) * channels; }
};

// A convolution's inputs in some channels of one sequence, oldest first. The memory is [taps, size].
template <typename T>
class Window {
 public:
  Window(const KeptInputs<T>& kept, int64_t first_channel, int64_t size, T* memory)
      : kept_(kept), first_(first_channel), size_(size), rows_(memory) {}

  void Begin(int64_t slot) {
    for (int64_t place = 0; place + 1 < kept_.taps; ++place) {
      if (slot < 0) std::memset(rows_ + place * size_, 0, size_ * sizeof(T));
      else std::memcpy(rows_ + place * size_, kept_.At(slot, place) + first_, size_ * sizeof(T));
    }
  }

  T* newest() { return rows_ + (kept_.taps - 1) * size_; }

  // Convolves the newest input, summed oldest first. `put(channel, total, left)` gets kLanes at a time, of which `left`
  // are valid. `factors` are [taps, stride], beginning at the first of these channels.
  template <typename Put>
  void Convolve(const float* factors, int64_t stride, Put put) const {
    for (int64_t c = 0; c < size_; c += kLanes) {
      const int64_t left = size_ - c;
      Vector total = LoadUpTo(rows_ + c, left) * LoadUpTo(factors + c, left);
      for (int64_t tap = 1; tap < kept_.taps; ++tap)
        total += LoadUpTo(rows_ + tap * size_ + c, left) * LoadUpTo(factors + tap * stride + c, left);
      put(c, total, left);
    }
  }

  // Shifts the window for the next token.
  void Advance() { std::memmove(rows_, rows_ + size_, (kept_.taps - 1) * size_ * sizeof(T)); }

  // Stores the state; call it after `Advance`.
  void Keep(int64_t slot) const {
    for (int64_t place = 0; place + 1 < kept_.taps; ++place)
      std::memcpy(kept_.At(slot, place) + first_, rows_ + place * size_, size_ * sizeof(T));
  }

 private:
  KeptInputs<T> kept_;
  int64_t first_, size_;
  T* rows_;
};

}  // namespace penstock

#endif  // PENSTOCK_STATES_H_
