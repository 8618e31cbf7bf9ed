// Converts XLA's buffers for the kernels.

#ifndef PENSTOCK_BUFFERS_H_
#define PENSTOCK_BUFFERS_H_

#include <algorithm>

#include "attention_pages.h"
#include "binding.h"
#include "quantized.h"

namespace penstock {

// Calls `run` with a null pointer to the type of activations that `type` names.
template <typename Run>
xla::ffi::Error OfActivations(xla::ffi::DataType type, Run run) {
  switch (type) {
    case xla::ffi::F32: run(static_cast<float*>(nullptr)); break;
    case xla::ffi::BF16: run(static_cast<BFloat16*>(nullptr)); break;
    case xla::ffi::F16: run(static_cast<Float16*>(nullptr)); break;
    default: return xla::ffi::Error::InvalidArgument("activations are neither f32 nor bf16 nor f16");
  }
  return xla::ffi::Error::Success();
}

// Calls `run` with null pointers to the types of activations and of results, which is the same or f32.
template <typename Run>
xla::ffi::Error OfResults(xla::ffi::DataType type, xla::ffi::DataType result, Run run) {
  if (result != type && result != xla::ffi::F32)
    return xla::ffi::Error::InvalidArgument("a result is neither f32 nor of the type of what it is made of");
  return OfActivations(type, [&](auto* of) {
    if (result == xla::ffi::F32) run(of, static_cast<float*>(nullptr));
    else run(of, of);
  });
}

// Calls `run` with null pointers to the types of activations and of the elements of pages.
template <typename Run>
xla::ffi::Error OfPages(xla::ffi::DataType type, xla::ffi::DataType pages, Run run) {
  const xla::ffi::DataType plain = type == xla::ffi::F16 ? xla::ffi::F32 : type;
  if (pages != xla::ffi::S8 && pages != plain)
    return xla::ffi::Error::InvalidArgument("the cache holds neither int8 nor what these activations are held in");
  return OfActivations(type, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if (pages == xla::ffi::S8) run(of, static_cast<int8_t*>(nullptr));
    else run(of, static_cast<attention::PageOf<T>*>(nullptr));
  });
}

// Returns null for an empty buffer, which stands for something that a layer does not have.
inline const float* OrNull(const F32& buffer) { return buffer.element_count() ? buffer.typed_data() : nullptr; }

// Returns how many of `all` rows there are: the only number in `counts`, or all of them if it has none.
inline int64_t RowsOf(const S32& counts, int64_t all) {
  return counts.element_count() == 1 ? std::clamp<int64_t>(counts.typed_data()[0], 0, all) : all;
}

inline ScaleType ScaleTypeOf(const xla::ffi::AnyBuffer& scales) {
  if (scales.element_type() == xla::ffi::F32) return ScaleType::kFloat;
  return scales.element_type() == xla::ffi::BF16 ? ScaleType::kBFloat16 : ScaleType::kFloat16;
}

// Codes are u32 [..., panels, depth / features in a lane, kPanel], scales and offsets [..., panels, groups, kPanel].
inline QuantizedWeights QuantizedOf(const xla::ffi::AnyBuffer& codes, const xla::ffi::AnyBuffer& scales,
                                    const xla::ffi::AnyBuffer& offsets, int64_t depth, int64_t offset) {
  const auto dims = scales.dimensions();
  return {depth, depth / dims[dims.size() - 2], static_cast<const uint32_t*>(codes.untyped_data()),
          scales.untyped_data(), offsets.untyped_data(), ScaleTypeOf(scales), Offset{offset}};
}

}  // namespace penstock

#endif  // PENSTOCK_BUFFERS_H_
