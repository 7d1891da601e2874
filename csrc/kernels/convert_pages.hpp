// Rewrites pages from one cache format to another of the same shape, all layers.
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct ConvertPagesArgs {
  const uint8_t* source;  // page records; see PageLayer for the kinds
  uint8_t* target;
  const int64_t* source_index;  // [count] page numbers
  const int64_t* target_index;
  const float* source_k_scales;  // [layers, kv_heads] of kCacheFp8, or null for 1
  const float* source_v_scales;
  const float* target_k_scales;
  const float* target_v_scales;
  int64_t count, layers, page_size, kv_heads, head_dim;
  int64_t source_kind, source_page_bytes, source_layer_offset, source_layer_bytes;
  int64_t target_kind, target_page_bytes, target_layer_offset, target_layer_bytes;
};

BIFOLIO_DECLARE(convert_pages, ConvertPagesArgs)

}  // namespace bifolio
