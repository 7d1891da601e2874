// bf16 numbers to codes with a scale per token and back: keys of kTokens tokens, or values of two,
// in chunks as in convert_chunks.hpp.
#pragma once

#include "kernels/convert_chunks.hpp"

#if defined(__AVX512F__)
namespace bifolio::BIFOLIO_ISA {

// Greatest magnitudes of kTokens tokens, from bf16 to float32; NaN for a token that has one.
class Absmax {
 public:
  static __m512 of_keys(const Chunks& c) {
    const __m512i best = greatest(c.source, c.source_pitch, c.count);
    const __m512i odd =
        _mm512_and_si512(best, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(best, 16), odd));
  }

  // Of the values of tokens 0 and 1, and of the pairs that follow every `pair_bytes`.
  static __m512 of_values(const Chunks& c, int64_t pair_bytes) {
    __m512i x[kTokens / 2];  // [pair][place][2 tokens]
    for (int i = 0; i < kTokens / 2; ++i) {
      x[i] = greatest(c.source + i * pair_bytes, c.source_pitch, c.count);
    }
    // The 16 places of a pair are folded to one while the pairs are brought side by side.
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_max_epu16(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                              _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    }
    for (int i = 0; i < 2; ++i) {
      x[i] = _mm512_max_epu16(_mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]),
                              _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
    }
    const __m512i half = _mm512_max_epu16(_mm512_shuffle_i64x2(x[0], x[1], 0x44),
                                          _mm512_shuffle_i64x2(x[0], x[1], 0xee));
    const __m512i best = _mm512_max_epu16(_mm512_shuffle_i64x2(half, half, 0x88),
                                          _mm512_shuffle_i64x2(half, half, 0xdd));
    const __m512i words = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(best));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }

 private:
  // Of each place in the chunks, as bf16.
  static __m512i greatest(const uint8_t* chunk, int64_t pitch, int64_t count) {
    __m512i best = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; ++i, chunk += pitch) {
      best = _mm512_max_epu16(
          best, _mm512_and_si512(_mm512_loadu_si512(chunk), _mm512_set1_epi16(0x7fff)));
    }
    return best;
  }
};

// Codes of bf16 numbers over the fp16 scales of their tokens.
//
// The quotient needs no division. Where it is no tie of two codes, it is far from one: number,
// scale and tie have 8, 11 and 5 bits, so number and scale * tie are, in a common unit, different
// integers of at most 16 bits, and differ by 1. A product with the inverse is near enough, and is
// taken 2^-20 too large, so that it is never below a tie that it should be. In fp16, times 2^-8, it
// has the exponent of the code, of subnormal codes too, and 7 more bits of mantissa to round.
class TokenEncoder {
 public:
  TokenEncoder() {
    alignas(64) uint8_t upper[64];
    for (int i = 0; i < 64; ++i) {
      // Of 64 words: the even and the odd numbers of a chunk, then those of another.
      const int word = i / 32 * 32 + i % 2 * 16 + i % 32 / 2;
      upper[i] = static_cast<uint8_t>(2 * word + 1);
    }
    upper_ = _mm512_load_si512(upper);
    lower_ = _mm512_sub_epi8(upper_, _mm512_set1_epi8(1));
  }

  // Whether all is below infinity and no number beyond 448 scales, as scales end at 65504.
  static bool can_encode(__m512 absmax) {
    const __m512 limit = _mm512_set1_ps(448.0F * 65504.0F);
    return _mm512_cmp_ps_mask(absmax, limit, _CMP_LE_OQ) == 0xffff;
  }

