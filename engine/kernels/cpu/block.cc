// The halves of decoder layers for CPUs: attention or the recurrence in its place, and the feed-forward, with the norms
// and residual connections around them. One call from XLA gets as many consecutive halves as possible: all but the last
// of a whole model.
//
// A step of few rows is as fast as weights come from memory, if no thread waits. The work between two matmuls takes
// microseconds, XLA takes as long to get from one operation to the next, and a thread of its pool starts a tenth of a
// millisecond after it is called. So a call goes from phase to phase with the same team of threads, on the real tokens
// instead of a padded number.
//
// Activations between the phases are f32, except for the inputs of matmuls and attention, which have the model's type.

#include "attention_half.h"
#include "delta_net.h"
#include "linear.h"
#include "short_conv.h"

namespace ffi = xla::ffi;

namespace penstock {
namespace {

// The parameters of a half besides its arrays, in the order of Python's `_Numbers` in packed_block.py.
struct Integers {
  int64_t kind;  // an index of kRuns
  int64_t is_layer_norm;
  int64_t columns, gate;  // of the first matmul
  int64_t first_offset, first_reads_bytes, last_offset, last_reads_bytes;
  int64_t rates_offset, rates_reads_bytes;  // for a delta net
  int64_t num_heads, head_dim, is_qk_layer_norm, is_interleaved, window, has_gate;  // of attention
};
struct Floats {
  float eps, residual_scale;
  float head_eps;         // of the norms of heads
  float scale, soft_cap;  // of attention
};

// The arrays of a call, in order.
class Arrays {
 public:
  Arrays(const ffi::RemainingArgs& given, const ffi::RemainingRets& results) : given_(given), results_(results) {}

  ffi::AnyBuffer Next() { return *given_.get<ffi::AnyBuffer>(num_given_++); }
  const int32_t* OfIntegers() { return static_cast<const int32_t*>(Next().untyped_data()); }
  F32 OfFloats() { return *given_.get<F32>(num_given_++); }
  const float* FloatsOrNull() { return OrNull(OfFloats()); }
  Norm NextNorm(float eps, bool is_layer) { return {FloatsOrNull(), eps, is_layer}; }
  StateBatch NextStates() {
    const int32_t *cu_q_lens = OfIntegers(), *num_seqs = OfIntegers(), *positions = OfIntegers();
    const int32_t *reads = OfIntegers(), *ends = OfIntegers();
    const ffi::AnyBuffer writes = Next();
    return {*num_seqs, static_cast<int64_t>(writes.element_count()), cu_q_lens, positions, reads, ends,
            static_cast<const int32_t*>(writes.untyped_data())};
  }
  LinearBuffers NextLinear(int64_t offset, bool reads_bytes) {
    const ffi::AnyBuffer weights = Next(), scales = Next(), offsets = Next();
    return {weights, scales, offsets, OfFloats(), offset, reads_bytes};
  }
  // Returns an array that is updated in place: it must be the next result too.
  ffi::AnyBuffer NextChanged() {
    const ffi::AnyBuffer array = Next();
    if (array.element_count() == 0) return array;  // this cache does not have the part
    is_in_place_ &= array.untyped_data() == (*results_.get<ffi::AnyBuffer>(num_results_++))->untyped_data();
    return array;
  }
  bool is_in_place() const { return is_in_place_; }

