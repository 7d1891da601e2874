// What a line of packed codes is to the multiplier: vectors of one 32-bit lane per channel, and
// the product that takes them.
//
// A policy has the type of its sums (`Sum`), the 32-bit words of activations that one quad takes
// (`kWords`), the bytes of a line (`kLine`), and `quad`, which adds the products of one line to the
// sums of R rows.

#pragma once

#include "kernels/fp8.hpp"
#include "kernels/lanes.hpp"
#include "kernels/linear/layout.hpp"

namespace bifolio::BIFOLIO_ISA {

inline constexpr int kVectors = kPanel / kLanes;  // that hold one number of each channel

inline IntLanes load_words(const void* p) {
  IntLanes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// kLanes 16-bit numbers as the high halves of 32-bit lanes.
inline IntLanes load_high_halves(const uint8_t* p) {
  using Halves [[gnu::vector_size(kLanes * 2)]] = uint16_t;
  Halves x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, IntLanes) << 16;
}

inline Lanes load_bf16(const uint8_t* p) { return from_bits(load_high_halves(p)); }

inline Lanes load_fp16(const uint8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Lanes x;
  for (int i = 0; i < kLanes; ++i) {
    uint16_t half;
    std::memcpy(&half, p + 2 * i, 2);
    x[i] = float_from_half(half);
  }
  return x;
#endif
}

// sum + Σ w[i] * x[i] over the four bytes of each lane, w unsigned, x signed; exact.
// kNibbles promises w <= 15.
template <bool kNibbles>
inline IntLanes dot_bytes(IntLanes sum, IntLanes w, IntLanes x) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntLanes>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                        reinterpret_cast<__m512i>(w),
                                                        reinterpret_cast<__m512i>(x)));
#elif defined(__AVX2__)
  const auto wv = reinterpret_cast<__m256i>(w);
  const auto xv = reinterpret_cast<__m256i>(x);
  __m256i products;
  if constexpr (kNibbles) {  // the sums of pairs fit 16 bits
    products = _mm256_madd_epi16(_mm256_maddubs_epi16(wv, xv), _mm256_set1_epi16(1));
  } else {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(wv, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(xv, 8), 8));
    const __m256i odd =
        _mm256_madd_epi16(_mm256_srli_epi16(wv, 8), _mm256_srai_epi16(xv, 8));
    products = _mm256_add_epi32(even, odd);
  }
  return sum + reinterpret_cast<IntLanes>(products);
#else
  for (int i = 0; i < 4; ++i) sum += (w >> 8 * i & 0xff) * (x << (24 - 8 * i) >> 24);
  return sum;
#endif
}

// The two bf16 numbers of each lane as a product takes them: together where the processor multiplies
// pairs, else apart, as float32.
#if defined(__AVX512BF16__)
using Pair = IntLanes;

inline Pair pair_of(IntLanes x) { return x; }

// Two float32 vectors whose lower halves are zero as one vector of pairs.
inline Pair pair_halves(Lanes first, Lanes second) {
  return (bits(first) >> 16 & 0xffff) | bits(second);
}
#else
struct Pair {
  Lanes first, second;
};

inline Pair pair_of(IntLanes x) {
  return {from_bits(x << 16), from_bits(x & static_cast<int32_t>(0xffff0000))};
}
#endif

// sum + w[1] * x[1] + w[0] * x[0] over the two numbers of each lane.
inline Lanes dot_pair(Lanes sum, const Pair& w, const Pair& x) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
#else
  return fma(w.first, x.first, fma(w.second, x.second, sum));
#endif
}

// Widening of the codes of a line to pairs: even bytes, then odd ones.

// int4: two codes in each byte, and so four vectors: low nibbles even and odd, high even and odd.
class NibblesToBf16 {
 public:
#if defined(__AVX512BF16__)
  explicit NibblesToBf16(int zero) {
    for (int i = 0; i < 32; ++i) {
      table_[i] = bf16_from_float(static_cast<float>(i % 16 - zero));
    }
  }

  void operator()(IntLanes w, IntLanes (&low)[2], IntLanes (&high)[2]) const {
    low[0] = look_up(w);
    high[0] = look_up(w >> 4);
    low[1] = look_up(w >> 8);
    high[1] = look_up(w >> 12);
  }

 private:
  // The low nibble of each 16-bit half. The table repeats, so the bit above does not matter.
  IntLanes look_up(IntLanes w) const {
    return reinterpret_cast<IntLanes>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(w),
                                                               _mm512_load_si512(table_)));
  }

  alignas(64) uint16_t table_[32];
