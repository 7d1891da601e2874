// Vectors of floats of the instruction set that a file is compiled for. Arithmetic and comparisons
// are the compiler's own vector operators; this header adds what they lack.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace bifolio::BIFOLIO_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

using Lanes [[gnu::vector_size(kLanes * 4)]] = float;
using IntLanes [[gnu::vector_size(kLanes * 4)]] = int32_t;

inline Lanes load(const float* p) {
  Lanes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, Lanes x) { std::memcpy(p, &x, sizeof x); }

inline Lanes splat(float x) { return x - Lanes{}; }

inline IntLanes splat(int32_t x) { return x - IntLanes{}; }

// kLanes numbers of 8 or 16 bits, zero-extended. (The compiler's own conversion of bytes goes
// through scalar registers.)
inline IntLanes load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntLanes>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<IntLanes>(_mm256_cvtepu8_epi32(_mm_loadu_si64(p)));
#else
  return IntLanes{p[0], p[1], p[2], p[3]};
#endif
}

inline IntLanes load_halves(const uint8_t* p) {
  using Halves [[gnu::vector_size(2 * kLanes)]] = uint16_t;
  Halves x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, IntLanes);
}

inline IntLanes bits(Lanes x) { return reinterpret_cast<IntLanes>(x); }

inline Lanes from_bits(IntLanes x) { return reinterpret_cast<Lanes>(x); }

// 0, 1, 2, …
inline IntLanes lane_index() {
  IntLanes index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

// a * b + c, rounded once where the processor can.
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The greater; the second if either is NaN.
inline Lanes max(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Lanes abs(Lanes x) { return from_bits(bits(x) & 0x7fffffff); }

namespace detail {

template <class Fold>
float fold(Lanes x, const Fold& op) {
#if defined(__AVX512F__)
  const __m256 half = op(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 quarter = op(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  const __m128 quarter = op(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
#else
  using Quad [[gnu::vector_size(16)]] = float;
  const Quad quarter = x;
#endif
  using Four [[gnu::vector_size(16)]] = float;
  const Four a = quarter;
  const Four b = op(a, __builtin_shufflevector(a, a, 2, 3, 2, 3));
  const Four c = op(b, __builtin_shufflevector(b, b, 1, 1, 1, 1));
  return c[0];
}

}  // namespace detail

// Sum and maximum over lanes: halves folded onto each other, so the order is fixed.
inline float sum_lanes(Lanes x) {
  return detail::fold(x, [](auto a, auto b) { return a + b; });
}

inline float max_lanes(Lanes x) {
  return detail::fold(x, [](auto a, auto b) { return a > b ? a : b; });
}

// A bit for each lane that holds in a comparison.
inline uint32_t lane_mask(IntLanes x) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(x));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(x)));
#else
  uint32_t mask = 0;
  for (int lane = 0; lane < kLanes; ++lane) mask |= (x[lane] & 1U) << lane;
  return mask;
#endif
}

inline bool any(IntLanes x) { return lane_mask(x) != 0; }

inline int32_t sum_lanes(IntLanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

inline int32_t max_lanes(IntLanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

// 2^x of N vectors, step by step together, for x <= 0 (also slightly above); exactly 1 at 0, exactly
// 0 from -127 down, NaN stays NaN. Degree 5 fitted for least relative error on [-1/2, 1/2]: 9.2e-8
// from the fit, less than 2e-7 with the roundings of float32; what is below 2^-126 is only small.
template <int N>
[[gnu::always_inline]] inline void exp2_lanes(Lanes (&x)[N]) {
  constexpr float kLowest = -127.0F;     // its power's exponent bits come out as 0
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: what is added to it loses its fraction
  constexpr float kFactors[] = {0x1.3cea876004a9dp-7F, 0x1.c6b752df4ed4ep-5F, 0x1.ebf9bb8a58497p-3F,
                                0x1.62e4292036e7fp-1F, 1.0F};
  Lanes whole[N];
  Lanes p[N];
  for (int i = 0; i < N; ++i) x[i] = max(splat(kLowest), x[i]);
  for (int i = 0; i < N; ++i) whole[i] = (x[i] + kRound) - kRound;
  for (int i = 0; i < N; ++i) x[i] -= whole[i];
  for (int i = 0; i < N; ++i) p[i] = splat(0x1.5bba13e6d9664p-10F);
  for (const float factor : kFactors) {
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], splat(factor));
  }
  // A NaN becomes the integer with only the top bit set, which the shift drops.
  for (int i = 0; i < N; ++i) {
    x[i] = from_bits(bits(p[i]) + (__builtin_convertvector(whole[i], IntLanes) << 23));
  }
}

inline Lanes exp2_lanes(Lanes x) {
  Lanes one[] = {x};
  exp2_lanes(one);
  return one[0];
}

inline float exp2_one(float x) { return exp2_lanes(splat(x))[0]; }

// Float32 to bfloat16 and back, round to nearest even, NaN stays NaN, subnormals stay.
inline uint16_t bf16_from_float(float x) {
  const auto u = __builtin_bit_cast(uint32_t, x);
  if (x != x) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline float float_from_bf16(uint16_t x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}

inline Lanes round_to_bf16(Lanes x) {
  const IntLanes u = bits(x);
  const IntLanes rounded = (u + 0x7fff + (u >> 16 & 1)) & static_cast<int32_t>(0xffff0000);
  // A NaN whose set bits are all low ones would lose them, and be an infinity.
  return from_bits(x != x ? u | 0x400000 : rounded);
}

}  // namespace bifolio::BIFOLIO_ISA
