// How a batch is cut into units of work. The cut follows the batch as it is found in memory at the
// moment of the call; it decides who computes what, never the order in which a sum is taken.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/carve.hpp"

namespace bifolio::BIFOLIO_ISA {

// Keys whose outputs are summed up by themselves before they are merged with those before.
inline constexpr int64_t kSplit = 256;

// Query rows (tokens × query heads of a KV head) that one unit works on.
inline constexpr int64_t kQueryRows = 192;

// Some tokens of one row of the batch. If it is `shared`, a unit is a run of its splits, leaves a
// partial result of each, and whoever finishes last merges them; else one unit goes through all.
struct Item {
  int64_t row, first, count;  // tokens first … first + count - 1 of the batch
  int64_t position;           // of the first token
  int64_t split_first, splits;
  int64_t run;         // splits of a unit
  int64_t unit_first;  // units are numbered over all items: runs × KV heads
  int64_t partial;     // first float of its partial results
  bool shared;

  int64_t runs() const { return (splits + run - 1) / run; }
};

struct Plan {
  Item* items;
  int32_t* finished;  // [item][KV head] runs of a shared item that are done
  int64_t count, units;
};

// Floats of the partial result of one query row: output, maximum, sum.
inline int64_t partial_floats(int64_t head_dim) { return head_dim + 16; }

inline int64_t lowest_seen(int64_t position, int64_t window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

inline int64_t tokens_per_item(const AttentionArgs& a) {
  const int64_t tokens = kQueryRows / (a.heads / a.kv_heads);
  return tokens > 0 ? tokens : 1;
}

// Numbers the units of the items that the plan holds.
inline void share_items(const AttentionArgs& a, int64_t threads, Plan& plan) {
  int64_t work = 0;
  for (int64_t i = 0; i < plan.count; ++i) work += plan.items[i].count * plan.items[i].splits;
  // An item is shared if a KV head of it alone is more than a quarter of a thread's share of the
  // work; its runs are about an eighth.
  const int64_t all_work = work * a.kv_heads;
  plan.units = 0;
  int64_t floats = 0;
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t i = 0; i < plan.count; ++i) {
    Item& item = plan.items[i];
    item.shared = item.splits > 1 && 4 * threads * item.count * item.splits > all_work;
    const int64_t eighth = all_work / (8 * threads * item.count);
    item.run = !item.shared ? item.splits : eighth > 1 ? eighth : 1;
    item.unit_first = plan.units;
    item.partial = floats;
    plan.units += a.kv_heads * item.runs();
    if (!item.shared) continue;
    floats += item.splits * a.kv_heads * item.count * group * partial_floats(a.head_dim);
    for (int64_t head = 0; head < a.kv_heads; ++head) plan.finished[i * a.kv_heads + head] = 0;
  }
}

inline void plan_batch(const AttentionArgs& a, int64_t threads, Plan& plan) {
  plan.count = 0;
  const int64_t step = tokens_per_item(a);
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t start = a.query_start[row];
    const int64_t end = a.query_start[row + 1];
    for (int64_t first = start; first < end; first += step) {
      Item& item = plan.items[plan.count++];
      item.row = row;
      item.first = first;
      item.count = end - first < step ? end - first : step;
      item.position = a.context_len[row] - end + first;
      const int64_t seen_first = lowest_seen(item.position, a.window);
      const int64_t seen_end = item.position + item.count;
      item.split_first = seen_first / kSplit;
      item.splits = (seen_end - 1) / kSplit + 1 - item.split_first;
    }
  }
  share_items(a, threads, plan);
}

inline const Item& item_of_unit(const Plan& plan, int64_t unit) {
  int64_t low = 0;
  int64_t high = plan.count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (plan.items[middle].unit_first <= unit ? low : high) = middle;
  }
  return plan.items[low];
}

}  // namespace bifolio::BIFOLIO_ISA
