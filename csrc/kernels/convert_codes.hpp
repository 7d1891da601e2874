// Codes to codes where tokens have scales of their own: the quick way of AVX-512.
#pragma once

#include "kernels/convert_vectors.hpp"

#if defined(__AVX512F__)
namespace bifolio::BIFOLIO_ISA {

namespace detail {

template <int kSize>
struct alignas(64) ByteTable {
  uint8_t byte[kSize] = {};

  template <class Fn>
  static constexpr ByteTable of(const Fn& fn) {
    ByteTable t;
    for (int i = 0; i < kSize; ++i) t.byte[i] = static_cast<uint8_t>(fn(i));
    return t;
  }
  __m512i at(int64_t first = 0) const { return _mm512_load_si512(byte + first); }
};

// A code's logarithm plus 16: of normal codes the code itself, of the 7 subnormal ones what it would
// be if exponents went on. 0 and NaN have none, but a mark.
inline constexpr int kLogarithmBias = 16;
inline constexpr int kNoLogarithm = 254;
inline constexpr auto kLogarithms = ByteTable<128>::of([](int code) {
  constexpr int kSubnormal[] = {kNoLogarithm, -16, -8, -4, 0, 2, 4, 6};
  if (code == 0 || code == 127) return kNoLogarithm;
  return (code < 8 ? kSubnormal[code] : code) + kLogarithmBias;
});

// [what was cut off][logarithm + 25]: the codes of -25 … 6, where steps are finer than codes.
inline constexpr int kLeast = -25;  // rounds to 0, and so does all that is below
inline constexpr auto kFine = ByteTable<128>::of([](int i) {
  const int logarithm = i % 32 + kLeast;
  const int octave = (logarithm + 32) / 8 - 4;              // 2^(octave - 1) codes to a step
  const int number = 4 * (8 + (logarithm & 7)) + i / 32;    // in quarters of a step
  const int shift = 3 - octave;
  const int half = 1 << (shift - 1);
  const int whole = number >> shift;
  const int rest = number & ((1 << shift) - 1);
  return whole + (rest > half || (rest == half && whole % 2 == 1));
});

// Of the last bit of a step and the 4 bits behind it, the last of which stands for all that follow:
// bits 4 to 7 of an entry of CodeScales.
inline constexpr auto kBehind = ByteTable<64>::of([](int i) {
  const int rest = i % 16;
  const int cut_off = (rest >= 8 ? 2 : 0) + (rest % 8 != 0);
  const bool up = rest > 8 || (rest == 8 && i / 16 % 2 == 1);
  return 0x80 | cut_off << 5 | up << 4;
});

}  // namespace detail

// Exponent and mantissa of a code, read as one integer, are a logarithm of 8 steps to the octave,
// straight between octaves. A quotient of scales adds to it the same in all octaves: something of
// its own, and up to 9 steps that depend on which of the 8 mantissas it meets. So a token needs a
// table of 8 bytes, made of the reference's own quotients:
//
//     bits 0 … 3  what the mantissa adds, cut off, plus 1
//     bit 4       whether the next step is nearer (half to even)
//     bits 5, 6   what was cut off: nothing, below a half, a half, above
//     bit 7       1: -128, which brings a sum without sign into the range of one with it
struct CodeScales {
  __m512i table[2];  // [token][mantissa]
  __m512i steps[2];  // [token] of 32 bits: what the quotient adds, in two parts of a byte

  static CodeScales over(__m512 from, __m512 to) {
    const Quotient quotient = Quotient::over(from, to);
    __m512i x[8];  // the upper half is the quotient, cut off
    for (int m = 0; m < 8; ++m) {
      constexpr int kOrAnd = 0xf8;  // a | (b & c)
      const __m512 code = _mm512_set1_ps(0x1p8F * 0x1p-6F * (1 + m / 8.0F));  // the first octave
      const __m512i all = _mm512_castps_si512(quotient(code));
      const __m512i carried = _mm512_add_epi32(all, _mm512_set1_epi32(0xffff));
      x[m] = _mm512_ternarylogic_epi32(all, carried, _mm512_set1_epi32(1 << 16), kOrAnd);
    }
    const __m512i lower = entries(x, 0);
    const __m512i upper = entries(x, 4);
    CodeScales s;
    for (int i = 0; i < 2; ++i) {
      const __m512i token = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const __m512i order = _mm512_add_epi32(token, _mm512_set1_epi32(8 * i));
      s.table[i] = _mm512_permutex2var_epi32(lower, order, upper);
    }
    constexpr int kBias = (127 - 7) * 8;  // of the exponents of float32 and e4m3
    const __m512i steps = _mm512_sub_epi32(_mm512_srli_epi32(x[0], 20), _mm512_set1_epi32(kBias));
    s.steps[0] = within_byte(steps);
    s.steps[1] = within_byte(_mm512_sub_epi32(steps, s.steps[0]));
    return s;
  }

  // Those of two chunks of keys: place i belongs to token i / 2 % 16.
  struct Keys {
    __m512i table[2], steps[2];

    __m512i of(__m512i logarithms) const {
      static constexpr auto kToken = detail::ByteTable<64>::of([](int i) { return i / 2 % 16 * 8; });
      return _mm512_permutex2var_epi8(table[0], index(logarithms, kToken.at()), table[1]);
    }
  };

  Keys keys() const {
    static constexpr auto kToken = detail::ByteTable<64>::of([](int i) { return i / 2 % 16 * 4; });
    return {{table[0], table[1]},
            {_mm512_permutexvar_epi8(kToken.at(), steps[0]),
             _mm512_permutexvar_epi8(kToken.at(), steps[1])}};
  }

  // Those of two chunks of values: place i belongs to token i % 2 of a pair.
  struct Values {
    __m512i table, steps[2];

