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

#define FIELD(type, name) type name;
struct HalfIntegers {
  PENSTOCK_HALF_INTEGERS(FIELD)
};
struct HalfFloats {
  PENSTOCK_HALF_FLOATS(FIELD)
};
#undef FIELD

// The arrays of a call, in order.
class Arrays {
 public:
  Arrays(const ffi::RemainingArgs& given, const ffi::RemainingRets& results) : given_(given), results_(results) {}

  template <typename Array>
  Array Next() {
    return *given_.get<Array>(num_given_++);
  }
  // Returns an array that is updated in place: it must be the next result too.
  template <typename Array>
  Array NextUpdated() {
    const Array array = Next<Array>();
    if (array.element_count() == 0) return array;  // this cache does not have the part
    is_in_place_ &= array.untyped_data() == (*results_.get<AnyBuffer>(num_results_++))->untyped_data();
    return array;
  }
  bool is_in_place() const { return is_in_place_; }

 private:
  const ffi::RemainingArgs& given_;
  const ffi::RemainingRets& results_;
  size_t num_given_ = 0, num_results_ = 0;
  bool is_in_place_ = true;
};

// The arrays of each table, taken one after the other.
#define OPERAND(type, name) const type name = arrays.Next<type>();
#define CACHE(type, name) const type name = arrays.NextUpdated<type>();
#define GROUP(type, name) const type##Arrays name{arrays};
#define ARRAYS(name, ...)                  \
  struct name##Arrays {                    \
    Arrays& arrays;                        \
    PENSTOCK_TABLE_##name(__VA_ARGS__)     \
  };
#define HALF(name) ARRAYS(name, OPERAND, CACHE, GROUP)
ARRAYS(Linear, OPERAND)
ARRAYS(States, OPERAND)
PENSTOCK_HALVES(HALF)
#undef HALF
#undef ARRAYS
#undef GROUP
#undef CACHE
#undef OPERAND

LinearBuffers BuffersOf(const LinearArrays& linear, int64_t offset, bool reads_bytes) {
  return {linear.weights, linear.scales, linear.offsets, linear.bias, offset, reads_bytes};
}

StateBatch BatchOf(const StatesArrays& states) {
  return {*states.num_seqs.typed_data(), static_cast<int64_t>(states.writes.element_count()),
          states.cu_q_lens.typed_data(), states.positions.typed_data(), states.reads.typed_data(),
          states.ends.typed_data(), states.writes.typed_data()};
}

Norm NormOf(const F32& factors, float eps, bool is_layer) { return {OrNull(factors), eps, is_layer}; }

// The residual stream, and the team that works on it.
struct Stream {
  Team& team;
  AnyBuffer x;
  int64_t hidden() const { return x.dimensions()[1]; }
};

template <typename T, typename Given>
Residual<T> ResidualOf(const Stream& stream, int64_t rows, const HalfIntegers& ints, const HalfFloats& floats,
                       const Given& given) {
  const bool is_layer = ints.is_layer_norm;
  return {static_cast<T*>(stream.x.untyped_data()), rows, stream.hidden(), floats.residual_scale,
          NormOf(given.norm_before, floats.eps, is_layer), NormOf(given.norm_after, floats.eps, is_layer)};
}

