// float8 e4m3fn and float16, read and written one by one and by the vector.
#pragma once

#include <cstdint>

#include "kernels/lanes.hpp"

namespace bifolio::BIFOLIO_ISA {

inline float float_from_e4m3(uint8_t code) {
  // Shifted up, exponent and mantissa are those of a float32 but for the bias. Subnormal codes are
  // read one binade up, as 1.mmm, and lose that 1; no float32 on the way is subnormal.
  const uint32_t u = static_cast<uint32_t>(code & 0x7f) << 20;
  const float normal = __builtin_bit_cast(float, u + (120U << 23));
  const float subnormal = __builtin_bit_cast(float, u + (121U << 23)) - 0x1p-6F;
  const float magnitude = u < (1U << 23) ? subnormal : normal;
  const float value = (code & 0x7f) == 0x7f ? __builtin_nanf("") : magnitude;
  return code & 0x80 ? -value : value;
}

// The same of codes in the low byte of each lane, the other bytes zero.
inline Lanes lanes_from_e4m3(IntLanes code) {
  const IntLanes u = (code & 0x7f) << 20;
  const Lanes normal = from_bits(u + (120 << 23));
  const Lanes subnormal = from_bits(u + (121 << 23)) - 0x1p-6F;
  const Lanes magnitude = u < (1 << 23) ? subnormal : normal;
  const IntLanes value = (code & 0x7f) == 0x7f ? splat(0x7fc00000) : bits(magnitude);
  return from_bits(value | (code & 0x80) << 24);
}

// Clamp to ±448, round to nearest even, NaN stays NaN: codes in the low byte of each lane.
inline IntLanes e4m3_from_lanes(Lanes x) {
  constexpr int32_t kMax = 0x43e00000;  // 448
  constexpr int32_t kInfinity = 0x7f800000;
  constexpr int32_t kLeastNormal = 0x3c800000;  // 2^-6
  constexpr float kSubnormalUnit = 0x1p14F;     // its last mantissa bit is worth 2^-9
  const IntLanes magnitude = bits(x) & 0x7fffffff;
  const IntLanes u = magnitude < kMax ? magnitude : splat(kMax);
  // Normal numbers: drop 20 bits, half to even, and move the exponent's bias from 127 to 7.
  const IntLanes normal = ((u + (u >> 20 & 1)) + (0x7ffff - (120 << 23))) >> 20;
  const IntLanes subnormal = bits(from_bits(u) + kSubnormalUnit) - bits(splat(kSubnormalUnit));
  const IntLanes code = u < kLeastNormal ? subnormal : normal;
  const IntLanes sign = bits(x) >> 24 & 0x80;
  return (code - (magnitude > kInfinity)) | sign;  // a comparison is -1 where it holds
}

inline uint8_t e4m3_from_float(float x) {
  return static_cast<uint8_t>(e4m3_from_lanes(splat(x))[0]);
}

inline float float_from_half(uint16_t h) {
  // Shifted up, exponent and mantissa mean value * 2^-112 (subnormals too).
  const uint32_t magnitude_bits = static_cast<uint32_t>(h & 0x7fff) << 13;
  const float magnitude = __builtin_bit_cast(float, magnitude_bits) * 0x1p112F;
  const float special = __builtin_bit_cast(float, magnitude_bits | 0x7f800000);
  const float value = (h & 0x7c00) == 0x7c00 ? special : magnitude;
  return h & 0x8000 ? -value : value;
}

// The scale of a token whose greatest magnitude is `absmax`: the smallest fp16 number that is not
// below absmax / 448, at most 65504; 1 for zero.
inline uint16_t token_scale_from_absmax(float absmax) {
  constexpr float kMax = 448.0F;
  constexpr float kHalfMax = 65504.0F;
  constexpr uint16_t kOne = 0x3c00;
  if (absmax == 0) return kOne;
  const float wanted = absmax / kMax < kHalfMax ? absmax / kMax : kHalfMax;
  // Rounding up: subnormals count units of 2^-24, normal numbers keep 10 bits of the mantissa.
  if (wanted < 0x1p-14F) {
    const float units = wanted * 0x1p24F;
    const auto whole = static_cast<int32_t>(units);
    return static_cast<uint16_t>(whole + (static_cast<float>(whole) < units));
  }
  const auto u = __builtin_bit_cast(uint32_t, wanted);
  return static_cast<uint16_t>(((u + 0x1fff) >> 13) - (112 << 10));
}

#if defined(__AVX512F__)
// The bf16 numbers of the 128 magnitudes, as low and high bytes.
struct alignas(64) Bf16OfE4m3 {
  uint8_t low[128] = {};
  uint8_t high[128] = {};

