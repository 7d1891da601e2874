// Causal attention over paged keys and values, for decode rows and prefill chunks alike.
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct AttentionArgs {
  const float* q;              // [tokens, heads, head_dim]
  float* out;                  // [tokens, heads, head_dim]
  const int32_t* query_start;  // [rows + 1]
  const int32_t* context_len;  // [rows]
  const int32_t* block_table;  // [rows, table_width] page numbers
  uint8_t* pool;               // page records; see PageLayer for this and the next
  int64_t page_bytes, layer_offset, page_size, kv_heads, head_dim, kind;
  const float* k_scales;  // [kv_heads] of kCacheFp8, or null for 1
  const float* v_scales;
  uint8_t* workspace;  // attention_workspace() bytes, 64-byte aligned, no content expected
  int64_t rows, tokens, heads, table_width;
  int64_t window;  // keys that a token sees, itself included; 0 for all
  float scale;     // of the scores, above 0
};

BIFOLIO_DECLARE(attention, AttentionArgs)
BIFOLIO_DECLARE_SIZE(attention_workspace, AttentionArgs)

}  // namespace bifolio
