// Shared by the CPU kernels: bfloat16, threads of XLA's pool, and a vectorisable exponential.

#ifndef PENSTOCK_KERNELS_H_
#define PENSTOCK_KERNELS_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace penstock {

struct BFloat16 {
  uint16_t bits;
};

inline float Load(float value) { return value; }
inline float Load(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void Store(float* to, float value) { *to = value; }
inline void Store(BFloat16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits += 0x7fffu + ((bits >> 16) & 1u);  // to nearest, ties to even
  to->bits = is_nan ? 0x7fc0u : static_cast<uint16_t>(bits >> 16);
}

// The widest vectors of the processor. A tile of kRows rows and kVectors vectors fits into its registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4, kRows = 6;  // 24 sums in 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kVectors = 2, kRows = 6;  // 12 in 16
#else
constexpr int kLanes = 4, kVectors = 4, kRows = 6;  // 24 in 32
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfWords __attribute__((vector_size(kLanes * 2)));

inline Vector LoadVector(const float* from) {
  Vector result;
  std::memcpy(&result, from, sizeof result);
  return result;
}
inline Vector LoadVector(const BFloat16* from) {
  HalfWords halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Vector)(__builtin_convertvector(halves, Words) << 16);
}

// e^x within 2 ulp, in a form that compilers vectorise: 2^n times a polynomial in the rest (Cephes' expf). Outside of
// [-87, 88] it is that of the nearer end.
inline float Exp(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);  // a NaN stays one
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

// The hyperbolic tangent within 2 ulp, in a form that compilers vectorise: a polynomial near 0 (Cephes' tanhf), and e^2x
// elsewhere.
inline float Tanh(float x) {
  const float square = x * x;
  float near = -5.70498872745e-3f;
  near = near * square + 2.06390887954e-2f;
  near = near * square - 5.37397155531e-2f;
  near = near * square + 1.33314422036e-1f;
  near = near * square - 3.33332819422e-1f;
  near = near * square * x + x;
  const float size = std::fabs(x);
  const float far = std::copysign(1.0f - 2.0f / (Exp(2.0f * size) + 1.0f), x);  // a NaN stays one
  return size < 0.625f ? near : far;
}

// Tasks that are handed out by a counter. Helpers of the pool may come late: they find the counter at its end, and
// nothing that they then touch is gone, as they share it.
class SharedLoop {
 public:
  SharedLoop(int64_t count, std::function<void(int64_t)> work) : count_(count), work_(std::move(work)) {}

  void Help() {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      work_(i);
      if (done_.fetch_add(1) + 1 == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }

  void Wait() {
    // The last tasks end within microseconds of one another, which is less than going to sleep takes.
    for (int spins = 0; spins < kSpins; ++spins)
      if (done_.load(std::memory_order_acquire) >= count_) return;
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load() >= count_; });
  }

 private:
  static constexpr int kSpins = 2000;
  const int64_t count_;
  const std::function<void(int64_t)> work_;
  std::atomic<int64_t> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

// Runs `work(i)` for i in [0, count): the calling thread works through them itself, and threads of the pool that are
// free help. `work` may refer to the caller's variables: none is called after this returns.
inline void ForEach(xla::ffi::ThreadPool& pool, int64_t count, std::function<void(int64_t)> work) {
  if (count <= 0) return;
  auto loop = std::make_shared<SharedLoop>(count, std::move(work));
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, count - 1);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->Help(); });
  loop->Help();
  loop->Wait();
}

}  // namespace penstock

#endif  // PENSTOCK_KERNELS_H_