ffi::Error RunAttention(const Stream& stream, const HalfIntegers& ints, const HalfFloats& floats, Arrays& arrays) {
  const AttentionArrays given{arrays};
  if (!arrays.is_in_place()) return ffi::Error::Internal("the KV cache was copied: it must be donated");
  const auto key_dims = given.keys.dimensions();
  const attention::Shape shape{ints.num_heads, key_dims[1], ints.head_dim, key_dims[3],
                               given.page_indices.dimensions()[1]};
  const attention::Batch batch{*given.num_seqs.typed_data(), given.slots.typed_data(), given.kv_lens.typed_data(),
                               given.page_indices.typed_data(), given.cu_q_lens.typed_data()};
  const Heads heads{NormOf(given.q_norm, floats.head_eps, ints.is_qk_layer_norm),
                    NormOf(given.k_norm, floats.head_eps, ints.is_qk_layer_norm),
                    static_cast<int64_t>(given.q_norm.element_count()),
                    static_cast<int64_t>(given.k_norm.element_count()),
                    OrNull(given.cos),
                    OrNull(given.sin),
                    given.cos.dimensions().back(),
                    ints.is_interleaved != 0,
                    OrNull(given.query_scales),
                    ints.has_gate != 0};
  return OfPages(stream.x.element_type(), given.keys.element_type(), [&](auto* of_x, auto* of_cache) {
    using T = std::remove_pointer_t<decltype(of_x)>;
    using C = std::remove_pointer_t<decltype(of_cache)>;
    AttentionHalf<T, C>{
        shape,
        batch,
        {floats.scale, ints.window, floats.soft_cap, OrNull(given.sinks)},
        {static_cast<C*>(given.keys.untyped_data()), static_cast<C*>(given.values.untyped_data()),
         given.key_scales.typed_data(), given.value_scales.typed_data()},
        heads,
        {BuffersOf(given.qkv, ints.first_offset, ints.first_reads_bytes), stream.hidden(), ints.columns, Gate::kNone},
        {BuffersOf(given.out, ints.last_offset, ints.last_reads_bytes), ints.num_heads * ints.head_dim,
         stream.hidden(), Gate::kNone},
        ResidualOf<T>(stream, batch.num_tokens(), ints, floats, given),
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

ffi::Error RunShortConv(const Stream& stream, const HalfIntegers& ints, const HalfFloats& floats, Arrays& arrays) {
  const ShortConvArrays given{arrays};
  if (!arrays.is_in_place()) return ffi::Error::Internal("states were copied: they must be donated");
  if (given.kept.element_type() != stream.x.element_type())
    return ffi::Error::InvalidArgument("states of another type");
  const StateBatch batch = BatchOf(given.states);
  return OfActivations(stream.x.element_type(), [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const KeptInputs<T> inputs = KeptIn<T>(given.kept);
    ShortConvHalf<T>{
        batch,
        inputs,
        OrNull(given.taps),
        OrNull(given.taps_bias),
        {BuffersOf(given.joined, ints.first_offset, ints.first_reads_bytes), stream.hidden(), ints.columns,
         Gate::kNone},
        {BuffersOf(given.out, ints.last_offset, ints.last_reads_bytes), inputs.channels, stream.hidden(), Gate::kNone},
        ResidualOf<T>(stream, batch.num_tokens(), ints, floats, given),
    }.Run(stream.team);
  });
}

ffi::Error RunDeltaNet(const Stream& stream, const HalfIntegers& ints, const HalfFloats& floats, Arrays& arrays) {
  const DeltaNetArrays given{arrays};
  if (!arrays.is_in_place()) return ffi::Error::Internal("states were copied: they must be donated");
  if (given.q_kept.element_type() != stream.x.element_type())
    return ffi::Error::InvalidArgument("states of another type");
  const StateBatch batch = BatchOf(given.states);
  const auto keys = given.q_kept.dimensions(), dims = given.matrices.dimensions();
  const DeltaShape shape{keys[2], dims[1] / keys[2], dims[2], dims[3]};
  return OfActivations(stream.x.element_type(), [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    DeltaNetHalf<T>{
        shape,
        batch,
        KeptIn<T>(given.q_kept),
        KeptIn<T>(given.k_kept),
        KeptIn<T>(given.v_kept),
        given.matrices.typed_data(),
        {OrNull(given.q_taps), OrNull(given.k_taps), OrNull(given.v_taps), OrNull(given.exponents),
         OrNull(given.dt_bias), NormOf(given.norm, floats.head_eps, false)},
        {BuffersOf(given.joined, ints.first_offset, ints.first_reads_bytes), stream.hidden(), ints.columns,
         Gate::kNone},
        {BuffersOf(given.rates, ints.rates_offset, ints.rates_reads_bytes), stream.hidden(), 2 * shape.value_heads(),
         Gate::kNone},
        {BuffersOf(given.out, ints.last_offset, ints.last_reads_bytes), shape.of_values(), stream.hidden(),
         Gate::kNone},
        ResidualOf<T>(stream, batch.num_tokens(), ints, floats, given),
    }.Run(stream.team);
  });
}

ffi::Error RunFeedForward(const Stream& stream, const HalfIntegers& ints, const HalfFloats& floats, Arrays& arrays) {
  const FeedForwardArrays given{arrays};
  const int64_t rows = *given.num_rows.typed_data();
  return OfActivations(stream.x.element_type(), [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    static thread_local Buffer normed, activated, whole;
    const Residual<T> residual = ResidualOf<T>(stream, rows, ints, floats, given);
    const Linear<T> first(BuffersOf(given.gate_up, ints.first_offset, ints.first_reads_bytes), stream.hidden(),
                          ints.columns, Gate{ints.gate});
    const Linear<T> last(BuffersOf(given.down, ints.last_offset, ints.last_reads_bytes), ints.columns,
                         stream.hidden(), Gate::kNone);
    const T* read = given.source.element_count() ? static_cast<const T*>(given.source.untyped_data()) : nullptr;
    const T* input = residual.Read(stream.team, read, normed);
    T* inner = activated.Of<T>(rows * ints.columns);
    first.Multiply(stream.team, rows, input, [&](int64_t row, int64_t column, const float* values, int64_t width) {
      StoreRow(width, values, inner + row * ints.columns + column);
    });
    residual.Add(stream.team, last, inner, whole);
  });
}

#define RUN(name) Run##name,
constexpr decltype(&RunAttention) kRuns[] = {PENSTOCK_HALVES(RUN)};
#undef RUN

ffi::Error Halves(PENSTOCK_PARAMETERS(Halves), ffi::RemainingArgs given, ffi::RemainingRets results) {
  constexpr size_t kIntegers = sizeof(HalfIntegers) / sizeof(int64_t), kFloats = sizeof(HalfFloats) / sizeof(float);
  if (x.untyped_data() != new_x->untyped_data()) return ffi::Error::Internal("the residual stream was copied");
  Arrays arrays(given, results);
  Team team(pool);
  const Stream stream{team, x};
  for (size_t half = 0; half < integers.size() / kIntegers; ++half) {
    HalfIntegers own_integers;
    HalfFloats own_floats;
    std::memcpy(&own_integers, integers.begin() + half * kIntegers, sizeof own_integers);
    std::memcpy(&own_floats, floats.begin() + half * kFloats, sizeof own_floats);
    const auto run = kRuns[own_integers.kind];
    if (ffi::Error error = run(stream, own_integers, own_floats, arrays); error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PenstockHalves, Halves, PENSTOCK_BINDING(Halves).RemainingArgs().RemainingRets());

}  // namespace penstock
