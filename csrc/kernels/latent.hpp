// Attention over latents (MLA): every head reads the same keys, and the values are the first part
// of a key. Dense, or over positions that an index has chosen for each token.
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct LatentAttentionArgs {
  const float* q;              // [tokens, heads, kv_lora + rope]
  float* out;                  // [tokens, heads, kv_lora]
  const int32_t* query_start;  // [rows + 1]
  const int32_t* context_len;  // [rows]
  const int32_t* block_table;  // [rows, table_width] page numbers
  const int64_t* chosen;       // [tokens, chosen_width] rising positions, -1 behind the last; or null
  uint8_t* pool;               // page records; see LatentLayer for this and the next
  int64_t page_bytes, layer_offset, page_size, kv_lora, rope, kind;
  const float* scales;  // [1] of kCacheFp8, or null for 1
  uint8_t* workspace;   // latent_attention_workspace() bytes, 64-byte aligned, no content expected
  int64_t rows, tokens, heads, table_width, chosen_width;
  float scale;  // of the scores, above 0
};

// Scores of positions for sparse attention, and the best of them.
struct IndexSelectArgs {
  const float* q;              // [tokens, heads, dim]
  const float* weights;        // [tokens, heads]
  const int32_t* query_start;  // [rows + 1]
  const int32_t* context_len;  // [rows]
  const int32_t* block_table;  // [rows, table_width]
  int64_t* chosen;             // [tokens, width]: rising positions, then -1
  uint8_t* pool;
  int64_t page_bytes, index_offset;  // of the index keys within a record
  int64_t page_size, dim, kind;      // kCacheFp32 or kCacheFp8Token
  uint8_t* workspace;
  int64_t rows, tokens, heads, table_width, width, top_k, max_context;
  float scale;
};

BIFOLIO_DECLARE(latent_attention, LatentAttentionArgs)
BIFOLIO_DECLARE_SIZE(latent_attention_workspace, LatentAttentionArgs)
BIFOLIO_DECLARE(index_select, IndexSelectArgs)
BIFOLIO_DECLARE_SIZE(index_select_workspace, IndexSelectArgs)

}  // namespace bifolio
