// Ragged paged attention for CPUs: the state shared by a step's layers, and the work of one task. It uses neither
// threads nor XLA: the caller decides which thread runs which task.
//
//   Plan plan;                                            // kept from step to step, with its memory
//   plan.Build(shape, batch, window);                     // once per step, for all layers with the same window
//   WriteToken(shape, batch.slots[t], k, v, cache);       // for every token of the step, before any task
//   plan.Run(i, options, queries, out, cache, scratch);   // for i in [0, plan.num_tasks()), in any order, on any thread
//
// A task is a block of queries of one sequence, for one KV head and the query heads that share it (its rows), or for
// several KV heads one after the other. It walks through the pages in strides of about kKeysPerStride keys, with two
// matmuls for each: queries by keys, and weights by values. The softmax is online (Milakov and Gimelshein, arXiv
// 1805.02867).
//
// Strides begin at fixed positions. A row's softmax restarts every kKeysPerPart keys, and is then merged with what came
// before, so that few queries after many keys can be several tasks (Dao et al., flash-decoding, 2023). So a row's
// result depends only on its own sequence: not on the batch, on how a prompt was split, or on how tasks are made.

#ifndef PENSTOCK_ATTENTION_H_
#define PENSTOCK_ATTENTION_H_

#include <atomic>
#include <memory>
#include <vector>

#include "attention_walk.h"

namespace penstock {
namespace attention {

// A step's metadata, as in RaggedBatch.
struct Batch {
  int64_t num_seqs;
  const int32_t* slots;         // [num_tokens]
  const int32_t* kv_lens;       // [max_seqs]
  const int32_t* page_indices;  // [max_seqs, pages_per_seq]
  const int32_t* cu_q_lens;     // [max_seqs + 1]
  int64_t num_tokens() const { return cu_q_lens[num_seqs]; }  // without padding
};

// The tasks of a step.
class Plan {
 public:
  void Build(const Shape& shape, const Batch& batch, int64_t window);

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }

  // `queries` [num_tokens, num_heads * head_dim], and `out` of the same shape, are f32, bf16 or f16. `options` must
  // have the window that the plan was built for.
  template <typename Q, typename O, typename C>
  void Run(int64_t task, const Options& options, Rows<const Q> queries, Rows<O> out, const Cache<C>& cache,
           Scratch& scratch);

 private:
  static constexpr int64_t kFewQueries = 8;  // most queries of a sequence whose parts become tasks
  static constexpr int64_t kEnoughTasks = 16;

  struct Task {
    Block block;
    int64_t first_head, end_head;
    int64_t split;  // the split that this is a part of, from `first_key` on; -1: none
    int64_t first_key;
  };

  // Rows whose parts are tasks of their own. The last task to finish merges them all, in order.
  struct Split {
    int64_t num_parts;
    int64_t first_state;  // where the states of its parts begin in `states_`
  };

  void AddTasks(const Block& block, bool has_few_queries, int64_t most_heads);
  void AddSplit(const Block& block, int64_t head);
  int64_t StateSize(const Block& block) const {
    return Softmax::Size(block.num_queries * shape_.group(), shape_.width());
  }
  Softmax State(const Task& task, int64_t part) {
    const int64_t place = splits_[task.split].first_state + part * StateSize(task.block);
    return Softmax::In(states_.Get(num_states_) + place, task.block.num_queries * shape_.group(), shape_.width());
  }

