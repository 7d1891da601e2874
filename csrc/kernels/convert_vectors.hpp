// The quick ways of AVX-512 between bf16 and e4m3: what 64 numbers, or two chunks, go through.
#pragma once

#include "kernels/convert_chunks.hpp"

#if defined(__AVX512F__)
namespace bifolio::BIFOLIO_ISA {

inline __m256i load_chunk(const uint8_t* codes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
}

inline void store_codes(__m512i codes, uint8_t* first, uint8_t* second) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_castsi512_si256(codes));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm512_extracti64x4_epi64(codes, 1));
}

inline __m512 even_numbers(__m512i chunk) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(chunk, 16));
}

inline __m512 odd_numbers(__m512i chunk) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(chunk, upper));
}

inline __m512i bf16_magnitudes(__m512i chunk) {
  return _mm512_and_si512(chunk, _mm512_set1_epi16(0x7fff));
}

// Words of which the first bit is that of others.
inline __m512i with_signs(__m512i words, __m512i others) {
  constexpr int kChoose = 0xe4;  // c ? a : b
  return _mm512_ternarylogic_epi32(others, words, _mm512_set1_epi16(static_cast<int16_t>(0x8000)),
                                   kChoose);
}

// The greatest magnitude at each place of chunks, as bf16.
class GreatestBf16 {
 public:
  void take(const uint8_t* chunk) {
    best_ = _mm512_max_epu16(best_, bf16_magnitudes(_mm512_loadu_si512(chunk)));
  }
  __m512i result(const E4m3ToBf16&) const { return best_; }

 private:
  __m512i best_ = _mm512_setzero_si512();
};

class GreatestCode {
 public:
  void take(const uint8_t* chunk) {
    best_ = _mm256_max_epu8(best_, _mm256_and_si256(load_chunk(chunk), _mm256_set1_epi8(0x7f)));
  }
  __m512i result(const E4m3ToBf16& widen) const { return widen(best_); }

 private:
  __m256i best_ = _mm256_setzero_si256();
};

// Greatest magnitudes of kTokens tokens in float32, NaN for a token that has one, from those of the
// places in their chunks.
inline __m512 absmax_of_keys(__m512i places) {
  const __m512i odd = _mm512_castps_si512(odd_numbers(places));
  return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(places, 16), odd));
}

