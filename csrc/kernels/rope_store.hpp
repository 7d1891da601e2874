// Splits fused queries, keys and values; norms and rotates; stores keys and values in their pages.
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct RopeStoreArgs {
  const float* qkv;               // [tokens, heads + 2 kv_heads, head_dim]
  float* q;                       // [tokens, heads, head_dim], result
  const int32_t* positions;       // [tokens]
  const int32_t* row_of_token;    // [tokens]
  const int32_t* block_table;     // [., table_width] page numbers
  const float* cos_sin;           // [positions, rope_dim], cosines then sines
  const float* q_gain;            // [head_dim] RMSNorm of each query head, or null
  const float* k_gain;            // the same of each key head
  uint8_t* pool;                  // page records; see PageLayer for this and the next
  int64_t page_bytes, layer_offset, page_size, kv_heads, head_dim, kind;
  const float* k_scales;  // [kv_heads] of kCacheFp8, or null for 1
  const float* v_scales;
  int64_t tokens, heads, table_width, rope_dim;
  float q_eps, k_eps;
};

inline constexpr int64_t kMaxHeadDim = 1024;

BIFOLIO_DECLARE(rope_store, RopeStoreArgs)

}  // namespace bifolio
