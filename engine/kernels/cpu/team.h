// Threads of XLA's pool that work through one kernel together, phase by phase.

#ifndef PENSTOCK_TEAM_H_
#define PENSTOCK_TEAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace penstock {

// A team of threads.
//
// The thread that creates a team works through every phase itself. Free threads of the pool help, from when they come
// until the team ends. Between phases they spin: a phase of a decode step takes tens of microseconds, and waking a
// sleeping thread takes as long.
class Team {
 public:
  explicit Team(xla::ffi::ThreadPool& pool) : state_(std::make_shared<State>()), size_(pool.num_threads()) {
    for (int64_t i = 1; i < size_; ++i) pool.Schedule([state = state_] { state->Help(); });
  }
  ~Team() { state_->is_over.store(true, std::memory_order_release); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int64_t size() const { return size_; }

  // Runs one phase: `work(i)` for i in [0, count), each once. Nothing runs before the call or after it returns, so
  // `work` may refer to the caller's variables.
  template <typename Work>
  void Run(int64_t count, Work&& work) {
    using Plain = std::remove_reference_t<Work>;
    if (count <= 1 || size_ == 1) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    state_->Begin(count, &work, [](const void* context, int64_t i) {
      (*const_cast<Plain*>(static_cast<const Plain*>(context)))(i);
    });
    while (state_->RunOne()) {}
    state_->Wait();
  }

 private:
  struct State {
    using Call = void (*)(const void*, int64_t);

    void Begin(int64_t count, const void* context, Call call) {
      count_ = count, context_ = context, call_ = call;
      num_done_.store(0, std::memory_order_relaxed);
      phase_ = (phase_ + 1) & 0x7fffffff;
      left_.store(phase_ << 32 | static_cast<uint64_t>(count), std::memory_order_release);
    }

    // Takes a task of the current phase, if one is left. The phase is in the same word as the tasks that are left, so
    // that a thread that was interrupted in between does not take one of a later phase. No later phase begins before
    // this task is done.
    bool RunOne() {
      uint64_t left = left_.load(std::memory_order_acquire);
      do {
        if (static_cast<uint32_t>(left) == 0) return false;
      } while (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acquire));
      call_(context_, count_ - static_cast<int64_t>(static_cast<uint32_t>(left)));
      num_done_.fetch_add(1, std::memory_order_release);
      return true;
    }

    void Wait() const {
      for (int spins = 0; num_done_.load(std::memory_order_acquire) < count_; ++spins) Pause(spins);
    }

    void Help() {
      for (int spins = 0; !is_over.load(std::memory_order_acquire); ++spins) {
        if (RunOne()) spins = 0;
        else Pause(spins);
      }
    }

    // On a busy machine the awaited thread may need this thread's core.
    static void Pause(int spins) {
      if (spins > kSpins) std::this_thread::yield();
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#elif defined(__aarch64__)
      else asm volatile("yield");
#endif
    }

    static constexpr int kSpins = 4000;
    std::atomic<bool> is_over{false};

   private:
    int64_t count_ = 0;
    const void* context_ = nullptr;
    Call call_ = nullptr;
    uint64_t phase_ = 0;
    alignas(64) std::atomic<uint64_t> left_{0};  // phase << 32 | tasks not yet taken
    alignas(64) std::atomic<int64_t> num_done_{0};
  };

  std::shared_ptr<State> state_;  // helpers may come late, when the team has ended
  const int64_t size_;
};

// Runs a kernel of one phase.
template <typename Work>
void ForEach(xla::ffi::ThreadPool& pool, int64_t count, Work&& work) {
  if (count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  Team(pool).Run(count, work);
}

}  // namespace penstock

#endif  // PENSTOCK_TEAM_H_
