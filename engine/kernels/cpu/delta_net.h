// The half of a layer that is a gated delta net, in place of attention.

#ifndef PENSTOCK_DELTA_NET_H_
#define PENSTOCK_DELTA_NET_H_

#include "delta_rule.h"
#include "linear.h"
#include "states.h"

namespace penstock {

// Key heads, each of which serves `copies` adjacent value heads.
struct DeltaShape {
  int64_t key_heads, copies, keys, values;  // the last two: features of a head

  int64_t value_heads() const { return key_heads * copies; }
  int64_t of_keys() const { return key_heads * keys; }  // features of all heads
  int64_t of_values() const { return value_heads() * values; }
};

struct DeltaParameters {
  const float *q_taps, *k_taps, *v_taps;  // [taps, features of all heads]
  const float* rates;                     // [value heads]: -exp(a_log)
  const float* dt_bias;                   // [value heads]
  Norm norm;                              // of a head's result
};

template <typename T>
struct DeltaNetHalf {
  DeltaShape shape;
  StateBatch batch;
  KeptInputs<T> q_kept, k_kept, v_kept;
  float* matrices;  // [slots, value heads, keys, values]
  DeltaParameters parameters;
  Linear<T> joined, joined_rates, out;  // columns: queries, keys, values, gates; and the inputs of beta and decay
  Residual<T> residual;

