#include "kernels/attention_run.hpp"
#include "kernels/latent.hpp"
#include "kernels/latent_block.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

// Attention of one KV head for all heads. Codes of eight bits are widened to bf16 with their scales
// where each token has its own, so the kind that is left is fp32 or bf16.
AttentionArgs as_attention(const LatentAttentionArgs& a) {
  AttentionArgs args{};
  args.q = a.q;
  args.out = a.out;
  args.query_start = a.query_start;
  args.context_len = a.context_len;
  args.block_table = a.block_table;
  args.page_size = a.page_size;
  args.kv_heads = 1;
  args.head_dim = a.kv_lora + a.rope;
  args.kind = a.kind == kCacheFp32 ? kCacheFp32 : kCacheBf16;
  args.k_scales = args.v_scales = a.scales;
  args.rows = a.rows;
  args.tokens = a.tokens;
  args.heads = a.heads;
  args.table_width = a.table_width;
  args.scale = a.scale;
  return args;
}

// Every token is an item of its own, whose keys are those chosen for it: the last one stands at
// `position` among them.
void plan_chosen(const LatentAttentionArgs& a, const AttentionArgs& args, int64_t threads,
                 Plan& plan) {
  plan.count = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t t = a.query_start[row]; t < a.query_start[row + 1]; ++t) {
      const int64_t* chosen = a.chosen + t * a.chosen_width;
      int64_t keys = a.chosen_width;
      while (keys > 1 && chosen[keys - 1] < 0) --keys;
      Item& item = plan.items[plan.count++];
      item = {};
      item.row = row;
      item.first = t;
      item.count = 1;
      item.position = keys - 1;
      item.splits = (keys - 1) / kSplit + 1;
    }
  }
  share_items(args, threads, plan);
}

template <class Dot>
void attend(const LatentAttentionArgs& a, const AttentionArgs& args, const Workspace& w,
            ThreadPool& pool) {
  const LatentLayer layer{a.pool, a.page_bytes, a.layer_offset, a.page_size,
                          a.kv_lora, a.rope, a.kind};
  parallel_section(pool, w.plan.units, [&](TileCursor& cursor, int thread) {
    const Scratch scratch = scratch_of(w, thread, args, a.kv_lora);
    Worker<Dot, LatentReader<Dot>> worker(args, scratch, LatentReader<Dot>(layer, scratch.block),
                                          a.kv_lora);
    // Mirrored: the later parts of a prompt see more keys.
    for (int64_t tile = next_tile(cursor); tile >= 0; tile = next_tile(cursor)) {
      const int64_t unit = mirrored(tile, w.plan.units, pool);
      const Item& item = item_of_unit(w.plan, unit);
      if (a.chosen != nullptr) worker.reader().choose(a.chosen + item.first * a.chosen_width);
      run_unit(worker, args, w, item, unit);
    }
  });
}

}  // namespace

int64_t latent_attention_workspace(const LatentAttentionArgs& a, const ThreadPool& pool) {
  return workspace_bytes(as_attention(a), thread_count(pool), a.kv_lora,
                         a.table_width * a.page_size);
}

void latent_attention(const LatentAttentionArgs& a, ThreadPool& pool) {
  const AttentionArgs args = as_attention(a);
  Carver carver(a.workspace);
  Workspace w = carve(carver, a.workspace, thread_count(pool), args, a.kv_lora);
  if (a.chosen != nullptr) {
    plan_chosen(a, args, thread_count(pool), w.plan);
  } else {
    plan_batch(args, thread_count(pool), w.plan);
  }
#if defined(__AVX512F__)
  if (a.kind != kCacheFp32) return attend<PairDot>(a, args, w, pool);
  return attend<FloatDot<false>>(a, args, w, pool);
#else
  if (a.kind == kCacheFp32) return attend<FloatDot<false>>(a, args, w, pool);
  return attend<FloatDot<true>>(a, args, w, pool);
#endif
}

}  // namespace bifolio::BIFOLIO_ISA
