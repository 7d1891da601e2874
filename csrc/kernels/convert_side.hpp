// Where the numbers that a conversion reads or writes stand, in chunks.
#pragma once

#include "kernels/convert_chunks.hpp"

namespace bifolio::BIFOLIO_ISA {

// One layer of one page.
struct Side {
  PageLayer pages;
  int64_t page;
  const float* k_static;  // [kv_heads] of this layer, or null for 1
  const float* v_static;

  bool token_scales() const { return pages.kind == kCacheFp8Token; }
  float k_scale(int64_t head) const { return k_static == nullptr ? 1.0F : k_static[head]; }
  float v_scale(int64_t head) const { return v_static == nullptr ? 1.0F : v_static[head]; }
};

// Tokens first … first + kTokens - 1 of the keys of a head; those that follow are the next chunks.
inline Chunks keys_of(const Side& from, const Side& to, int64_t head, int64_t first) {
  const auto at = [&](const Side& side) {
    return side.pages.k_codes(side.page, head) + 2 * first * side.pages.number_bytes();
  };
  const int64_t row = 2 * from.pages.page_size;
  return {at(from), at(to), row * from.pages.number_bytes(), row * to.pages.number_bytes(),
          from.pages.head_dim / 2};
}

// Tokens first and first + 1 of the values of a head; those that follow come behind them.
inline Chunks values_of(const Side& from, const Side& to, int64_t head, int64_t first) {
  const auto at = [&](const Side& side) {
    return side.pages.v_codes(side.page, head) +
           first * side.pages.head_dim * side.pages.number_bytes();
  };
  return {at(from), at(to), kChunk * from.pages.number_bytes(), kChunk * to.pages.number_bytes(),
          2 * from.pages.head_dim / kChunk};
}

}  // namespace bifolio::BIFOLIO_ISA