#else
  explicit NibblesToBf16(int zero) : zero_(zero) {}

  // The codes of channels `vector` of a line, inputs 0 and 2 or 1 and 3.
  Pair operator()(const uint8_t* line, int vector, int pair) const {
    constexpr int kHalf = kVectors / 2;
    const IntLanes w = load_words(line + 4 * (vector % kHalf) * kLanes);
    const int shift = 8 * pair + 4 * (vector / kHalf);
    return {number(w >> shift), number(w >> (16 + shift))};
  }

 private:
  Lanes number(IntLanes w) const {
    return __builtin_convertvector((w & 15) - zero_, Lanes);
  }

  int zero_;
#endif
};

struct Int8ToBf16 {
#if defined(__AVX512BF16__)
  void operator()(IntLanes w, IntLanes (&out)[2]) const {
    out[0] = pair_halves(byte(w, 0), byte(w, 2));
    out[1] = pair_halves(byte(w, 1), byte(w, 3));
  }
#else
  Pair operator()(const uint8_t* line, int vector, int pair) const {
    const IntLanes w = load_words(line + 4 * vector * kLanes);
    return {byte(w, pair), byte(w, pair + 2)};
  }
#endif

 private:
  static Lanes byte(IntLanes w, int i) {
    return __builtin_convertvector(w << (24 - 8 * i) >> 24, Lanes);
  }
};

class E4m3ToBf16Pairs {
 public:
#if defined(__AVX512BF16__)
  E4m3ToBf16Pairs() {
    for (int i = 0; i < 128; ++i) {
      const uint16_t x = bf16_from_float(float_from_e4m3(static_cast<uint8_t>(i)));
      low_[i] = static_cast<uint8_t>(x & 0xff);
      high_[i] = static_cast<uint8_t>(x >> 8);
    }
  }

  void operator()(IntLanes w, IntLanes (&out)[2]) const {
    const auto code = reinterpret_cast<__m512i>(w);
    const __m512i low = look_up(low_, code);
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    const __m512i high = _mm512_ternarylogic_epi32(look_up(high_, code), code,
                                                   _mm512_set1_epi8(-128), kOrAnd);
    constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaa;
    out[0] = reinterpret_cast<IntLanes>(
        _mm512_mask_blend_epi8(kOdd, low, _mm512_slli_epi16(high, 8)));
    out[1] = reinterpret_cast<IntLanes>(
        _mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(low, 8), high));
  }

 private:
  static __m512i look_up(const uint8_t* table, __m512i code) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), code,
                                    _mm512_load_si512(table + 64));
  }

  alignas(64) uint8_t low_[128], high_[128];  // bytes of the bf16 of a magnitude
#else
  Pair operator()(const uint8_t* line, int vector, int pair) const {
    const IntLanes w = load_words(line + 4 * vector * kLanes) >> 8 * pair;
    return {wide(w), wide(w >> 16)};
  }

 private:
  // The lowest byte of each lane. Shifted up, exponent and mantissa mean value * 2^-120, subnormals
  // too, which the processor must not flush to zero.
  static Lanes wide(IntLanes w) {
    const IntLanes magnitude = w & 0x7f;
    const IntLanes value = bits(from_bits(magnitude << 20) * 0x1p120F);
    return from_bits((magnitude == 0x7f ? splat(0x7fc00000) : value) | (w & 0x80) << 24);
  }
#endif
};

struct Fp32Codes {
  using Sum = Lanes;
  static constexpr int kWords = 4;
  static constexpr int64_t kLine = 512;

  explicit Fp32Codes(const WeightLayout&) {}

  template <int R>
  void quad(const uint8_t* line, const int32_t* x, Lanes (&sums)[R][kVectors]) const {
    const auto* w = reinterpret_cast<const float*>(line);
    const auto* f = reinterpret_cast<const float*>(x);
    for (int j = 0; j < kWords; ++j) {
      for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = fma(load(w + j * kPanel + v * kLanes), splat(f[j * R + r]), sums[r][v]);
        }
      }
    }
  }
};

#if defined(__AVX512BF16__)
// One of the two pairs of a quad against R rows.
template <int R>
inline void add_pair(const IntLanes (&w)[kVectors], const int32_t* x, Lanes (&sums)[R][kVectors]) {
  for (int r = 0; r < R; ++r) {
    const IntLanes xr = splat(x[r]);
    for (int v = 0; v < kVectors; ++v) sums[r][v] = dot_pair(sums[r][v], w[v], xr);
  }
}
#else
// One word in every lane, straight from memory: by way of a scalar register it comes later.
inline IntLanes splat_word(const int32_t* p) {
#if defined(__AVX2__)
  return reinterpret_cast<IntLanes>(_mm256_broadcast_ss(reinterpret_cast<const float*>(p)));
#else
  return splat(*p);
#endif
}

