// Kernels as XLA calls them: their parameters and bindings, from the tables of layout.h.

#ifndef PENSTOCK_BINDING_H_
#define PENSTOCK_BINDING_H_

#include "layout.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {

using AnyBuffer = xla::ffi::AnyBuffer;
using F32 = xla::ffi::Buffer<xla::ffi::F32>;
using S32 = xla::ffi::Buffer<xla::ffi::S32>;
using U8 = xla::ffi::Buffer<xla::ffi::U8>;
using Pred = xla::ffi::Buffer<xla::ffi::PRED>;
using Integers = xla::ffi::Span<const int64_t>;
using Floats = xla::ffi::Span<const float>;

}  // namespace penstock

// The parameters of the function `name`: the pool of threads, and the rows of its table. An operand that is updated in
// place is a result too, called `new_*`.
#define PENSTOCK_PARAMETERS(name)                                                               \
  xla::ffi::ThreadPool pool PENSTOCK_TABLE_##name(PENSTOCK_OPERAND_PARAMETER, PENSTOCK_RESULT_PARAMETER, \
                                                  PENSTOCK_UPDATE_PARAMETER, PENSTOCK_OPERAND_PARAMETER)
#define PENSTOCK_OPERAND_PARAMETER(type, name) , type name
#define PENSTOCK_RESULT_PARAMETER(type, name) , xla::ffi::Result<type> name
#define PENSTOCK_UPDATE_PARAMETER(type, name) , xla::ffi::Result<type> new_##name

#define PENSTOCK_BINDING(name)                                                              \
  xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>() PENSTOCK_TABLE_##name(PENSTOCK_BIND_OPERAND, PENSTOCK_BIND_RESULT, \
                                                                          PENSTOCK_BIND_RESULT, PENSTOCK_BIND_ATTRIBUTE)
#define PENSTOCK_BIND_OPERAND(type, name) .Arg<type>()
#define PENSTOCK_BIND_RESULT(type, name) .Ret<type>()
#define PENSTOCK_BIND_ATTRIBUTE(type, name) .Attr<type>(#name)

// Exports the function `name` to XLA. To be used in the function's namespace.
#define PENSTOCK_DEFINE_KERNEL(name) XLA_FFI_DEFINE_HANDLER_SYMBOL(Penstock##name, name, PENSTOCK_BINDING(name))

#endif  // PENSTOCK_BINDING_H_