    __m512i of(__m512i logarithms) const {
      static constexpr auto kToken = detail::ByteTable<64>::of([](int i) { return i % 2 * 8; });
      return _mm512_shuffle_epi8(table, index(logarithms, kToken.at()));
    }
  };

  Values values(int pair) const {
    static constexpr auto kEntry = detail::ByteTable<64>::of([](int i) { return i % 16; });
    static constexpr auto kToken = detail::ByteTable<64>::of([](int i) { return i % 2 * 4; });
    const auto behind = [](const auto& first, int bytes) {
      return _mm512_add_epi8(first.at(), _mm512_set1_epi8(static_cast<char>(bytes)));
    };
    const __m512i token = behind(kToken, 8 * pair);
    return {_mm512_permutex2var_epi8(table[0], behind(kEntry, 16 * pair), table[1]),
            {_mm512_permutexvar_epi8(token, steps[0]), _mm512_permutexvar_epi8(token, steps[1])}};
  }

 private:
  static __m512i index(__m512i logarithms, __m512i token) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    return _mm512_ternarylogic_epi32(logarithms, _mm512_set1_epi8(7), token, kAndOr);
  }

  static __m512i within_byte(__m512i x) {
    return _mm512_max_epi32(_mm512_min_epi32(x, _mm512_set1_epi32(127)), _mm512_set1_epi32(-128));
  }

  // The entries of mantissas first … first + 3, a byte each.
  static __m512i entries(const __m512i (&x)[8], int first) {
    constexpr int kChoose = 0xca;  // a ? b : c
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    const __m512i even_bytes = _mm512_set1_epi32(0x00ff00ff);
    __m512i added[2];
    __m512i behind[2];
    for (int i = 0; i < 2; ++i) {  // mantissas first + i and first + i + 2, a word each
      const int m = first + i;
      const __m512i words =
          _mm512_ternarylogic_epi32(upper, x[m + 2], _mm512_srli_epi32(x[m], 16), kChoose);
      const __m512i least =
          _mm512_ternarylogic_epi32(upper, x[0], _mm512_srli_epi32(x[0], 16), kChoose);
      const __m512i mantissa = _mm512_set1_epi32(((m - 1) & 0xffff) | (m + 1) << 16);
      added[i] = _mm512_sub_epi16(_mm512_srli_epi16(words, 4),
                                  _mm512_add_epi16(_mm512_srli_epi16(least, 4), mantissa));
      behind[i] = words;
    }
    const auto as_bytes = [&](const __m512i(&both)[2]) {
      return _mm512_ternarylogic_epi32(even_bytes, both[0], _mm512_slli_epi16(both[1], 8), kChoose);
    };
    const __m512i marks = _mm512_permutexvar_epi8(as_bytes(behind), detail::kBehind.at());
    return _mm512_or_si512(as_bytes(added), marks);
  }
};

// Codes of codes times one scale over another.
class CodeCoder {
 public:
  static constexpr int64_t kBytes = kChunk;
  using Scales = CodeScales;
  using Greatest = GreatestCode;

  // Of two chunks, the second one so many chunks behind.
  template <class TokenScales>  // Keys or Values of CodeScales
  void operator()(const uint8_t* source, uint8_t* target, int64_t behind,
                  const TokenScales& scales) const {
    const __m512i low = _mm512_castsi256_si512(load_chunk(source));
    const __m512i codes = _mm512_inserti64x4(low, load_chunk(source + behind * kChunk), 1);
    store_codes(recode(codes, scales), target, target + behind * kChunk);
  }

 private:
  template <class TokenScales>
  static __m512i recode(__m512i codes, const TokenScales& scales) {
    constexpr int kChoose = 0xca;  // a ? b : c
    const __m512i logarithms = lookup(detail::kLogarithms, codes);
    const __m512i entry = scales.of(logarithms);
    const __m512i added = _mm512_and_si512(entry, _mm512_set1_epi8(static_cast<char>(0x8f)));
    // The logarithm of the result less kZero, where bytes end: what is below saturates there.
    constexpr int kZero = detail::kLeast + 128;
    const __m512i sum = _mm512_adds_epi8(
        _mm512_adds_epi8(_mm512_add_epi8(logarithms, added), scales.steps[0]), scales.steps[1]);
    const __m512i fine = lookup(
        detail::kFine, _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x60), entry, sum, kChoose));
    const __m512i step = _mm512_add_epi8(sum, _mm512_set1_epi8(static_cast<char>(kZero)));
    const __mmask64 up = _mm512_test_epi8_mask(entry, _mm512_set1_epi8(0x10));
    // From 7 on, which becomes 8 whatever was cut off, a step is a code.
    const __m512i normal = _mm512_max_epu8(
        _mm512_mask_add_epi8(step, up, step, _mm512_set1_epi8(1)), _mm512_set1_epi8(8));
    const __mmask64 is_normal =
        _mm512_cmpge_epi8_mask(sum, _mm512_set1_epi8(static_cast<char>(7 - kZero)));
    const __m512i most = _mm512_set1_epi8(0x7e);
    const __m512i magnitude = _mm512_mask_min_epu8(fine, is_normal, normal, most);
    const __mmask64 special = _mm512_cmpge_epu8_mask(
        logarithms, _mm512_set1_epi8(static_cast<char>(detail::kNoLogarithm)));
    const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80));
    return _mm512_mask_mov_epi8(_mm512_ternarylogic_epi32(signs, codes, magnitude, kChoose), special,
                                codes);
  }

  static __m512i lookup(const detail::ByteTable<128>& table, __m512i index) {
    return _mm512_permutex2var_epi8(table.at(), index, table.at(64));
  }
};

}  // namespace bifolio::BIFOLIO_ISA
#endif