  // token_scale_from_absmax of kTokens tokens that can be encoded.
  static __m256i scales(__m512 absmax) {
    const __m512 wanted = _mm512_div_ps(absmax, _mm512_set1_ps(448.0F));
    const __m256i scale = _mm512_cvtps_ph(wanted, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    const __mmask16 zero = _mm512_cmp_ps_mask(absmax, _mm512_setzero_ps(), _CMP_EQ_OQ);
    return _mm256_mask_mov_epi16(scale, zero, _mm256_set1_epi16(0x3c00));
  }

  // What their numbers are multiplied by.
  static __m512 factors(__m256i scales) {
    return _mm512_div_ps(_mm512_set1_ps(0x1p-8F * (1 + 0x1p-20F)), _mm512_cvtph_ps(scales));
  }

  // Chunks whose even and odd numbers have these factors; numbers `ahead` bytes on come next.
  void operator()(const Chunks& c, __m512 even, __m512 odd, int64_t ahead) const {
    for (int64_t i = 0; i < c.count; i += 2) {
      const int64_t other = i + 1 < c.count;  // else the last chunk twice
      const uint8_t* source = c.source + i * c.source_pitch;
      uint8_t* target = c.target + i * c.target_pitch;
      const __m512i a = _mm512_loadu_si512(source);
      const __m512i b = _mm512_loadu_si512(source + other * c.source_pitch);
      _mm_prefetch(source + ahead, _MM_HINT_T0);
      _mm_prefetch(source + other * c.source_pitch + ahead, _MM_HINT_T0);
      const __m512i codes = rounded(words(a, even, odd), words(b, even, odd));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_castsi512_si256(codes));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + other * c.target_pitch),
                          _mm512_extracti64x4_epi64(codes, 1));
    }
  }

 private:
  static constexpr int kOrAnd = 0xf8;   // a | (b & c)
  static constexpr int kChoose = 0xe4;  // c ? a : b

  // Products as fp16, cut off. Bit 17 says whether there was more: the lowest that fp16 keeps of
  // products down to half the least code. A tie's excess, of less than 64 units, does not set it.
  static __m256i cut(__m512i numbers, __m512 factors) {
    const __m512i sticky = _mm512_set1_epi32(1 << 17);
    const __m512i x = _mm512_castps_si512(_mm512_castsi512_ps(numbers) * factors);
    const __m512i carried = _mm512_add_epi32(x, _mm512_set1_epi32((1 << 17) - 64));
    const __m512i all = _mm512_ternarylogic_epi32(x, carried, sticky, kOrAnd);
    return _mm512_cvtps_ph(_mm512_castsi512_ps(all), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  }

  // Of even, then odd numbers: sign and code, cut off, in the upper byte of a word; in the lower
  // one what comes behind the code. (Below 2, fp16's first exponent bit is 0 and makes room.)
  static __m512i words(__m512i numbers, __m512 even, __m512 odd) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    const __m256i first = cut(_mm512_slli_epi32(numbers, 16), even);
    const __m256i second = cut(_mm512_and_si512(numbers, upper), odd);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    return _mm512_ternarylogic_epi32(both, _mm512_add_epi16(both, both),
                                     _mm512_set1_epi16(static_cast<int16_t>(0x8000)), kChoose);
  }

  // Codes of two chunks: up where the rest is above 0x80, or 0x80 and the code is odd.
  __m512i rounded(__m512i a, __m512i b) const {
    const __m512i one = _mm512_set1_epi8(1);
    const __m512i code = _mm512_permutex2var_epi8(a, upper_, b);
    const __m512i rest = _mm512_permutex2var_epi8(a, lower_, b);  // an even number
    const __mmask64 up =
        _mm512_cmpgt_epu8_mask(_mm512_ternarylogic_epi32(rest, code, one, kOrAnd),
                               _mm512_set1_epi8(static_cast<char>(0x80)));
    return _mm512_mask_add_epi8(code, up, code, one);
  }

  __m512i upper_, lower_;
};

// bf16 numbers of codes times scales: those of the codes alone are exact, and float32 holds the
// products, which are rounded once.
class TokenDecoder {
 public:
  TokenDecoder() {
    alignas(32) uint8_t order[kChunk];
    for (int i = 0; i < kChunk; ++i) order[i] = static_cast<uint8_t>(i % 2 * 16 + i / 2);
    order_ = _mm256_load_si256(reinterpret_cast<const __m256i*>(order));
  }

  // Chunks whose first and last 16 numbers have these scales.
  void operator()(const Chunks& c, __m512 first, __m512 last) const {
    for (int64_t i = 0; i < c.count; ++i) {
      const __m256i codes = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(c.source + i * c.source_pitch));
      // Number i in the lower half of a lane, number 16 + i in its upper half.
      const __m512i numbers = widen_(_mm256_permutexvar_epi8(order_, codes));
      const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
      const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16)) * first;
      const __m512 b = _mm512_castsi512_ps(_mm512_and_si512(numbers, upper)) * last;
      const __m512bh both = _mm512_cvtne2ps_pbh(b, a);
      std::memcpy(c.target + i * c.target_pitch, &both, sizeof both);
    }
  }

 private:
  E4m3ToBf16 widen_;
  __m256i order_;
};

}  // namespace bifolio::BIFOLIO_ISA
#endif
