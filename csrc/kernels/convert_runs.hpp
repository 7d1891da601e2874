// Runs of numbers that share one scale on either side: the quick ways of AVX-512.
#pragma once

#include "kernels/convert_vectors.hpp"

#if defined(__AVX512F__)
namespace bifolio::BIFOLIO_ISA {

struct alignas(64) E4m3Tables {
  uint8_t mantissa[5][128] = {};  // of 2^-10, 2^-9, 2^-8, 2^-7 and up; of normal numbers
  uint8_t exponent[64] = {};
  uint8_t even[64] = {};

  constexpr E4m3Tables() {
    for (int step = 0; step < 5; ++step) {
      const int drop = 8 - step;
      for (int m = 0; m < 128; ++m) {
        // (128 + m) >> drop, half to even; of normal numbers the first bit does not count.
        const int whole = (128 + m) >> drop;
        const int rest = (128 + m) & ((1 << drop) - 1);
        const int half = 1 << (drop - 1);
        const int rounded = whole + (rest > half || (rest == half && whole % 2 == 1));
        mantissa[step][m] = static_cast<uint8_t>(step == 4 ? rounded - 8 : rounded);
      }
    }
    for (int i = 0; i < 64; ++i) {
      exponent[i] = static_cast<uint8_t>(i < 4 ? 0 : i < 20 ? 8 * (i - 4) : 0xf0);
      even[i] = static_cast<uint8_t>(2 * i);
    }
  }
};
inline constexpr E4m3Tables kE4m3Tables{};

// e4m3 of 64 bf16 numbers times a power of two. A code is a sum of what the exponent and what the
// mantissa adds, with the carry of rounding in it; below 2^-6 it is the mantissa's share alone.
class Bf16ToE4m3 {
 public:
  explicit Bf16ToE4m3(float inverse) {
    const int shift = static_cast<int>(__builtin_bit_cast(uint32_t, inverse) >> 23) - kBias;
    lowest_ = _mm512_set1_epi8(static_cast<char>(kFirst - 1 - shift));
    for (int i = 0; i < 5; ++i) {
      mantissa_[i][0] = _mm512_load_si512(kE4m3Tables.mantissa[i]);
      mantissa_[i][1] = _mm512_load_si512(kE4m3Tables.mantissa[i] + 64);
    }
    exponent_ = _mm512_load_si512(kE4m3Tables.exponent);
    low_ = _mm512_load_si512(kE4m3Tables.even);
    high_ = _mm512_add_epi8(low_, _mm512_set1_epi8(1));
  }

  void operator()(const uint8_t* numbers, uint8_t* codes) const {
    const __m512i a = _mm512_loadu_si512(numbers);
    const __m512i b = _mm512_loadu_si512(numbers + 64);
    const __m512i mantissa = _mm512_permutex2var_epi8(a, low_, b);  // bit 7 is the exponent's last
    const __m512i sign = _mm512_permutex2var_epi8(a, high_, b);
    const __m512i exponent = _mm512_permutex2var_epi8(_mm512_slli_epi16(a, 1), high_,
                                                      _mm512_slli_epi16(b, 1));
    // 0: rounds to 0 whatever the mantissa; 1 to 4: subnormal; 5 to 19: normal; 20: too large.
    const __m512i step = _mm512_min_epu8(_mm512_subs_epu8(exponent, lowest_), _mm512_set1_epi8(20));
    __m512i code = _mm512_permutex2var_epi8(mantissa_[4][0], mantissa, mantissa_[4][1]);
    for (int i = 0; i < 4; ++i) {
      const __mmask64 here = _mm512_cmpeq_epu8_mask(step, _mm512_set1_epi8(static_cast<char>(i + 1)));
      const __m512i found = _mm512_permutex2var_epi8(mantissa_[i][0], mantissa, mantissa_[i][1]);
      code = _mm512_mask_mov_epi8(code, here, found);
    }
    code = _mm512_maskz_add_epi8(_mm512_test_epi8_mask(step, step), code,
                                 _mm512_permutexvar_epi8(step, exponent_));
    code = _mm512_min_epu8(code, _mm512_set1_epi8(0x7e));
    const __mmask64 special = _mm512_cmpeq_epu8_mask(exponent, _mm512_set1_epi8(-1));
    const __mmask64 nan = _mm512_mask_test_epi8_mask(special, mantissa, _mm512_set1_epi8(0x7f));
    code = _mm512_mask_mov_epi8(code, nan, _mm512_set1_epi8(0x7f));
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    code = _mm512_ternarylogic_epi32(code, sign, _mm512_set1_epi8(static_cast<char>(0x80)), kOrAnd);
    _mm512_storeu_si512(codes, code);
  }

