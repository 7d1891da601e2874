// Where latents and index keys stand inside the page records (layout `mla-pairs-1` of
// src/bifolio/spec/page.py).
#pragma once

#include "kernels/page_layer.hpp"

namespace bifolio::BIFOLIO_ISA {

struct LatentLayer {
  uint8_t* pool;         // record 0
  int64_t page_bytes;    // from one record to the next
  int64_t layer_offset;  // of the layer within a record
  int64_t page_size;     // tokens
  int64_t kv_lora, rope;
  int64_t kind;

  static constexpr int64_t kGroupNumbers = 128;  // latents that share a scale of kCacheFp8Token

  static int64_t bytes_of(int64_t kind) {
    return kind == kCacheFp32 ? 4 : kind == kCacheBf16 ? 2 : 1;
  }
  // Rotated keys are bf16 beside scaled latents.
  int64_t rope_kind() const { return kind == kCacheFp8Token ? int64_t{kCacheBf16} : kind; }

  // [kv_lora / 2][page_size][2] numbers.
  const uint8_t* latents(int64_t page) const { return pool + page * page_bytes + layer_offset; }
  // [rope / 2][page_size][2] numbers.
  const uint8_t* keys(int64_t page) const {
    return latents(page) + kv_lora * page_size * bytes_of(kind);
  }
  // [kv_lora / 128][page_size], of kCacheFp8Token only.
  const float* scales(int64_t page) const {
    return reinterpret_cast<const float*>(keys(page) + rope * page_size * bytes_of(rope_kind()));
  }
};

}  // namespace bifolio::BIFOLIO_ISA