inline __m512 absmax_of_values(__m512i (&x)[kTokens / 2]) {  // [pair][place][2 tokens]
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

// Whether a scale of each token can be found: all is below infinity and no number beyond 448 scales,
// as scales end at 65504.
inline bool has_token_scales(__m512 absmax) {
  const __m512 limit = _mm512_set1_ps(448.0F * 65504.0F);
  return _mm512_cmp_ps_mask(absmax, limit, _CMP_LE_OQ) == 0xffff;
}

// token_scale_from_absmax of such tokens.
inline __m256i token_scales(__m512 absmax) {
  const __m512 wanted = _mm512_div_ps(absmax, _mm512_set1_ps(448.0F));
  const __m256i scale = _mm512_cvtps_ph(wanted, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  const __mmask16 zero = _mm512_cmp_ps_mask(absmax, _mm512_setzero_ps(), _CMP_EQ_OQ);
  return _mm256_mask_mov_epi16(scale, zero, _mm256_set1_epi16(0x3c00));
}

// Quotients by scales, and 2^-8 of that. Codes only ask on which side of each tie of two codes they
// are, ties being numbers of 5 bits.

// Of bf16 numbers by scales of fp16. Where the quotient is no tie, it is far from one: number, scale
// and tie have 8, 11 and 5 bits, so number and scale * tie are, in a common unit, different integers
// of at most 16 bits, and differ by 1. A product with the inverse is near enough, and is taken 2^-20
// too large, so that it is never below a tie that it should be.
struct Product {
  static constexpr int32_t kExcess = 64;  // units of float32, more than a tie has

  __m512 factor;

  static Product over(__m512 to) {
    return {_mm512_div_ps(_mm512_set1_ps(0x1p-8F * (1 + 0x1p-20F)), to)};
  }
  __m512 operator()(__m512 x) const { return x * factor; }
};

// Of any number times a scale by another. The product with the inverse is a unit off at most where
// the quotient rounds to a tie. What it is off by is exact there, and its correction crosses the
// middle between the tie and its neighbour only if the quotient does, which is never in it.
struct Quotient {
  static constexpr int32_t kExcess = 1;

  __m512 from, to, inverse;

  // No float32 on the way overflows or is subnormal where its code is not 0.
  static bool can_use(float scale) { return scale > 0x1p-50F && scale < 0x1p50F; }

  static Quotient over(__m512 from, __m512 to) {
    const __m512 wide = to * _mm512_set1_ps(0x1p8F);
    return {from, wide, _mm512_div_ps(_mm512_set1_ps(1), wide)};
  }
  __m512 operator()(__m512 x) const {
    const __m512 product = x * from;
    const __m512 near = product * inverse;
    const __m512 excess = _mm512_fmsub_ps(near, to, product);  // so that a zero keeps its sign
    return _mm512_fnmadd_ps(excess, inverse, near);
  }
};

// Codes of numbers over scales. In fp16, times 2^-8, a number has the exponent of its code, of
// subnormal codes too, and 7 more bits of mantissa to round.
class E4m3Rounding {
 public:
  E4m3Rounding() {
    alignas(64) uint8_t upper[64];
    for (int i = 0; i < 64; ++i) {
      // Of 64 words: the even and the odd numbers of a chunk, then those of another.
      const int word = i / 32 * 32 + i % 2 * 16 + i % 32 / 2;
      upper[i] = static_cast<uint8_t>(2 * word + 1);
    }
    upper_ = _mm512_load_si512(upper);
    lower_ = _mm512_sub_epi8(upper_, _mm512_set1_epi8(1));
  }

  // Of two chunks whose even and odd numbers are divided so. `kClamp`: beyond 448 is 448, a NaN too;
  // else there must be neither.
  template <bool kClamp, class Division>
  __m512i operator()(__m512i first, __m512i second, const Division& even, const Division& odd) const {
    const __m512i a = words<kClamp>(first, even, odd);
    const __m512i b = words<kClamp>(second, even, odd);
    const __m512i one = _mm512_set1_epi8(1);
    const __m512i code = _mm512_permutex2var_epi8(a, upper_, b);
    const __m512i rest = _mm512_permutex2var_epi8(a, lower_, b);  // an even number
    // Up where the rest is above 0x80, or 0x80 and the code is odd.
    const __mmask64 up =
        _mm512_cmpgt_epu8_mask(_mm512_ternarylogic_epi32(rest, code, one, kOrAnd),
                               _mm512_set1_epi8(static_cast<char>(0x80)));
    return _mm512_mask_add_epi8(code, up, code, one);
  }

 private:
  static constexpr int kOrAnd = 0xf8;  // a | (b & c)

  // Numbers as fp16, cut off. Bit 17 says whether there was more: the lowest that fp16 keeps of
  // numbers down to half the least code. A tie's excess does not set it.
  template <int32_t kExcess>
  static __m256i cut(__m512 numbers) {
    const __m512i sticky = _mm512_set1_epi32(1 << 17);
    const __m512i x = _mm512_castps_si512(numbers);
    const __m512i carried = _mm512_add_epi32(x, _mm512_set1_epi32((1 << 17) - kExcess));
    const __m512i all = _mm512_ternarylogic_epi32(x, carried, sticky, kOrAnd);
    return _mm512_cvtps_ph(_mm512_castsi512_ps(all), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  }

  // Of even, then odd numbers: sign and code, cut off, in the upper byte of a word; in the lower
  // one what comes behind the code. (Below 2, fp16's first exponent bit is 0 and makes room.)
  template <bool kClamp, class Division>
  static __m512i words(__m512i numbers, const Division& even, const Division& odd) {
    const __m256i first = cut<Division::kExcess>(even(even_numbers(numbers)));
    const __m256i second = cut<Division::kExcess>(odd(odd_numbers(numbers)));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    __m512i magnitude = _mm512_add_epi16(both, both);
    if constexpr (kClamp) magnitude = _mm512_min_epu16(magnitude, _mm512_set1_epi16(0x7e00));
    return with_signs(magnitude, both);
  }

  __m512i upper_, lower_;
};

// Codes of bf16 numbers over the scales of their tokens, with which none is beyond 448.
class Bf16Coder {
 public:
  static constexpr int64_t kBytes = 2 * kChunk;
  using Greatest = GreatestBf16;

  struct Scales {
    __m512 factors;

    struct Pair {
      Product even, odd;
    };
    static Scales over(__m512, __m512 to) { return {Product::over(to).factor}; }
    Pair keys() const { return {{factors}, {factors}}; }
    Pair values(int pair) const {
      return {{_mm512_set1_ps(factors[2 * pair])}, {_mm512_set1_ps(factors[2 * pair + 1])}};
    }
  };

  // Of two chunks, the second one so many chunks behind.
  void operator()(const uint8_t* source, uint8_t* target, int64_t behind,
                  const Scales::Pair& scales) const {
    const __m512i first = _mm512_loadu_si512(source);
    const __m512i second = _mm512_loadu_si512(source + behind * kBytes);
    store_codes(round_.operator()<false>(first, second, scales.even, scales.odd), target,
                target + behind * kChunk);
  }

 private:
  E4m3Rounding round_;
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

  // A chunk whose first and last 16 numbers have these scales.
  void operator()(const uint8_t* source, uint8_t* target, __m512 first, __m512 last) const {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    // Number i in the lower half of a lane, number 16 + i in its upper half.
    const __m512i numbers = widen_(_mm256_permutexvar_epi8(order_, codes));
    const __m512bh both =
        _mm512_cvtne2ps_pbh(odd_numbers(numbers) * last, even_numbers(numbers) * first);
    std::memcpy(target, &both, sizeof both);
  }

 private:
  E4m3ToBf16 widen_;
  __m256i order_;
};

}  // namespace bifolio::BIFOLIO_ISA
#endif
