// Numbers of pages, decoded and encoded a chunk at a time: what conversions are made of.
#pragma once

#include "kernels/fp8.hpp"
#include "kernels/page_layer.hpp"

namespace bifolio::BIFOLIO_ISA {

constexpr int kTokens = 16;          // that stand together in a page of any size
constexpr int kChunk = 2 * kTokens;  // numbers that are converted together
constexpr int kVectors = kChunk / kLanes;

inline bool is_power_of_two(float x) {
  constexpr uint32_t kMantissa = 0x7fffff;
  return (__builtin_bit_cast(uint32_t, x) & kMantissa) == 0 && x > 0x1p-100F && x < 0x1p100F;
}

// The scales of the numbers of a chunk, one each. In a chunk of keys, number i belongs to token
// i / 2 of 16; in one of values, to token i % 2 of 2.
struct ChunkScales {
  float scale[kChunk];
  float inverse[kChunk];  // 1 / scale
  bool exact = false;     // each inverse is an exact power of two
  float all = 0;          // the scale of every number, if they share one; else 0

  // The same for all numbers.
  static ChunkScales of(float scale) {
    ChunkScales s;
    for (int i = 0; i < kChunk; ++i) {
      s.scale[i] = scale;
      s.inverse[i] = 1 / scale;
    }
    s.all = scale;
    s.exact = is_power_of_two(scale);
    return s;
  }

  // One for each number: scale_of(i).
  template <class Fn>
  static ChunkScales each(const Fn& scale_of) {
    ChunkScales s;
    for (int i = 0; i < kChunk; ++i) s.scale[i] = scale_of(i);
    for (int i = 0; i < kChunk; i += kLanes) store(s.inverse + i, 1 / load(s.scale + i));
    return s;
  }
};

// A pass over chunks that share their scales.
struct Chunks {
  const uint8_t* source;
  uint8_t* target;
  int64_t source_pitch, target_pitch;  // bytes from chunk to chunk
  int64_t count;
};

template <CacheKind kKind>
struct KindConstant {
  static constexpr CacheKind value = kKind;
};

// Calls fn with a kind as a constant. Codes with a scale per token are codes like others.
template <class Fn>
[[gnu::always_inline]] inline void with_kind(int64_t kind, const Fn& fn) {
  switch (kind) {
    case kCacheFp32: return fn(KindConstant<kCacheFp32>{});
    case kCacheBf16: return fn(KindConstant<kCacheBf16>{});
    default: return fn(KindConstant<kCacheFp8>{});
  }
}

namespace detail {

using Numbers = Lanes[kVectors];

// A vector's worth of codes.
using Halves [[gnu::vector_size(2 * kLanes)]] = uint16_t;
using Bytes [[gnu::vector_size(kLanes)]] = uint8_t;

// x / scale, rounded once, from the scale's inverse.
[[gnu::always_inline]] inline Lanes divide(Lanes x, Lanes scale, Lanes inverse) {
#if defined(__AVX2__)
  // Markstein: with the inverse rounded to nearest, one correction gives the rounded quotient.
  // (Not where that is infinite; and of results that are no normal numbers, where e4m3 is 0 anyway.)
  const Lanes near = x * inverse;
  const Lanes quotient = fma(fma(-near, scale, x), inverse, near);
  const IntLanes sign = bits(x) & static_cast<int32_t>(0x80000000);  // which a zero would lose
  const Lanes signed_quotient = from_bits((bits(quotient) & 0x7fffffff) | sign);
  return (bits(near) & 0x7fffffff) < 0x7f800000 ? signed_quotient : near;
#else
  (void)inverse;
  return x / scale;
#endif
}

template <CacheKind kKind>
[[gnu::always_inline]] inline void decode(const uint8_t* codes, const ChunkScales& scales,
                                          Numbers& x) {
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kKind == kCacheFp32) {
      std::memcpy(&x[v], codes + v * sizeof(Lanes), sizeof(Lanes));
    } else if constexpr (kKind == kCacheBf16) {
      x[v] = from_bits(load_halves(codes + v * sizeof(Halves)) << 16);
    } else {
      x[v] = lanes_from_e4m3(load_bytes(codes + v * sizeof(Bytes))) *
             load(scales.scale + v * kLanes);
    }
  }
}

