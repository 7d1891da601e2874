#include "kernels/attention.hpp"

#include "kernels/attention_worker.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

struct Workspace {
  Plan plan;
  uint8_t* threads;  // scratch of one thread after the other
  int64_t thread_bytes;
  float* partial;
};

int64_t most_query_rows(int64_t heads, int64_t kv_heads) {
  const int64_t group = heads / kv_heads;
  return group > kQueryRows ? group : kQueryRows;
}

// Null `base`: only measures. Partial results come last, since their size depends on the context.
Workspace carve(Carver& carver, uint8_t* base, int64_t threads, int64_t tokens, int64_t heads,
                int64_t kv_heads, int64_t head_dim) {
  Workspace w{};
  w.plan.items = carver.take<Item>(tokens);
  w.plan.finished = carver.take<int32_t>(tokens * kv_heads);
  Carver one(nullptr);
  Scratch::carve(one, most_query_rows(heads, kv_heads), head_dim);
  w.thread_bytes = one.used();
  w.threads = carver.take<uint8_t>(threads * w.thread_bytes);
  w.partial = base == nullptr ? nullptr : reinterpret_cast<float*>(base + carver.used());
  return w;
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

// FewDot serves items whose query rows fit into one of its tiles, where it is quicker; it must give
// the same bits.
template <class Dot, class FewDot>
void attend(const AttentionArgs& a, const Workspace& w, ThreadPool& pool) {
  parallel_section(pool, w.plan.units, [&](TileCursor& cursor, int thread) {
    Carver carver(w.threads + thread * w.thread_bytes);
    const Scratch scratch =
        Scratch::carve(carver, most_query_rows(a.heads, a.kv_heads), a.head_dim);
    Worker<Dot> worker(a, scratch);
    Worker<FewDot> few_worker(a, scratch);
    // Backwards: the later parts of a prompt see more keys, and the longest units go first.
    for (int64_t tile = next_tile(cursor); tile >= 0; tile = next_tile(cursor)) {
      const int64_t unit = w.plan.units - 1 - tile;
      const Item& item = item_of_unit(w.plan, unit);
      if (item.count * (a.heads / a.kv_heads) <= FewDot::kTileRows) {
        run_unit(few_worker, a, w, item, unit);
      } else {
        run_unit(worker, a, w, item, unit);
      }
    }
  });
}

}  // namespace

int64_t attention_workspace(const AttentionArgs& a, const ThreadPool& pool) {
  const int64_t threads = thread_count(pool);
  Carver carver(nullptr);
  carve(carver, nullptr, threads, a.tokens, a.heads, a.kv_heads, a.head_dim);
  // plan_batch() shares fewer than 4 * threads pairs of an item and a KV head.
  const int64_t shared = 4 * threads * most_query_rows(a.heads, a.kv_heads);
  const int64_t rows = a.tokens * a.heads < shared ? a.tokens * a.heads : shared;
  const int64_t splits = (a.table_width * a.page_size + kSplit - 1) / kSplit;
  carver.take<float>(rows * splits * partial_floats(a.head_dim));
  return carver.used();
}

void attention(const AttentionArgs& a, ThreadPool& pool) {
  Carver carver(a.workspace);
  Workspace w = carve(carver, a.workspace, thread_count(pool), a.tokens, a.heads, a.kv_heads,
                      a.head_dim);
  plan_batch(a, thread_count(pool), w.plan);
#if defined(__AVX512F__)
  if (a.kind == kCacheBf16) return attend<PairDot, PairDot>(a, w, pool);
  if (a.kind != kCacheFp32) return attend<PairDot, CodeDot>(a, w, pool);
  return attend<FloatDot<false>, FloatDot<false>>(a, w, pool);
#else
  if (a.kind == kCacheFp32) return attend<FloatDot<false>, FloatDot<false>>(a, w, pool);
  return attend<FloatDot<true>, FloatDot<true>>(a, w, pool);
#endif
}

}  // namespace bifolio::BIFOLIO_ISA
