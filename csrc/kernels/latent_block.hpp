// From pages of latents to the operands of one block of keys. Keys are copied (bf16 ones of a
// dense block are read in place), values are the transposed latents; both serve all heads.
#pragma once

#include "kernels/attention_block.hpp"
#include "kernels/latent_layer.hpp"

namespace bifolio::BIFOLIO_ISA {

namespace detail {

#if defined(__AVX512F__)
// out[p] = pairs of tokens 2p and 2p + 1 for 16 dimensions, from in[i] = dimensions 2i and 2i + 1 of
// 16 tokens.
inline void transpose_pairs(__m512i (&x)[8]) {
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (auto& row : x) row = _mm512_shuffle_epi8(row, order);
  // Now a transposition of 8 × 8 numbers of 64 bits.
  __m512i y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm512_unpacklo_epi64(x[i], x[i + 1]);      // columns 0 2 4 6
    y[i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 1]);  // columns 1 3 5 7
  }
  __m512i z[8];
  for (int half = 0; half < 2; ++half) {
    for (int odd = 0; odd < 2; ++odd) {
      const __m512i a = y[4 * half + odd];
      const __m512i b = y[4 * half + odd + 2];
      z[4 * half + odd] = _mm512_shuffle_i64x2(a, b, 0x88);      // columns odd, odd + 4
      z[4 * half + odd + 2] = _mm512_shuffle_i64x2(a, b, 0xdd);  // columns odd + 2, odd + 6
    }
  }
  for (int c = 0; c < 4; ++c) {
    x[c] = _mm512_shuffle_i64x2(z[c], z[c + 4], 0x88);
    x[c + 4] = _mm512_shuffle_i64x2(z[c], z[c + 4], 0xdd);
  }
}

// Pairs of bf16 times a scale for each lane, rounded to bf16.
inline __m512i scale_pairs(__m512i pairs, __m512 scales) {
  const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const __m512 high = _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
  const auto rounded = [&](__m512 x) {
    return _mm512_cvtepu16_epi32(
        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_mul_ps(x, scales))));
  };
  return _mm512_or_si512(rounded(low), _mm512_slli_epi32(rounded(high), 16));
}
#endif

}  // namespace detail

// `chosen` null: key i of a block stands at position first_key + i. Else at chosen[first_key + i].
template <class Dot>
class LatentReader {
 public:
  LatentReader(const LatentLayer& layer, const BlockMemory& memory)
      : layer_(layer), memory_(memory) {}

  void choose(const int64_t* positions) { chosen_ = positions; }

  void read(const int32_t* table, int64_t, int64_t first_key, int a, int b, Block& block) {
    for (int g = a / kGroup; g * kGroup < b; ++g) {
      // Keys of a group that are not seen are read where that costs nothing, and weigh nothing.
      const int count = b - g * kGroup < kGroup ? b - g * kGroup : kGroup;
      load_group(table, first_key + g * kGroup, count, g, block);
      block.next_k[g] = block.k[g];
      block.next_v[g] = block.v[g];
    }
  }

  void announce(const int32_t*, int64_t, int64_t, int, int, const Block&) const {}

 private:
  struct Place {
    int64_t page, slot;
  };

  int64_t dim() const { return layer_.kv_lora + layer_.rope; }

  Place place(const int32_t* table, int64_t key) const {
    const int64_t position = chosen_ == nullptr ? key : chosen_[key];
    return {table[position / layer_.page_size], position % layer_.page_size};
  }

  void load_group(const int32_t* table, int64_t key, int count, int g, Block& block) {
    Place places[kGroup];
    bool together = true;
    for (int i = 0; i < count; ++i) {
      places[i] = place(table, key + i);
      together = together && places[i].page == places[0].page &&
                 places[i].slot == places[0].slot + i && places[0].slot % kGroup == 0;
    }
    if constexpr (Dot::kPack == 2) {
      pairs_group(places, count, together, g, block);
    } else {
      float_group(places, count, g, block);
    }
  }

#if defined(__AVX512F__)
  // A vector is a pair of dimensions of 16 keys.
  void pairs_group(const Place (&places)[kGroup], int count, bool together, int g, Block& block) {
    __m512i* keys = reinterpret_cast<__m512i*>(memory_.k) + g * dim() / 2;
    const int64_t pitch = 2 * layer_.page_size;
    if (together && layer_.kind == kCacheBf16 && chosen_ == nullptr) {
      const uint8_t* first = layer_.latents(places[0].page) + 4 * places[0].slot;
      block.k[g] = reinterpret_cast<const char*>(first);
      block.k_step = 2 * pitch;
    } else {
      copy_keys(places, count, together, keys);
      block.k[g] = reinterpret_cast<const char*>(keys);
      block.k_step = sizeof(__m512i);
    }
    values_of(block.k[g], block.k_step, g, block);
  }

