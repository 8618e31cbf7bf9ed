// Attention in C++ against sums in f64 over the same pages, for any processor that a compiler can be told of. Prints the
// largest difference of each case, which is infinite if a query has other bits beside others than alone. Built and run by
// test_attention_processors.py.

#include <cstdio>
#include <random>

#include "attention.h"

namespace penstock {
namespace attention {
PENSTOCK_PLAN_RUN(float, float);  // there is no attention.cc here, which has them in the library
PENSTOCK_PLAN_RUN(float, int8_t);
}  // namespace attention
}  // namespace penstock

using namespace penstock;
using namespace penstock::attention;

namespace {

struct Case {
  int64_t heads, kv_heads, head_dim, page_size, length, num_queries, window;
};

// A sequence whose pages are in reverse order.
template <typename C>
struct Pages {
  explicit Pages(const Case& sizes)
      : num_pages(CeilDivide(sizes.length, sizes.page_size)),
        shape{sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.page_size, num_pages}, layout(shape) {
    keys.resize((num_pages + 1) * sizes.kv_heads * layout.key_words * layout.kPack);
    values.resize((num_pages + 1) * sizes.kv_heads * layout.value_words * layout.kPack);
    key_scales.resize((num_pages + 1) * sizes.kv_heads * sizes.page_size);
    value_scales.resize(key_scales.size());
    for (int64_t i = 0; i < num_pages; ++i) table.push_back(static_cast<int32_t>(num_pages - i));
  }
  Cache<C> cache() { return {keys.data(), values.data(), key_scales.data(), value_scales.data()}; }
  int64_t slot(int64_t t) const { return table[t / shape.page_size] * shape.page_size + t % shape.page_size; }
  double Held(const C* element, const std::vector<float>& scales, int64_t page, int64_t head, int64_t place) const {
    if constexpr (std::is_same_v<C, int8_t>) return double(*element) * scales[layout.Scale(page, head) + place];
    else return Load(*element);
  }
  double Key(int64_t t, int64_t head, int64_t d) const {
    const int64_t page = table[t / shape.page_size], place = t % shape.page_size;
    return Held(&keys[layout.Key(page, head) + layout.KeyAt(place, d)], key_scales, page, head, place);
  }
  double Value(int64_t t, int64_t head, int64_t d) const {
    const int64_t page = table[t / shape.page_size], place = t % shape.page_size;
    return Held(&values[layout.Value(page, head) + layout.ValueAt(place, d)], value_scales, page, head, place);
  }

  int64_t num_pages;
  Shape shape;
  Layout<C> layout;
  std::vector<C> keys, values;
  std::vector<float> key_scales, value_scales;
  std::vector<int32_t> table;
};

// The largest difference of what one query's head gets.
template <typename C>
double Difference(const Pages<C>& pages, const float* q, const float* out, int64_t kv_head, int64_t first, int64_t last) {
  const int64_t head_dim = pages.shape.head_dim;
  std::vector<double> weights;
  double top = -1e300, total = 0, worst = 0;
  for (int64_t t = first; t <= last; ++t) {
    double score = 0;
    for (int64_t d = 0; d < head_dim; ++d) score += q[d] * pages.Key(t, kv_head, d);
    weights.push_back(score / std::sqrt(double(head_dim)));
    top = std::max(top, weights.back());
  }
  for (double& weight : weights) total += weight = std::exp(weight - top);
  for (int64_t d = 0; d < head_dim; ++d) {
    double sum = 0;
    for (int64_t t = first; t <= last; ++t) sum += weights[t - first] / total * pages.Value(t, kv_head, d);
    worst = std::max(worst, std::fabs(sum - out[d]));
  }
  return worst;
}

template <typename C>
double Run(const Case& sizes) {
  Pages<C> pages(sizes);
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  const auto numbers = [&](int64_t count) {
    std::vector<float> result(count);
    for (float& x : result) x = normal(random);
    return result;
  };
  const int64_t kv_size = sizes.kv_heads * sizes.head_dim, q_size = sizes.heads * sizes.head_dim;
  const auto k = numbers(sizes.length * kv_size), v = numbers(sizes.length * kv_size);
  const auto q = numbers(sizes.num_queries * q_size);
  std::vector<float> out(q.size());
  for (int64_t t = 0; t < sizes.length; ++t)
    WriteToken(pages.shape, pages.slot(t), k.data() + t * kv_size, v.data() + t * kv_size, pages.cache());
  const Options options{1 / std::sqrt(float(sizes.head_dim)), sizes.window, 0, nullptr};
  Plan plan;
  Scratch scratch;
  const auto attend = [&](int64_t first, int64_t count, float* to) {  // to `count` of the queries
    const int32_t length = static_cast<int32_t>(sizes.length - sizes.num_queries + first + count);
    const int32_t ends[2] = {0, static_cast<int32_t>(count)};
    plan.Build(pages.shape, {1, nullptr, &length, pages.table.data(), ends}, sizes.window);
    for (int layer = 0; layer < 2; ++layer)
      for (int64_t i = plan.num_tasks() - 1; i >= 0; --i)  // in any order
        plan.Run(i, options, Rows<const float>{q.data() + first * q_size, q_size}, Rows<float>{to, q_size},
                 pages.cache(), scratch);
  };
  attend(0, sizes.num_queries, out.data());
  std::vector<float> alone(q_size);
  for (int64_t i = 0; i < sizes.num_queries; ++i) {
    attend(i, 1, alone.data());
    if (!std::equal(alone.begin(), alone.end(), out.begin() + i * q_size)) return INFINITY;
  }
  double worst = 0;
  for (int64_t i = 0; i < sizes.num_queries * sizes.heads; ++i) {
    const int64_t last = sizes.length - sizes.num_queries + i / sizes.heads;
    const int64_t first = sizes.window > 0 ? std::max<int64_t>(0, last - sizes.window + 1) : 0;
    const int64_t kv_head = i % sizes.heads / pages.shape.group();
    worst = std::max(worst, Difference(pages, &q[i * sizes.head_dim], &out[i * sizes.head_dim], kv_head, first, last));
  }
  return worst;
}

}  // namespace

int main() {
  for (const Case& sizes : {Case{4, 2, 32, 32, 300, 20, 0}, Case{4, 1, 16, 16, 1500, 2, 0}, Case{6, 2, 20, 3, 200, 5, 70},
                            Case{8, 1, 64, 64, 1300, 1, 1100}, Case{4, 1, 80, 16, 150, 9, 0}})
    std::printf("%g %g %g\n", Run<float>(sizes), Run<BFloat16>(sizes), Run<int8_t>(sizes));
}