  Shape shape_{};
  std::vector<Task> tasks_;
  std::vector<Split> splits_;
  int64_t num_states_ = 0;  // floats
  Buffer<float> states_;
  int64_t num_counters_ = 0;
  std::unique_ptr<std::atomic<int64_t>[]> unfinished_;  // parts of each split
};

inline void Plan::Build(const Shape& shape, const Batch& batch, int64_t window) {
  shape_ = shape, num_states_ = 0;
  tasks_.clear(), splits_.clear();
  const int64_t most_heads = std::max<int64_t>(1, batch.num_seqs * shape.num_kv_heads / kEnoughTasks);
  const int64_t at_once = std::max<int64_t>(1, kRowsPerTask / shape.group()), stride = shape.keys_per_stride();
  for (int64_t s = 0; s < batch.num_seqs; ++s) {
    const int64_t num_queries = batch.cu_q_lens[s + 1] - batch.cu_q_lens[s];
    for (int64_t done = 0; done < num_queries; done += at_once) {
      const int64_t count = std::min(at_once, num_queries - done);
      const int64_t position = batch.kv_lens[s] - num_queries + done;
      const int64_t first_key = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
      AddTasks({batch.page_indices + s * shape.pages_per_seq, batch.cu_q_lens[s] + done, count, position,
                first_key / stride * stride, position + count},
               num_queries <= kFewQueries, most_heads);
    }
  }
  states_.Get(num_states_);
  const int64_t num_splits = static_cast<int64_t>(splits_.size());
  if (num_splits > num_counters_) unfinished_ = std::make_unique<std::atomic<int64_t>[]>(num_counters_ = 2 * num_splits);
  for (int64_t i = 0; i < num_splits; ++i) unfinished_[i] = splits_[i].num_parts;
}

// Adds tasks for parts of about kKeysPerPart keys, summed over heads, unless that makes too few tasks.
inline void Plan::AddTasks(const Block& block, bool has_few_queries, int64_t most_heads) {
  const int64_t per_part = shape_.keys_per_part(), num_heads = shape_.num_kv_heads;
  const bool is_split = has_few_queries && block.first_key / per_part < (block.end_key - 1) / per_part;
  int64_t at_once = 1;
  if (has_few_queries) at_once = std::min(most_heads, std::max<int64_t>(1, per_part / (block.end_key - block.first_key)));
  for (int64_t head = 0; head < num_heads; head += at_once) {
    if (is_split) AddSplit(block, head);
    else tasks_.push_back({block, head, std::min(head + at_once, num_heads), -1, block.first_key});
  }
}

inline void Plan::AddSplit(const Block& block, int64_t head) {
  const int64_t per_part = shape_.keys_per_part(), split = static_cast<int64_t>(splits_.size());
  const int64_t first_part = block.first_key / per_part, num_parts = CeilDivide(block.end_key, per_part) - first_part;
  splits_.push_back({num_parts, num_states_});
  num_states_ += num_parts * StateSize(block);
  for (int64_t part = 0; part < num_parts; ++part)
    tasks_.push_back({block, head, head + 1, split, std::max(block.first_key, (first_part + part) * per_part)});
}

template <typename Q, typename O, typename C>
void Plan::Run(int64_t index, const Options& options, Rows<const Q> queries, Rows<O> out, const Cache<C>& cache,
               Scratch& scratch) {
  const Task& task = tasks_[index];
  Walk<C> walk(shape_, task.block, options, cache, scratch);
  if (task.split < 0) {
    for (int64_t head = task.first_head; head < task.end_head; ++head)
      walk.Attend(head, head + 1 == task.end_head, queries, out);
    return;
  }
  const int64_t per_part = shape_.keys_per_part(), num_parts = splits_[task.split].num_parts;
  walk.LoadQueries(task.first_head, queries);
  walk.AttendPart(task.first_head, task.first_key,
                  State(task, task.first_key / per_part - task.block.first_key / per_part), -1);
  if (unfinished_[task.split].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  unfinished_[task.split].store(num_parts, std::memory_order_relaxed);  // for the next layer
  walk.Begin(task.first_head);
  for (int64_t part = 0; part < num_parts; ++part) walk.Merge(State(task, part));
  walk.Finish(task.first_head, out);
}

// Compiled once, in attention.cc: for each type of activations, with its own pages or int8 ones.
#define PENSTOCK_PLAN_RUN(T, C)                                                                                    \
  template void Plan::Run<T, T, C>(int64_t, const Options&, Rows<const T>, Rows<T>, const Cache<C>&, Scratch&)
extern PENSTOCK_PLAN_RUN(float, float);
extern PENSTOCK_PLAN_RUN(BFloat16, BFloat16);
extern PENSTOCK_PLAN_RUN(float, int8_t);
extern PENSTOCK_PLAN_RUN(BFloat16, int8_t);
extern PENSTOCK_PLAN_RUN(Float16, float);
extern PENSTOCK_PLAN_RUN(Float16, int8_t);

}  // namespace attention
}  // namespace penstock

#endif  // PENSTOCK_ATTENTION_H_
