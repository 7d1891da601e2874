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

  // The same for all numbers.
  static ChunkScales of(float scale) {
    ChunkScales s;
    for (int i = 0; i < kChunk; ++i) {
      s.scale[i] = scale;
      s.inverse[i] = 1 / scale;
    }
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
