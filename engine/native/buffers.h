// XLA's buffers as the kernels take them.

#ifndef PENSTOCK_BUFFERS_H_
#define PENSTOCK_BUFFERS_H_

#include "quantized.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {

using F32 = xla::ffi::Buffer<xla::ffi::F32>;
using S32 = xla::ffi::Buffer<xla::ffi::S32>;

// What a layer does not have comes as an empty buffer.
inline const float* OrNull(const F32& buffer) { return buffer.element_count() ? buffer.typed_data() : nullptr; }

inline ScaleType ScaleTypeOf(const xla::ffi::AnyBuffer& scales) {
  if (scales.element_type() == xla::ffi::F32) return ScaleType::kFloat;
  return scales.element_type() == xla::ffi::BF16 ? ScaleType::kBFloat16 : ScaleType::kHalf;
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
