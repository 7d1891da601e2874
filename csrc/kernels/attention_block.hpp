// From pages to the operands of one block of keys: in place where a page already holds them, else
// unpacked into memory of the thread.
#pragma once

#include "kernels/attention_dot.hpp"
#include "kernels/fp8.hpp"
#include "kernels/page_layer.hpp"

namespace bifolio::BIFOLIO_ISA {

// Memory for an unpacked block, and the scales of its keys (kCacheFp8Token).
struct BlockMemory {
  float* k;        // [head_dim][kBlock] or pairs of bf16
  float* v;        // [kBlock][head_dim] or pairs of bf16
  float* k_scale;  // [kBlock]
  float* v_scale;  // [kBlock]
};

namespace detail {

// n pairs of numbers to two rows of floats.
inline void split_pairs(int64_t kind, const uint8_t* pairs, int64_t n, float* even, float* odd) {
  for (int64_t i = 0; i < n; ++i) {
    if (kind == kCacheFp32) {
      std::memcpy(even + i, pairs + 8 * i, 4);
      std::memcpy(odd + i, pairs + 8 * i + 4, 4);
    } else if (kind == kCacheBf16) {
      uint32_t pair;
      std::memcpy(&pair, pairs + 4 * i, 4);
      even[i] = __builtin_bit_cast(float, pair << 16);
      odd[i] = __builtin_bit_cast(float, pair & 0xffff0000);
    } else {
      even[i] = float_from_e4m3(pairs[2 * i]);
      odd[i] = float_from_e4m3(pairs[2 * i + 1]);
    }
  }
}

}  // namespace detail

// Turns keys [a, b) of a block into operands, in whole groups. `table` is the row's block table;
// entries of pages that hold none of these keys are not looked at.
template <class Dot>
class BlockReader {
 public:
  BlockReader(const PageLayer& pages, const BlockMemory& memory) : pages_(pages), memory_(memory) {}

  void read(const int32_t* table, int64_t head, int64_t first_key, int a, int b, Block& block) {
    for (int g = a / kGroup; g * kGroup < b; ++g) {
      const auto [page, slot, k, v] = locate(table, head, first_key + g * kGroup);
      place(g, k, v, block);
      block.next_k[g] = block.k[g];
      block.next_v[g] = block.v[g];
      if (pages_.kind == kCacheFp8Token) {
        for (int i = 0; i < kGroup; ++i) {
          const int64_t at = g * kGroup + i;
          memory_.k_scale[at] = float_from_half(pages_.k_scales(page, head)[slot + i]);
          memory_.v_scale[at] = float_from_half(pages_.v_scales(page, head)[slot + i]);
        }
      }
    }
  }

  // Notes where the codes of the block behind this one stand, if they will be read in place.
  void announce(const int32_t* table, int64_t head, int64_t first_key, int a, int b, Block& block) {
    if (!in_place()) return;
    for (int g = a / kGroup; g * kGroup < b; ++g) {
      const Codes codes = locate(table, head, first_key + g * kGroup);
      block.next_k[g] = reinterpret_cast<const char*>(codes.k);
      block.next_v[g] = reinterpret_cast<const char*>(codes.v);
    }
  }

 private:
  // Where 16 keys and their values begin.
  struct Codes {
    int64_t page, slot;
    const uint8_t* k;
    const uint8_t* v;
  };

  Codes locate(const int32_t* table, int64_t head, int64_t key) const {
    const int64_t page = table[key / pages_.page_size];
    const int64_t slot = key % pages_.page_size;
    const int64_t bytes = pages_.number_bytes();
    return {page, slot, pages_.k_codes(page, head) + 2 * slot * bytes,
            pages_.v_codes(page, head) + slot * pages_.head_dim * bytes};
  }

  // Whether a vector of 16 pairs is one of codes, and not of codes to be widened first.
  bool in_place() const {
    return Dot::kPack == 2 && Dot::kVectorBytes == 2 * kGroup * pages_.number_bytes();
  }

  void place(int g, const uint8_t* k, const uint8_t* v, Block& block) {
    const int64_t dim = pages_.head_dim;
    const int64_t pitch = 2 * pages_.page_size * pages_.number_bytes();
    const int64_t pair_bytes = 2 * dim * pages_.number_bytes();
    if constexpr (Dot::kPack == 2) {
      if (in_place()) {
        block.k[g] = reinterpret_cast<const char*>(k);
        block.k_step = pitch;
        block.v[g] = reinterpret_cast<const char*>(v);
        block.v_step = pair_bytes;
      } else {
        widen(g, k, pitch, v, block);
      }
    } else {
      float* keys = memory_.k + g * kGroup;
      for (int64_t i = 0; i < dim / 2; ++i) {
        detail::split_pairs(pages_.kind, k + i * pitch, kGroup, keys + 2 * i * kBlock,
                            keys + (2 * i + 1) * kBlock);
      }
      float* values = memory_.v + g * kGroup * dim;
      for (int64_t i = 0; i < kGroup / 2; ++i) {
        detail::split_pairs(pages_.kind, v + i * pair_bytes, dim, values + 2 * i * dim,
                            values + (2 * i + 1) * dim);
      }
      block.k[g] = reinterpret_cast<const char*>(keys);
      block.k_step = kBlock * sizeof(float);
      block.v[g] = reinterpret_cast<const char*>(values);
      block.v_step = dim * static_cast<int64_t>(sizeof(float));
    }
  }

  void widen([[maybe_unused]] int g, [[maybe_unused]] const uint8_t* k,
             [[maybe_unused]] int64_t pitch, [[maybe_unused]] const uint8_t* v,
             [[maybe_unused]] Block& block) {
#if defined(__AVX512F__)
    constexpr int kCodes = 2 * kGroup;
    const int64_t numbers = kGroup * pages_.head_dim;
    uint16_t* keys = reinterpret_cast<uint16_t*>(memory_.k) + g * numbers;
    uint16_t* values = reinterpret_cast<uint16_t*>(memory_.v) + g * numbers;
    const auto widen_two = [&](const uint8_t* codes, uint16_t* out) {
      __m512i first, second;
      widen_(codes, first, second);
      _mm512_storeu_si512(out, first);
      _mm512_storeu_si512(out + kCodes, second);
    };
    if (pitch == kCodes) {
      for (int64_t i = 0; i < numbers; i += 2 * kCodes) widen_two(k + i, keys + i);
    } else {
      for (int64_t i = 0; i < numbers / kCodes; ++i) {
        _mm512_storeu_si512(keys + i * kCodes, widen_(k + i * pitch));
      }
    }
    for (int64_t i = 0; i < numbers; i += 2 * kCodes) widen_two(v + i, values + i);
    block.k[g] = reinterpret_cast<const char*>(keys);
    block.k_step = kCodes * sizeof(uint16_t);
    block.v[g] = reinterpret_cast<const char*>(values);
    block.v_step = 2 * pages_.head_dim * static_cast<int64_t>(sizeof(uint16_t));
#endif
  }

  PageLayer pages_;
  BlockMemory memory_;
#if defined(__AVX512F__)
  E4m3ToBf16 widen_;
#endif
};

}  // namespace bifolio::BIFOLIO_ISA