// A quad against R rows. Pairs that lie apart take twice the registers, so there is one vector of
// weights at a time: weights(vector, pair).
template <int R, class Weights>
inline void add_pairs(const Weights& weights, const int32_t* x, Lanes (&sums)[R][kVectors]) {
  for (int pair = 0; pair < 2; ++pair, x += R) {
    Pair xr[R];
    for (int r = 0; r < R; ++r) xr[r] = pair_of(splat_word(x + r));
    for (int v = 0; v < kVectors; ++v) {
      const Pair w = weights(v, pair);
      for (int r = 0; r < R; ++r) sums[r][v] = dot_pair(sums[r][v], w, xr[r]);
    }
  }
}
#endif

struct Bf16Codes {
  using Sum = Lanes;
  static constexpr int kWords = 2;
  static constexpr int64_t kLine = 256;

  explicit Bf16Codes(const WeightLayout&) {}

  template <int R>
  void quad(const uint8_t* line, const int32_t* x, Lanes (&sums)[R][kVectors]) const {
#if defined(__AVX512BF16__)
    for (int pair = 0; pair < 2; ++pair) {
      IntLanes w[kVectors];
      for (int v = 0; v < kVectors; ++v) w[v] = load_words(line + 4 * (pair * kPanel + v * kLanes));
      add_pair<R>(w, x + pair * R, sums);
    }
#else
    const auto weights = [&](int v, int pair) {
      return pair_of(load_words(line + 4 * (pair * kPanel + v * kLanes)));
    };
    add_pairs<R>(weights, x, sums);
#endif
  }
};

// Bytes that widen to bf16 pairs.
template <class Widen>
struct WideCodes {
  using Sum = Lanes;
  static constexpr int kWords = 2;
  static constexpr int64_t kLine = 128;

  explicit WideCodes(const WeightLayout&) {}

  template <int R>
  void quad(const uint8_t* line, const int32_t* x, Lanes (&sums)[R][kVectors]) const {
#if defined(__AVX512BF16__)
    IntLanes w[2][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      IntLanes pairs[2];
      widen(load_words(line + 4 * v * kLanes), pairs);
      w[0][v] = pairs[0];
      w[1][v] = pairs[1];
    }
    add_pair<R>(w[0], x, sums);
    add_pair<R>(w[1], x + R, sums);
#else
    add_pairs<R>([&](int v, int pair) { return widen(line, v, pair); }, x, sums);
#endif
  }

  Widen widen;
};

struct Int4Codes {
  using Sum = Lanes;
  static constexpr int kWords = 2;
  static constexpr int64_t kLine = 64;

  explicit Int4Codes(const WeightLayout& layout) : widen(layout.offsets ? 0 : 8) {}

  template <int R>
  void quad(const uint8_t* line, const int32_t* x, Lanes (&sums)[R][kVectors]) const {
#if defined(__AVX512BF16__)
    IntLanes w[2][kVectors];
    for (int v = 0; v < kVectors / 2; ++v) {
      IntLanes low[2], high[2];
      widen(load_words(line + 4 * v * kLanes), low, high);
      for (int pair = 0; pair < 2; ++pair) {
        w[pair][v] = low[pair];
        w[pair][v + kVectors / 2] = high[pair];
      }
    }
    add_pair<R>(w[0], x, sums);
    add_pair<R>(w[1], x + R, sums);
#else
    add_pairs<R>([&](int v, int pair) { return widen(line, v, pair); }, x, sums);
#endif
  }

  NibblesToBf16 widen;
};

template <bool kNibbles, int R>
inline void add_bytes(const IntLanes (&w)[kVectors], const int32_t* x,
                      IntLanes (&sums)[R][kVectors]) {
  for (int r = 0; r < R; ++r) {
    const IntLanes xr = splat(x[r]);
    for (int v = 0; v < kVectors; ++v) sums[r][v] = dot_bytes<kNibbles>(sums[r][v], w[v], xr);
  }
}

struct Int8Int8Codes {
  using Sum = IntLanes;
  static constexpr int kWords = 1;
  static constexpr int64_t kLine = 128;

  explicit Int8Int8Codes(const WeightLayout&) {}

  template <int R>
  void quad(const uint8_t* line, const int32_t* x, IntLanes (&sums)[R][kVectors]) const {
    IntLanes w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = load_words(line + 4 * v * kLanes);
    add_bytes<false, R>(w, x, sums);
  }
};

struct Int4Int8Codes {
  using Sum = IntLanes;
  static constexpr int kWords = 1;
  static constexpr int64_t kLine = 64;

  explicit Int4Int8Codes(const WeightLayout&) {}

  template <int R>
  void quad(const uint8_t* line, const int32_t* x, IntLanes (&sums)[R][kVectors]) const {
    IntLanes w[kVectors];
    for (int v = 0; v < kVectors / 2; ++v) {
      const IntLanes codes = load_words(line + 4 * v * kLanes);
      w[v] = codes & 0x0f0f0f0f;
      w[v + kVectors / 2] = codes >> 4 & 0x0f0f0f0f;
    }
    add_bytes<true, R>(w, x, sums);
  }
};

}  // namespace bifolio::BIFOLIO_ISA