 private:
  const ffi::RemainingArgs& given_;
  const ffi::RemainingRets& results_;
  size_t num_given_ = 0, num_results_ = 0;
  bool is_in_place_ = true;
};

// The residual stream, and the team that works on it.
struct Stream {
  Team& team;
  ffi::AnyBuffer x;
  int64_t hidden() const { return x.dimensions()[1]; }
};

ffi::Error RunAttention(const Stream& stream, const Integers& ints, const Floats& floats, Arrays& arrays) {
  const ffi::AnyBuffer keys = arrays.NextChanged(), values = arrays.NextChanged();
  const ffi::AnyBuffer key_scales = arrays.NextChanged(), value_scales = arrays.NextChanged();
  const int32_t *slots = arrays.OfIntegers(), *kv_lens = arrays.OfIntegers();
  const ffi::AnyBuffer page_indices = arrays.Next();
  const int32_t *cu_q_lens = arrays.OfIntegers(), *num_seqs = arrays.OfIntegers();
  const Norm before = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const Norm after = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const LinearBuffers qkv = arrays.NextLinear(ints.first_offset, ints.first_reads_bytes);
  const LinearBuffers out = arrays.NextLinear(ints.last_offset, ints.last_reads_bytes);
  const F32 q_norm = arrays.OfFloats(), k_norm = arrays.OfFloats(), cos = arrays.OfFloats(), sin = arrays.OfFloats();
  const F32 query_scales = arrays.OfFloats(), sinks = arrays.OfFloats();
  if (!arrays.is_in_place()) return ffi::Error::Internal("the KV cache was copied: it must be donated");
  const auto key_dims = keys.dimensions();
  const attention::Shape shape{ints.num_heads, key_dims[1], ints.head_dim, key_dims[3], page_indices.dimensions()[1]};
  const attention::Batch batch{*num_seqs, slots, kv_lens, static_cast<const int32_t*>(page_indices.untyped_data()),
                               cu_q_lens};
  const bool is_layer = ints.is_qk_layer_norm;
  const Heads heads{{OrNull(q_norm), floats.head_eps, is_layer},
                    {OrNull(k_norm), floats.head_eps, is_layer},
                    static_cast<int64_t>(q_norm.element_count()),
                    static_cast<int64_t>(k_norm.element_count()),
                    OrNull(cos),
                    OrNull(sin),
                    cos.dimensions().back(),
                    ints.is_interleaved != 0,
                    OrNull(query_scales),
                    ints.has_gate != 0};
  return OfPages(stream.x.element_type(), keys.element_type(), [&](auto* of_x, auto* of_cache) {
    using T = std::remove_pointer_t<decltype(of_x)>;
    using C = std::remove_pointer_t<decltype(of_cache)>;
    AttentionHalf<T, C>{
        shape,
        batch,
        {floats.scale, ints.window, floats.soft_cap, OrNull(sinks)},
        {static_cast<C*>(keys.untyped_data()), static_cast<C*>(values.untyped_data()),
         static_cast<float*>(key_scales.untyped_data()), static_cast<float*>(value_scales.untyped_data())},
        heads,
        {qkv, stream.hidden(), ints.columns, Gate::kNone},
        {out, ints.num_heads * ints.head_dim, stream.hidden(), Gate::kNone},
        {static_cast<T*>(stream.x.untyped_data()), batch.num_tokens(), stream.hidden(), floats.residual_scale, before,
         after},
    }.Run(stream.team);
  });
}

// For arrays [slots, taps - 1, ...].
template <typename T>
KeptInputs<T> KeptIn(const ffi::AnyBuffer& states) {
  const auto dims = states.dimensions();
  const int64_t kept = dims[1], channels = states.element_count() / (dims[0] * kept);
  return {static_cast<T*>(states.untyped_data()), kept + 1, channels};
}

ffi::Error RunShortConv(const Stream& stream, const Integers& ints, const Floats& floats, Arrays& arrays) {
  const ffi::AnyBuffer kept = arrays.NextChanged();
  const StateBatch batch = arrays.NextStates();
  const Norm before = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const Norm after = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const LinearBuffers joined = arrays.NextLinear(ints.first_offset, ints.first_reads_bytes);
  const LinearBuffers out = arrays.NextLinear(ints.last_offset, ints.last_reads_bytes);
  const float *taps = arrays.FloatsOrNull(), *bias = arrays.FloatsOrNull();
  if (!arrays.is_in_place()) return ffi::Error::Internal("states were copied: they must be donated");
  if (kept.element_type() != stream.x.element_type()) return ffi::Error::InvalidArgument("states of another type");
  return OfActivations(stream.x.element_type(), [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const KeptInputs<T> inputs = KeptIn<T>(kept);
    ShortConvHalf<T>{
        batch,
        inputs,
        taps,
        bias,
        {joined, stream.hidden(), ints.columns, Gate::kNone},
        {out, inputs.channels, stream.hidden(), Gate::kNone},
        {static_cast<T*>(stream.x.untyped_data()), batch.num_tokens(), stream.hidden(), floats.residual_scale, before,
         after},
    }.Run(stream.team);
  });
}

ffi::Error RunDeltaNet(const Stream& stream, const Integers& ints, const Floats& floats, Arrays& arrays) {
  const ffi::AnyBuffer q_kept = arrays.NextChanged(), k_kept = arrays.NextChanged(), v_kept = arrays.NextChanged();
  const ffi::AnyBuffer matrices = arrays.NextChanged();
  const StateBatch batch = arrays.NextStates();
  const Norm before = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const Norm after = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const LinearBuffers joined = arrays.NextLinear(ints.first_offset, ints.first_reads_bytes);
  const LinearBuffers rates = arrays.NextLinear(ints.rates_offset, ints.rates_reads_bytes);
  const LinearBuffers out = arrays.NextLinear(ints.last_offset, ints.last_reads_bytes);
  const float *q_taps = arrays.FloatsOrNull(), *k_taps = arrays.FloatsOrNull(), *v_taps = arrays.FloatsOrNull();
  const float *exponents = arrays.FloatsOrNull(), *dt_bias = arrays.FloatsOrNull();
  const Norm norm = arrays.NextNorm(floats.head_eps, false);
  if (!arrays.is_in_place()) return ffi::Error::Internal("states were copied: they must be donated");
  if (matrices.element_type() != ffi::F32 || q_kept.element_type() != stream.x.element_type())
    return ffi::Error::InvalidArgument("states of another type");
  const auto keys = q_kept.dimensions(), dims = matrices.dimensions();
  const DeltaShape shape{keys[2], dims[1] / keys[2], dims[2], dims[3]};
  return OfActivations(stream.x.element_type(), [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    DeltaNetHalf<T>{
        shape,
        batch,
        KeptIn<T>(q_kept),
        KeptIn<T>(k_kept),
        KeptIn<T>(v_kept),
        static_cast<float*>(matrices.untyped_data()),
        {q_taps, k_taps, v_taps, exponents, dt_bias, norm},
        {joined, stream.hidden(), ints.columns, Gate::kNone},
        {rates, stream.hidden(), 2 * shape.value_heads(), Gate::kNone},
        {out, shape.of_values(), stream.hidden(), Gate::kNone},
        {static_cast<T*>(stream.x.untyped_data()), batch.num_tokens(), stream.hidden(), floats.residual_scale, before,
         after},
    }.Run(stream.team);
  });
}

ffi::Error RunFeedForward(const Stream& stream, const Integers& ints, const Floats& floats, Arrays& arrays) {
  const ffi::AnyBuffer source = arrays.Next();  // its input if that is not x; or empty
  const int64_t rows = *arrays.OfIntegers();
  const Norm before = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const Norm after = arrays.NextNorm(floats.eps, ints.is_layer_norm);
  const LinearBuffers gate_up = arrays.NextLinear(ints.first_offset, ints.first_reads_bytes);
  const LinearBuffers down = arrays.NextLinear(ints.last_offset, ints.last_reads_bytes);
  return OfActivations(stream.x.element_type(), [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    static thread_local Buffer normed, activated, whole;
    const Residual<T> residual{static_cast<T*>(stream.x.untyped_data()), rows, stream.hidden(), floats.residual_scale,
                               before, after};
    const Linear<T> first(gate_up, stream.hidden(), ints.columns, Gate{ints.gate});
    const Linear<T> last(down, ints.columns, stream.hidden(), Gate::kNone);
    const T* read = source.element_count() ? static_cast<const T*>(source.untyped_data()) : nullptr;
    const T* input = residual.Read(stream.team, read, normed);
    T* inner = activated.Of<T>(rows * ints.columns);
    first.Multiply(stream.team, rows, input, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      StoreRow(width, values, inner + row * ints.columns + column);
    });
    residual.Add(stream.team, last, inner, whole);
  });
}

constexpr decltype(&RunAttention) kRuns[] = {RunFeedForward, RunAttention, RunShortConv, RunDeltaNet};

ffi::Error RunHalves(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::RemainingRets results,
                     ffi::Span<const int64_t> integers, ffi::Span<const float> floats) {
  constexpr size_t kIntegers = sizeof(Integers) / sizeof(int64_t), kFloats = sizeof(Floats) / sizeof(float);
  Arrays arrays(given, results);
  const ffi::AnyBuffer x = arrays.NextChanged();
  if (!arrays.is_in_place()) return ffi::Error::Internal("the residual stream was copied");
  Team team(pool);
  const Stream stream{team, x};
  for (size_t half = 0; half < integers.size() / kIntegers; ++half) {
    Integers own_integers;
    Floats own_floats;
    std::memcpy(&own_integers, integers.begin() + half * kIntegers, sizeof own_integers);
    std::memcpy(&own_floats, floats.begin() + half * kFloats, sizeof own_floats);
    const auto run = kRuns[own_integers.kind];
    if (ffi::Error error = run(stream, own_integers, own_floats, arrays); error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockHalves, penstock::RunHalves,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("integers")
                                  .Attr<ffi::Span<const float>>("floats"));