  void copy_keys(const Place (&places)[kGroup], int count, bool together, __m512i* keys) const {
    for (int64_t i = 0; i < layer_.kv_lora / 2; ++i) {
      __m512i x = load_pairs(layer_.kind, false, places, count, together, i);
      if (layer_.kind == kCacheFp8Token) {
        const int64_t group = 2 * i / LatentLayer::kGroupNumbers;
        x = detail::scale_pairs(x, load_scales(places, count, together, group));
      }
      _mm512_storeu_si512(keys + i, x);
    }
    keys += layer_.kv_lora / 2;
    for (int64_t i = 0; i < layer_.rope / 2; ++i) {
      const __m512i x = load_pairs(layer_.rope_kind(), true, places, count, together, i);
      _mm512_storeu_si512(keys + i, x);
    }
  }

  void values_of(const char* k, int64_t k_step, int g, Block& block) {
    auto* values = reinterpret_cast<uint32_t*>(memory_.v) + g * (kGroup / 2) * layer_.kv_lora;
    for (int64_t d = 0; d < layer_.kv_lora; d += kLanes) {
      __m512i x[8];
      for (int i = 0; i < 8; ++i) x[i] = _mm512_loadu_si512(k + (d / 2 + i) * k_step);
      detail::transpose_pairs(x);
      for (int p = 0; p < 8; ++p) _mm512_storeu_si512(values + p * layer_.kv_lora + d, x[p]);
    }
    block.v[g] = reinterpret_cast<const char*>(values);
    block.v_step = layer_.kv_lora * 4;
  }

  // Pair `i` of the latents, or of the rotated keys, of 16 tokens as bf16.
  __m512i load_pairs(int64_t kind, bool rope, const Place (&places)[kGroup], int count,
                     bool together, int64_t i) const {
    const int64_t bytes = LatentLayer::bytes_of(kind);
    const int64_t pitch = 2 * layer_.page_size * bytes;
    const auto at = [&](const Place& p) {
      return (rope ? layer_.keys(p.page) : layer_.latents(p.page)) + i * pitch + 2 * bytes * p.slot;
    };
    if (together) {
      return kind == kCacheBf16 ? _mm512_loadu_si512(at(places[0])) : widen_(at(places[0]));
    }
    alignas(64) uint32_t wide[kGroup] = {};
    alignas(32) uint16_t narrow[kGroup] = {};
    for (int j = 0; j < count; ++j) {
      if (kind == kCacheBf16) {
        std::memcpy(&wide[j], at(places[j]), 4);
      } else {
        std::memcpy(&narrow[j], at(places[j]), 2);
      }
    }
    return kind == kCacheBf16 ? _mm512_load_si512(wide) : widen_(narrow);
  }

  __m512 load_scales(const Place (&places)[kGroup], int count, bool together, int64_t group) const {
    if (together) {
      return _mm512_loadu_ps(layer_.scales(places[0].page) + group * layer_.page_size +
                             places[0].slot);
    }
    alignas(64) float scales[kGroup] = {};
    for (int j = 0; j < count; ++j) {
      scales[j] = layer_.scales(places[j].page)[group * layer_.page_size + places[j].slot];
    }
    return _mm512_load_ps(scales);
  }
#endif

  // Keys [dim][kBlock] and values [key][kv_lora] of floats.
  void float_group(const Place (&places)[kGroup], int count, int g, Block& block) {
    float* keys = memory_.k + g * kGroup;
    float* values = memory_.v + g * kGroup * layer_.kv_lora;
    const bool scaled = layer_.kind == kCacheFp8Token;
    for (int j = 0; j < count; ++j) {
      const auto [page, slot] = places[j];
      each_number(layer_.kind, layer_.latents(page), slot, layer_.kv_lora, [&](int64_t d, float x) {
        if (scaled) {
          const int64_t group = d / LatentLayer::kGroupNumbers;
          const float scale = layer_.scales(page)[group * layer_.page_size + slot];
          x = float_from_bf16(bf16_from_float(x * scale));
        }
        keys[d * kBlock + j] = x;
        values[j * layer_.kv_lora + d] = x;
      });
      each_number(layer_.rope_kind(), layer_.keys(page), slot, layer_.rope,
                  [&](int64_t d, float x) { keys[(layer_.kv_lora + d) * kBlock + j] = x; });
    }
    block.k[g] = reinterpret_cast<const char*>(keys);
    block.k_step = kBlock * sizeof(float);
    block.v[g] = reinterpret_cast<const char*>(values);
    block.v_step = layer_.kv_lora * static_cast<int64_t>(sizeof(float));
  }

  // Calls put(d, x) with each of one token's numbers in a plane [numbers / 2][page_size][2].
  template <class Put>
  void each_number(int64_t kind, const uint8_t* plane, int64_t slot, int64_t numbers,
                   const Put& put) const {
    const int64_t pair_bytes = 2 * LatentLayer::bytes_of(kind);
    for (int64_t i = 0; i < numbers / 2; ++i) {
      float even, odd;
      detail::split_pairs(kind, plane + (i * layer_.page_size + slot) * pair_bytes, 1, &even, &odd);
      put(2 * i, even);
      put(2 * i + 1, odd);
    }
  }

  LatentLayer layer_;
  BlockMemory memory_;
  const int64_t* chosen_ = nullptr;
#if defined(__AVX512F__)
  E4m3ToBf16 widen_;
#endif
};

}  // namespace bifolio::BIFOLIO_ISA
