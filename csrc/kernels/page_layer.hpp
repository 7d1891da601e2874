// Where the numbers of one layer stand inside the page records (layout: src/bifolio/spec/page.py).
#pragma once

#include <cstdint>

namespace bifolio {

// How a cache stores its numbers; the values are known to Python.
enum CacheKind : int64_t { kCacheFp32 = 0, kCacheBf16 = 1, kCacheFp8 = 2, kCacheFp8Token = 3 };

namespace BIFOLIO_ISA {

struct PageLayer {
  uint8_t* pool;         // record 0
  int64_t page_bytes;    // from one record to the next
  int64_t layer_offset;  // of the layer within a record
  int64_t page_size;     // tokens
  int64_t kv_heads;
  int64_t head_dim;
  int64_t kind;

  int64_t number_bytes() const {
    return kind == kCacheFp32 ? 4 : kind == kCacheBf16 ? 2 : 1;
  }
  int64_t head_bytes() const { return page_size * head_dim * number_bytes(); }

  // [head_dim / 2][page_size][2] numbers.
  uint8_t* k_codes(int64_t page, int64_t head) const {
    return pool + page * page_bytes + layer_offset + head * head_bytes();
  }
  // [page_size / 2][head_dim][2] numbers.
  uint8_t* v_codes(int64_t page, int64_t head) const {
    return k_codes(page, kv_heads + head);
  }
  // [page_size] fp16, of kCacheFp8Token only.
  uint16_t* k_scales(int64_t page, int64_t head) const {
    return reinterpret_cast<uint16_t*>(k_codes(page, 2 * kv_heads)) + head * page_size;
  }
  uint16_t* v_scales(int64_t page, int64_t head) const {
    return k_scales(page, kv_heads + head);
  }
};

// From the arguments of a kernel, which carry the same fields.
template <class Args>
PageLayer page_layer(const Args& a) {
  return {a.pool, a.page_bytes, a.layer_offset, a.page_size, a.kv_heads, a.head_dim, a.kind};
}

}  // namespace BIFOLIO_ISA
}  // namespace bifolio