template <CacheKind kKind, bool kExact>
[[gnu::always_inline]] inline void encode(const Numbers& x, const ChunkScales& scales,
                                          uint8_t* codes) {
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kKind == kCacheFp32) {
      std::memcpy(codes + v * sizeof(Lanes), &x[v], sizeof(Lanes));
    } else if constexpr (kKind == kCacheBf16) {
      const auto packed = __builtin_convertvector(bits(round_to_bf16(x[v])) >> 16, Halves);
      std::memcpy(codes + v * sizeof packed, &packed, sizeof packed);
    } else {
      const Lanes inverse = load(scales.inverse + v * kLanes);
      const Lanes scaled =
          kExact ? x[v] * inverse : divide(x[v], load(scales.scale + v * kLanes), inverse);
      const auto packed = __builtin_convertvector(e4m3_from_lanes(scaled), Bytes);
      std::memcpy(codes + v * sizeof packed, &packed, sizeof packed);
    }
  }
}

template <CacheKind kSource, CacheKind kTarget, bool kExact>
void convert_each(const Chunks& c, const ChunkScales& from, const ChunkScales& to) {
  for (int64_t i = 0; i < c.count; ++i) {
    Numbers x;
    decode<kSource>(c.source + i * c.source_pitch, from, x);
    encode<kTarget, kExact>(x, to, c.target + i * c.target_pitch);
  }
}

#if defined(__AVX512F__)
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
#endif

// The quick ways for runs of numbers that share one scale; false where there is none.
inline bool convert_run(const Chunks& c, int64_t source_kind, const ChunkScales& from,
                        int64_t target_kind, const ChunkScales& to) {
  const bool dense = c.source_pitch == kChunk * (source_kind == kCacheBf16 ? 2 : 1) &&
                     c.target_pitch == kChunk * (target_kind == kCacheBf16 ? 2 : 1);
  if (!dense || c.count % 2 != 0) return false;
#if defined(__AVX512F__)
  const int64_t steps = c.count / 2;
  if (source_kind == kCacheBf16 && target_kind == kCacheFp8 && to.exact) {
    const Bf16ToE4m3 run(to.inverse[0]);
    for (int64_t i = 0; i < steps; ++i) run(c.source + 128 * i, c.target + 64 * i);
    return true;
  }
  if (source_kind == kCacheFp8 && target_kind == kCacheBf16 && from.all != 0) {
    const E4m3ToBf16 widen(from.all);
    for (int64_t i = 0; i < steps; ++i) {
      __m512i first, second;
      widen(c.source + 64 * i, first, second);
      _mm512_storeu_si512(c.target + 128 * i, first);
      _mm512_storeu_si512(c.target + 128 * i + 64, second);
    }
    return true;
  }
#else
  (void)from;
  (void)to;
#endif
  return false;
}

}  // namespace detail

// Kinds name codes here: kCacheFp8 also stands for those with a scale per token.
inline void convert(const Chunks& c, int64_t source_kind, const ChunkScales& from,
                    int64_t target_kind, const ChunkScales& to) {
  if (source_kind == target_kind && source_kind != kCacheFp8) {
    const int64_t bytes = kChunk * (source_kind == kCacheFp32 ? 4 : 2);
    for (int64_t i = 0; i < c.count; ++i) {
      std::memcpy(c.target + i * c.target_pitch, c.source + i * c.source_pitch,
                  static_cast<size_t>(bytes));
    }
    return;
  }
  if (detail::convert_run(c, source_kind, from, target_kind, to)) return;
  with_kind(source_kind, [&](auto source) {
    with_kind(target_kind, [&](auto target) {
      if (to.exact) {
        detail::convert_each<source.value, target.value, true>(c, from, to);
      } else {
        detail::convert_each<source.value, target.value, false>(c, from, to);
      }
    });
  });
}

// Greatest magnitude of each number's place in the chunks, NaN left out.
inline void greatest(const Chunks& c, int64_t kind, const ChunkScales& scales,
                     float (&most)[kChunk]) {
  detail::Numbers best = {};
  with_kind(kind, [&](auto source) {
    for (int64_t i = 0; i < c.count; ++i) {
      detail::Numbers x;
      detail::decode<source.value>(c.source + i * c.source_pitch, scales, x);
      for (int v = 0; v < kVectors; ++v) best[v] = max(abs(x[v]), best[v]);
    }
  });
  for (int v = 0; v < kVectors; ++v) store(most + v * kLanes, best[v]);
}

}  // namespace bifolio::BIFOLIO_ISA