 private:
  static constexpr int kBias = 127;
  static constexpr int kFirst = 117;  // exponent of 2^-10, half the smallest code

  __m512i lowest_, low_, high_, exponent_;
  __m512i mantissa_[5][2];
};

// e4m3 of 64 bf16 numbers over any scale.
class ScaledBf16ToE4m3 {
 public:
  explicit ScaledBf16ToE4m3(float scale)
      : quotient_(Quotient::over(_mm512_set1_ps(1), _mm512_set1_ps(scale))) {}

  void operator()(const uint8_t* numbers, uint8_t* codes) const {
    const __m512i a = _mm512_loadu_si512(numbers);
    const __m512i b = _mm512_loadu_si512(numbers + 64);
    const __m512i made = round_.operator()<true>(within(a), within(b), quotient_, quotient_);
    const __mmask64 nan = _mm512_kunpackd(is_nan(b), is_nan(a));
    _mm512_storeu_si512(codes, _mm512_or_si512(made, _mm512_maskz_set1_epi8(nan, 0x7f)));
  }

 private:
  // What the inverse of a scale brings into float32.
  static __m512i within(__m512i numbers) {
    constexpr int16_t kMost = (127 + 64) << 7;  // 2^64
    return with_signs(_mm512_min_epu16(bf16_magnitudes(numbers), _mm512_set1_epi16(kMost)), numbers);
  }
  static __mmask32 is_nan(__m512i numbers) {
    return _mm512_cmpgt_epu16_mask(bf16_magnitudes(numbers), _mm512_set1_epi16(0x7f80));
  }

  Quotient quotient_;
  E4m3Rounding round_;
};

// Codes of codes: looked up, as there are only 128 magnitudes.
class E4m3ToE4m3 {
 public:
  E4m3ToE4m3(float from, float to) {
    alignas(64) uint8_t codes[128];
    alignas(64) uint8_t others[128];
    for (int i = 0; i < 128; ++i) codes[i] = static_cast<uint8_t>(i);
    convert({codes, others, kChunk, kChunk, 128 / kChunk}, kCacheFp8, ChunkScales::of(from), kCacheFp8,
            ChunkScales::of(to));
    for (int i = 0; i < 2; ++i) table_[i] = _mm512_load_si512(others + 64 * i);
  }

  void operator()(const uint8_t* source, uint8_t* target) const {
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    const __m512i code = _mm512_loadu_si512(source);
    const __m512i magnitude = _mm512_permutex2var_epi8(table_[0], code, table_[1]);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    _mm512_storeu_si512(target, _mm512_ternarylogic_epi32(magnitude, code, sign, kOrAnd));
  }

 private:
  __m512i table_[2];
};

// false where there is no quick way. Runs are a multiple of 64 numbers.
inline bool convert_run(const Chunks& c, int64_t source_kind, float from, int64_t target_kind,
                        float to) {
  const int64_t steps = c.count / 2;
  if (source_kind == kCacheBf16 && target_kind == kCacheFp8) {
    if (is_power_of_two(to)) {
      const Bf16ToE4m3 run(1 / to);
      for (int64_t i = 0; i < steps; ++i) run(c.source + 128 * i, c.target + 64 * i);
      return true;
    }
    if (!Quotient::can_use(to)) return false;
    const ScaledBf16ToE4m3 run(to);
    for (int64_t i = 0; i < steps; ++i) run(c.source + 128 * i, c.target + 64 * i);
    return true;
  }
  if (source_kind == kCacheFp8 && target_kind == kCacheBf16) {
    if (!(from > 0)) return false;
    const E4m3ToBf16 widen(from);
    for (int64_t i = 0; i < steps; ++i) {
      __m512i first, second;
      widen(c.source + 64 * i, first, second);
      _mm512_storeu_si512(c.target + 128 * i, first);
      _mm512_storeu_si512(c.target + 128 * i + 64, second);
    }
    return true;
  }
  if (source_kind == kCacheFp8 && target_kind == kCacheFp8 && from > 0 && to > 0) {
    const E4m3ToE4m3 run(from, to);
    for (int64_t i = 0; i < steps; ++i) run(c.source + 64 * i, c.target + 64 * i);
    return true;
  }
  return false;
}

}  // namespace bifolio::BIFOLIO_ISA
#endif
