#include "kernels/attention.hpp"

#include "kernels/attention_run.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

// FewDot serves items whose query rows fit into one of its tiles, where it is quicker; it must give
// the same bits.
template <class Dot, class FewDot>
void attend(const AttentionArgs& a, const Workspace& w, ThreadPool& pool) {
  parallel_section(pool, w.plan.units, [&](TileCursor& cursor, int thread) {
    const Scratch scratch = scratch_of(w, thread, a, a.head_dim);
    Worker<Dot> worker(a, scratch);
    Worker<FewDot> few_worker(a, scratch);
    // Mirrored: the later parts of a prompt see more keys.
    for (int64_t tile = next_tile(cursor); tile >= 0; tile = next_tile(cursor)) {
      const int64_t unit = mirrored(tile, w.plan.units, pool);
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
  return workspace_bytes(a, thread_count(pool), a.head_dim, a.table_width * a.page_size);
}

void attention(const AttentionArgs& a, ThreadPool& pool) {
  Carver carver(a.workspace);
  Workspace w = carve(carver, a.workspace, thread_count(pool), a, a.head_dim);
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