  void Run(Team& team) const {
    static thread_local Buffer normed, projected, rates_buffer, mixed, whole;
    static thread_local StateWrites kept_writes;
    StateWrites& writes = kept_writes;  // this thread's, shared by its team
    const int64_t rows = residual.rows, stride = joined.shape.columns, num_rates = joined_rates.shape.columns;
    const T* x = residual.Read(team, nullptr, normed);
    T* parts = projected.Of<T>(rows * stride);
    float* rates = rates_buffer.Of<float>(rows * num_rates);
    joined.Multiply(team, rows, x, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      StoreRow(width, values, parts + row * stride + column);
    });
    joined_rates.Multiply(team, rows, x, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      std::memcpy(rates + row * num_rates + column, values, width * sizeof(float));
    });
    writes.Build(batch);
    T* y = mixed.Of<T>(rows * shape.of_values());
    team.Run(batch.num_seqs * shape.key_heads, [&](int64_t i) {
      Heads(*this, Sequence(batch, i / shape.key_heads), i % shape.key_heads, {parts, rates, y}).Run(writes);
    });
    residual.Add(team, out, y, whole);
  }

 private:
  struct Rows {
    const T* parts;      // [tokens, columns]
    const float* rates;  // [tokens, 2 * value heads]
    T* y;                // [tokens, features of all value heads]
  };

  // Computes one key head of one sequence, and the value heads that it serves, token by token.
  struct Heads {
    const DeltaNetHalf& half;
    const Sequence sequence;
    const int64_t key_head, copies, keys, values;
    const Rows rows;
    float *q, *k, *v, *result;  // of a token; values of all copies, in separate places
    float* kept;                // matrices of all copies, after a token whose state no slot gets
    float* zeros;               // a matrix
    Window<T> q_window, k_window, v_window;

    Heads(const DeltaNetHalf& half, const Sequence& sequence, int64_t key_head, const Rows& rows)
        : half(half),
          sequence(sequence),
          key_head(key_head),
          copies(half.shape.copies),
          keys(half.shape.keys),
          values(half.shape.values),
          rows(rows),
          q(Memory(half.shape)),
          k(q + keys),
          v(k + keys),
          result(v + copies * values),
          kept(result + values),
          zeros(kept + copies * keys * values),
          q_window(half.q_kept, key_head * keys, keys, Inputs(half)),
          k_window(half.k_kept, key_head * keys, keys, Inputs(half) + half.q_kept.taps * keys),
          v_window(half.v_kept, key_head * copies * values, copies * values, Inputs(half) + 2 * half.q_kept.taps * keys) {}

    void Run(const StateWrites& writes) {
      q_window.Begin(sequence.read), k_window.Begin(sequence.read), v_window.Begin(sequence.read);
      const float* from = sequence.read < 0 ? nullptr : Matrix(sequence.read);
      for (int64_t token = sequence.begin; token < sequence.end; ++token) {
        Convolve(token);
        const int64_t slot = writes.First(token);
        float* to = slot > 0 ? Matrix(slot) : kept;
        Step(token, from, to);
        writes.ForEach(token, [&](int64_t other) { Keep(other, to); });
        from = to;
      }
    }

   private:
    static float* Memory(const DeltaShape& shape) {
      static thread_local Buffer memory;
      const int64_t matrix = shape.keys * shape.values;
      return memory.Of<float>(2 * shape.keys + (shape.copies + 1) * (shape.values + matrix));
    }
    static T* Inputs(const DeltaNetHalf& half) {
      static thread_local Buffer memory;
      return memory.Of<T>(half.q_kept.taps * (2 * half.shape.keys + half.shape.copies * half.shape.values));
    }
    float* Matrix(int64_t slot) const {
      return half.matrices + (slot * half.shape.key_heads + key_head) * copies * keys * values;
    }

    void Convolve(int64_t token) {
      const T* part = rows.parts + token * half.joined.shape.columns;
      const int64_t of_keys = half.shape.of_keys(), of_values = half.shape.of_values();
      const int64_t key = key_head * keys, value = key_head * copies * values;
      Activated(q_window, part + key, half.parameters.q_taps + key, of_keys, keys, q);
      Activated(k_window, part + of_keys + key, half.parameters.k_taps + key, of_keys, keys, k);
      Activated(v_window, part + 2 * of_keys + value, half.parameters.v_taps + value, of_values, copies * values, v);
      Scale(q, Inverse(q) / std::sqrt(static_cast<float>(keys)));
      Scale(k, Inverse(k));
    }

    // Computes silu(convolution) over a window that takes in a token's inputs.
    static void Activated(Window<T>& window, const T* inputs, const float* taps, int64_t stride, int64_t size,
                          float* to) {
      std::memcpy(window.newest(), inputs, size * sizeof(T));
      window.Convolve(taps, stride, [&](int64_t c, Vector total, int64_t left) { StoreUpTo(to + c, Silu(total), left); });
      window.Advance();
    }

    __attribute__((noinline)) float Sum(const float* x, const float* y) const {
      float sum = 0.0f;
      for (int64_t i = 0; i < keys; ++i) sum += x[i] * y[i];
      return sum;
    }
    float Inverse(const float* x) const { return 1.0f / std::sqrt(Sum(x, x) + 1e-6f); }
    void Scale(float* x, float factor) const {
      for (int64_t i = 0; i < keys; ++i) x[i] *= factor;
    }

    // A null `from` means zeros.
    void Step(int64_t token, const float* from, float* to) {
      const DeltaParameters& parameters = half.parameters;
      const int64_t heads = half.shape.value_heads(), matrix = keys * values;
      const float* rates = rows.rates + token * 2 * heads;
      const T* gates = rows.parts + token * half.joined.shape.columns + 2 * half.shape.of_keys() + half.shape.of_values();
      const float qk = Sum(q, k);
      if (from == nullptr) std::memset(zeros, 0, matrix * sizeof(float));
      for (int64_t copy = 0; copy < copies; ++copy) {
        const int64_t head = key_head * copies + copy;
        const float beta = 1.0f / (1.0f + std::exp(-rates[head]));
        const float x = rates[heads + head] + parameters.dt_bias[head];
        const float softplus = std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x)));
        const DeltaToken own{q, k, v + copy * values, beta, std::exp(parameters.rates[head] * softplus), qk};
        const float* before = from == nullptr ? zeros : from + copy * matrix;
        DeltaRule(own, keys, values, before, to + copy * matrix, result);
        Gate(gates + head * values, rows.y + token * half.shape.of_values() + head * values);
      }
    }

    // norm(result) * silu(gate)
    void Gate(const T* gates, T* y) {
      NormRow(half.parameters.norm, values, result, result);
      for (int64_t i = 0; i < values; i += kLanes)
        StoreUpTo(y + i, LoadUpTo(result + i, values - i) * Silu(LoadUpTo(gates + i, values - i)), values - i);
    }

    void Keep(int64_t slot, const float* matrix) {
      q_window.Keep(slot), k_window.Keep(slot), v_window.Keep(slot);
      float* own = Matrix(slot);
      if (own != matrix) std::memcpy(own, matrix, copies * keys * values * sizeof(float));
    }
  };
};

}  // namespace penstock

#endif  // PENSTOCK_DELTA_NET_H_
