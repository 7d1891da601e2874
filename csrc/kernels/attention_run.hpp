// The memory of an attention call, and one unit of its work; shared by the kinds of attention.
#pragma once

#include "kernels/attention_worker.hpp"

namespace bifolio::BIFOLIO_ISA {

struct Workspace {
  Plan plan;
  uint8_t* threads;  // scratch of one thread after the other
  int64_t thread_bytes;
  float* partial;
};

inline int64_t most_query_rows(int64_t heads, int64_t kv_heads) {
  const int64_t group = heads / kv_heads;
  return group > kQueryRows ? group : kQueryRows;
}

// Null `base`: only measures. Partial results come last, since their size depends on the context.
inline Workspace carve(Carver& carver, uint8_t* base, int64_t threads, const AttentionArgs& a,
                       int64_t value_dim) {
  Workspace w{};
  w.plan.items = carver.take<Item>(a.tokens);
  w.plan.finished = carver.take<int32_t>(a.tokens * a.kv_heads);
  Carver one(nullptr);
  Scratch::carve(one, most_query_rows(a.heads, a.kv_heads), a.head_dim, value_dim);
  w.thread_bytes = one.used();
  w.threads = carver.take<uint8_t>(threads * w.thread_bytes);
  w.partial = base == nullptr ? nullptr : reinterpret_cast<float*>(base + carver.used());
  return w;
}

// The bytes of all of it, for contexts of up to `most_keys` keys.
inline int64_t workspace_bytes(const AttentionArgs& a, int64_t threads, int64_t value_dim,
                               int64_t most_keys) {
  Carver carver(nullptr);
  carve(carver, nullptr, threads, a, value_dim);
  // share_items() shares fewer than 4 * threads pairs of an item and a KV head.
  const int64_t shared = 4 * threads * most_query_rows(a.heads, a.kv_heads);
  const int64_t rows = a.tokens * a.heads < shared ? a.tokens * a.heads : shared;
  const int64_t splits = (most_keys + kSplit - 1) / kSplit;
  carver.take<float>(rows * splits * partial_floats(a.head_dim));
  return carver.used();
}

inline Scratch scratch_of(const Workspace& w, int thread, const AttentionArgs& a,
                          int64_t value_dim) {
  Carver carver(w.threads + thread * w.thread_bytes);
  return Scratch::carve(carver, most_query_rows(a.heads, a.kv_heads), a.head_dim, value_dim);
}

template <class Worker>
void run_unit(Worker& worker, const AttentionArgs& a, const Workspace& w, const Item& item,
              int64_t unit) {
  const int64_t head = (unit - item.unit_first) % a.kv_heads;
  const int64_t first = (unit - item.unit_first) / a.kv_heads * item.run;
  const int64_t end = first + item.run < item.splits ? first + item.run : item.splits;
  if (!item.shared) {
    worker.run(item, head, first, end, nullptr);
    return;
  }
  const int64_t rows = item.count * (a.heads / a.kv_heads);
  float* partial =
      w.partial + item.partial + head * item.splits * rows * partial_floats(a.head_dim);
  worker.run(item, head, first, end, partial);
  int32_t* finished = w.plan.finished + (&item - w.plan.items) * a.kv_heads + head;
  if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) == item.runs()) {
    worker.finish(item, head, partial);
  }
}

}  // namespace bifolio::BIFOLIO_ISA
