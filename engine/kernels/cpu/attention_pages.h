// The layout of keys and values in the pages of a layer, by type, and how a token's are written.
//
// For a head, keys are [head_dim / n, page_size] 32-bit words and values [page_size / n, head_dim], with n elements in
// each word: neighbours in head_dim, and neighbouring tokens. n is 1 for f32, 2 for bf16 and 4 for int8, and sizes that
// it does not divide are padded. A model in f16 has its pages in f32, which needs no instruction to widen it. An int8
// page also has the scales of each token's keys and values, f32 [page_size] per head (docs/kv-cache.md).

#ifndef PENSTOCK_ATTENTION_PAGES_H_
#define PENSTOCK_ATTENTION_PAGES_H_

#include <type_traits>

#include "kernels.h"

namespace penstock {
namespace attention {

constexpr int64_t kKeysPerStride = 256;  // about: at least one page
constexpr int64_t kKeysPerPart = 1024;   // about: whole strides
constexpr int64_t kEven = 16;            // elements of the widest vectors

inline int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDivide(a, b) * b; }

// The shape of a layer and its cache.
struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size, pages_per_seq;
  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t keys_per_stride() const { return std::max<int64_t>(1, kKeysPerStride / page_size) * page_size; }
  int64_t keys_per_part() const {
    return std::max<int64_t>(1, kKeysPerPart / keys_per_stride()) * keys_per_stride();
  }
  bool is_even() const { return page_size % kEven == 0 && head_dim % kEven == 0; }
  int64_t width() const { return RoundUp(head_dim, kEven); }  // of values
};

// The pages of one layer, with elements of type C: float, BFloat16 or int8_t. Only int8 has scales.
template <typename C>
struct Cache {
  C* keys;
  C* values;
  float* key_scales = nullptr;    // [num_pages, num_kv_heads, page_size]
  float* value_scales = nullptr;  // [num_pages, num_kv_heads, page_size]
};

// Offsets in the pages, in elements.
template <typename C>
struct Layout {
  static constexpr int64_t kPack = 4 / sizeof(C);  // elements in a word

  explicit Layout(const Shape& shape)
      : heads(shape.num_kv_heads), head_dim(shape.head_dim), page_size(shape.page_size),
        key_words(CeilDivide(head_dim, kPack) * page_size), value_words(CeilDivide(page_size, kPack) * head_dim) {}

  int64_t Key(int64_t page, int64_t head) const { return (page * heads + head) * key_words * kPack; }
  int64_t Value(int64_t page, int64_t head) const { return (page * heads + head) * value_words * kPack; }
  int64_t Scale(int64_t page, int64_t head) const { return (page * heads + head) * page_size; }

  // Offsets within a head's page.
  int64_t KeyAt(int64_t place, int64_t d) const { return (d / kPack * page_size + place) * kPack + d % kPack; }
  int64_t ValueAt(int64_t place, int64_t d) const { return (place / kPack * head_dim + d) * kPack + place % kPack; }

  int64_t heads, head_dim, page_size;
  int64_t key_words, value_words;  // in a head's page
};

// The type of pages, unless they are int8, for activations of type T.
template <typename T>
using PageOf = std::conditional_t<std::is_same_v<T, Float16>, float, T>;

template <typename T>
inline bool IsFinite(T value) {
  uint32_t bits;
  const float wide = Load(value);
  std::memcpy(&bits, &wide, sizeof bits);
  return (bits & 0x7f800000u) != 0x7f800000u;
}

// A NaN among the values would survive a weight of 0 when another sequence gets the page.
template <typename T>
inline float Sound(T value) {
  return IsFinite(value) ? Load(value) : 0.0f;
}

// The scale of a token's int8 codes: its largest element becomes 127 or -127. A NaN makes the scale NaN. It is a
// product, because compilers may or may not turn a division by a constant into one.
template <typename T>
inline float ScaleOf(const T* x, int64_t count, bool is_value) {
  float top = 0.0f, spoiled = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::fabs(is_value ? Sound(x[i]) : Load(x[i]));
    top = std::max(top, size);
    spoiled += size * 0.0f;  // a NaN if there is one
  }
  return (top + spoiled) * (1.0f / 127.0f);
}

// Returns 0, which makes codes 0, for a scale without a finite inverse.
inline float InverseOf(float scale) { return scale > 1e-30f && IsFinite(scale) ? 1.0f / scale : 0.0f; }

// Stores an element in the type of pages.
inline void Hold(float* to, float x, float) { *to = x; }
inline void Hold(BFloat16* to, float x, float) { Store(to, x); }
inline void Hold(int8_t* to, float x, float inverse) {
  *to = static_cast<int8_t>(inverse > 0.0f ? static_cast<int32_t>(std::rint(x * inverse)) : 0);
}

constexpr int64_t kElementsAtOnce = 64;

template <typename T, typename C>
inline void WriteKey(const Layout<C>& layout, int64_t place, const T* k, float inverse, C* page) {
  constexpr int64_t kPack = Layout<C>::kPack;
  for (int64_t d = 0; d < layout.head_dim; d += kElementsAtOnce) {
    const int64_t count = std::min(kElementsAtOnce, layout.head_dim - d);
    C held[kElementsAtOnce] = {};
    for (int64_t i = 0; i < count; ++i) Hold(&held[i], Load(k[d + i]), inverse);
    for (int64_t i = 0; i < count; i += kPack) std::memcpy(page + layout.KeyAt(place, d + i), held + i, 4);
  }
}

template <typename T, typename C>
inline void WriteValue(const Layout<C>& layout, int64_t place, const T* v, float inverse, C* page) {
  for (int64_t d = 0; d < layout.head_dim; d += kElementsAtOnce) {
    const int64_t count = std::min(kElementsAtOnce, layout.head_dim - d);
    C held[kElementsAtOnce];
    for (int64_t i = 0; i < count; ++i) Hold(&held[i], Sound(v[d + i]), inverse);
    C* to = page + layout.ValueAt(place, d);
    for (int64_t i = 0; i < count; ++i) to[i * Layout<C>::kPack] = held[i];
  }
}

// Writes keys and values of one token, [num_kv_heads, head_dim] with keys rotated, into the pages.
template <typename T, typename C>
void WriteToken(const Shape& shape, int64_t slot, const T* k, const T* v, const Cache<C>& cache) {
  const Layout<C> layout(shape);
  const int64_t page = slot / shape.page_size, place = slot % shape.page_size, head_dim = shape.head_dim;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head, k += head_dim, v += head_dim) {
    float key_inverse = 0.0f, value_inverse = 0.0f;
    if constexpr (std::is_same_v<C, int8_t>) {
      float& key_scale = cache.key_scales[layout.Scale(page, head) + place];
      float& value_scale = cache.value_scales[layout.Scale(page, head) + place];
      key_scale = ScaleOf(k, head_dim, false), value_scale = ScaleOf(v, head_dim, true);
      key_inverse = InverseOf(key_scale), value_inverse = InverseOf(value_scale);
    }
    WriteKey(layout, place, k, key_inverse, cache.keys + layout.Key(page, head));
    WriteValue(layout, place, v, value_inverse, cache.values + layout.Value(page, head));
  }
}

}  // namespace attention
}  // namespace penstock

#endif  // PENSTOCK_ATTENTION_PAGES_H_