  constexpr Bf16OfE4m3() {
    for (int code = 0; code < 128; ++code) {
      int number = (code << 4) + (120 << 7);  // but for the bias, exponent and mantissa are the same
      if (code < 8) {
        int exponent = 121;  // of 8 units of 2^-9
        int mantissa = code;
        for (; mantissa != 0 && mantissa < 8; mantissa *= 2) --exponent;
        number = code == 0 ? 0 : exponent << 7 | (mantissa & 7) << 4;
      }
      if (code == 127) number = 0x7fc0;
      low[code] = static_cast<uint8_t>(number);
      high[code] = static_cast<uint8_t>(number >> 8);
    }
  }
};
inline constexpr Bf16OfE4m3 kBf16OfE4m3{};

// The bf16 numbers of 32 or 64 codes times a scale: high and low bytes are looked up in tables of the
// magnitude.
class E4m3ToBf16 {
 public:
  E4m3ToBf16() { take(kBf16OfE4m3.low, kBf16OfE4m3.high); }

  explicit E4m3ToBf16(float scale) {
    using Bytes [[gnu::vector_size(kLanes)]] = uint8_t;
    alignas(64) uint8_t low[128];
    alignas(64) uint8_t high[128];
    for (int first = 0; first < 128; first += kLanes) {
      uint8_t codes[kLanes];
      for (int i = 0; i < kLanes; ++i) codes[i] = static_cast<uint8_t>(first + i);
      const IntLanes x = bits(round_to_bf16(lanes_from_e4m3(load_bytes(codes)) * scale)) >> 16;
      const auto lows = __builtin_convertvector(x, Bytes);
      const auto highs = __builtin_convertvector(x >> 8, Bytes);
      std::memcpy(low + first, &lows, sizeof lows);
      std::memcpy(high + first, &highs, sizeof highs);
    }
    take(low, high);
  }

  __m512i operator()(const void* codes) const {
    return (*this)(_mm256_loadu_si256(static_cast<const __m256i*>(codes)));
  }

  __m512i operator()(__m256i packed) const {
    const __m512i code = _mm512_permutexvar_epi8(twice_, _mm512_castsi256_si512(packed));
    const __m512i low = _mm512_permutex2var_epi8(low_[0], code, low_[1]);
    const __m512i high = with_sign(_mm512_permutex2var_epi8(high_[0], code, high_[1]), code);
    return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, low, high);
  }

  // 64 codes in fewer instructions than twice 32.
  void operator()(const void* codes, __m512i& first, __m512i& second) const {
    (*this)(_mm512_loadu_si512(codes), first, second);
  }

  void operator()(__m512i packed, __m512i& first, __m512i& second) const {
    // Bytes are interleaved within each quarter: bring there what belongs there.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i code = _mm512_permutexvar_epi64(order, packed);
    const __m512i low = _mm512_permutex2var_epi8(low_[0], code, low_[1]);
    const __m512i high = with_sign(_mm512_permutex2var_epi8(high_[0], code, high_[1]), code);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }

 private:
  void take(const uint8_t* low, const uint8_t* high) {
    for (int i = 0; i < 2; ++i) {
      low_[i] = _mm512_load_si512(low + 64 * i);
      high_[i] = _mm512_load_si512(high + 64 * i);
    }
    alignas(64) uint8_t twice[64];
    for (int i = 0; i < 64; ++i) twice[i] = static_cast<uint8_t>(i / 2);
    twice_ = _mm512_load_si512(twice);
  }

  static __m512i with_sign(__m512i high, __m512i code) {
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    return _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(static_cast<char>(0x80)), kOrAnd);
  }

  __m512i low_[2], high_[2], twice_;
};
#endif

}  // namespace bifolio::BIFOLIO_ISA
