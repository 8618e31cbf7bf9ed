// Packs weights into the panels that matmuls read (matmul.h). Python itself calls this, while a model is loaded.

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "ahead.h"

namespace penstock {
namespace {

// Transposes the columns of one panel into [depth, kPanel]; a column that is null becomes zeros. A word is a feature, or
// two in bf16. Each column is read a few cache lines at a time, and from wherever it is: a mapped file need not be
// aligned.
template <typename Word>
void PackPanel(const char* const* columns, int64_t depth, Word* panel) {
  constexpr int64_t kWords = 256 / sizeof(Word), kColumns = 16;
  static_assert(kPanel % kColumns == 0, "a panel is cut into blocks of columns");
  alignas(64) Word block[kColumns][kWords];
  for (int64_t first = 0; first < depth; first += kWords) {
    const int64_t count = std::min(kWords, depth - first);
    for (int64_t left = 0; left < kPanel; left += kColumns) {
      for (int64_t c = 0; c < kColumns; ++c) {
        const char* column = columns[left + c];
        if (column) std::memcpy(block[c], column + first * sizeof(Word), count * sizeof(Word));
        else std::memset(block[c], 0, sizeof block[c]);
      }
      Word* to = panel + first * kPanel + left;
      for (int64_t k = 0; k < count; ++k, to += kPanel)
        for (int64_t c = 0; c < kColumns; ++c) to[c] = block[c][k];
    }
  }
}

template <typename Word>
void PackPanels(const char* const* columns, int64_t num_panels, int64_t depth, Word* panels, int64_t num_threads) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < num_panels; i = next++) PackPanel(columns + i * kPanel, depth, panels + i * depth * kPanel);
  };
  std::vector<std::thread> helpers;
  try {
    while (static_cast<int64_t>(helpers.size()) + 1 < std::min(num_threads, num_panels)) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads can be started
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace
}  // namespace penstock

// `columns` are kPanel addresses for each panel, of `depth` words of 2 or 4 bytes each.
extern "C" void PenstockPackPanels(const char* const* columns, int64_t num_panels, int64_t depth, int64_t word_bytes,
                                   void* panels, int64_t num_threads) {
  using namespace penstock;
  if (word_bytes == 2) PackPanels(columns, num_panels, depth, static_cast<uint16_t*>(panels), num_threads);
  else PackPanels(columns, num_panels, depth, static_cast<uint32_t*>(panels), num_threads);
}
