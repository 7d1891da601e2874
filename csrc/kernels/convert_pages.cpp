#include "kernels/convert_pages.hpp"

#include "kernels/fp8.hpp"
#include "kernels/page_layer.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

constexpr int kTokens = 16;          // that stand together in a page of any size
constexpr int kChunk = 2 * kTokens;  // numbers that are converted together
constexpr int kVectors = kChunk / kLanes;

// The scales of the numbers of a chunk, one each. In a chunk of keys, number i belongs to token
// i / 2 of 16; in one of values, to token i % 2 of 2.
struct ChunkScales {
  float scale[kChunk];
  bool reciprocal = false;  // `scale` holds 1 / scale, each an exact power of two
};

template <CacheKind kKind>
struct KindConstant {
  static constexpr CacheKind value = kKind;
};

// A pass over the chunks of one head that share their tokens.
struct Chunks {
  const uint8_t* source;
  uint8_t* target;
  int64_t source_pitch, target_pitch;  // bytes from chunk to chunk
  int64_t count;
};

using Numbers = Lanes[kVectors];

// A vector's worth of codes.
using Halves [[gnu::vector_size(2 * kLanes)]] = uint16_t;
using Bytes [[gnu::vector_size(kLanes)]] = uint8_t;

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

template <CacheKind kKind>
[[gnu::always_inline]] inline void encode(const Numbers& x, const ChunkScales& scales,
                                          uint8_t* codes) {
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kKind == kCacheFp32) {
      std::memcpy(codes + v * sizeof(Lanes), &x[v], sizeof(Lanes));
    } else if constexpr (kKind == kCacheBf16) {
      const auto packed = __builtin_convertvector(bits(round_to_bf16(x[v])) >> 16, Halves);
      std::memcpy(codes + v * sizeof packed, &packed, sizeof packed);
    } else {
      const Lanes scale = load(scales.scale + v * kLanes);
      const IntLanes code = e4m3_from_lanes(scales.reciprocal ? x[v] * scale : x[v] / scale);
      const auto packed = __builtin_convertvector(code, Bytes);
      std::memcpy(codes + v * sizeof packed, &packed, sizeof packed);
    }
  }
}

// Calls fn with a kind as a constant.
template <class Fn>
void with_kind(int64_t kind, const Fn& fn) {
  switch (kind) {
    case kCacheFp32: return fn(KindConstant<kCacheFp32>{});
    case kCacheBf16: return fn(KindConstant<kCacheBf16>{});
    default: return fn(KindConstant<kCacheFp8>{});
  }
}

void convert(const Chunks& c, int64_t source_kind, const ChunkScales& source_scales,
             int64_t target_kind, const ChunkScales& target_scales) {
  with_kind(source_kind, [&](auto source) {
    with_kind(target_kind, [&](auto target) {
      for (int64_t i = 0; i < c.count; ++i) {
        Numbers x;
        decode<source.value>(c.source + i * c.source_pitch, source_scales, x);
        encode<target.value>(x, target_scales, c.target + i * c.target_pitch);
      }
    });
  });
}

// Greatest magnitude of each number's place in the chunks, NaN left out.
void greatest(const Chunks& c, int64_t kind, const ChunkScales& scales, float (&most)[kChunk]) {
  Numbers best = {};
  with_kind(kind, [&](auto source) {
    for (int64_t i = 0; i < c.count; ++i) {
      Numbers x;
      decode<source.value>(c.source + i * c.source_pitch, scales, x);
      for (int v = 0; v < kVectors; ++v) best[v] = max(abs(x[v]), best[v]);
    }
  });
  for (int v = 0; v < kVectors; ++v) store(most + v * kLanes, best[v]);
}

ChunkScales fill(float even, float odd) {
  ChunkScales s;
  for (int i = 0; i < kChunk; ++i) s.scale[i] = i % 2 == 0 ? even : odd;
  return s;
}

// Of one head: of all its tokens, and to be divided by if `target`.
ChunkScales fill_static(const float* scales, int64_t head, bool target) {
  const float scale = scales == nullptr ? 1.0F : scales[head];
  constexpr uint32_t kMantissa = 0x7fffff;
  const bool power_of_two = (__builtin_bit_cast(uint32_t, scale) & kMantissa) == 0 &&
                            scale > 0x1p-100F && scale < 0x1p100F;
  ChunkScales s = fill(scale, scale);
  if (target && power_of_two) {
    s = fill(1 / scale, 1 / scale);
    s.reciprocal = true;
  }
  return s;
}

struct Side {
  PageLayer pages;
  const float* k_scales;  // [kv_heads] of this layer, or null
  const float* v_scales;
};

// All keys, or all values, of a head, where numbers have no scales or one for all.
void convert_plain(const Side& from, const Side& to, int64_t source, int64_t target, int64_t head) {
  const int64_t count = from.pages.page_size * from.pages.head_dim / kChunk;
  const int64_t source_pitch = kChunk * from.pages.number_bytes();
  const int64_t target_pitch = kChunk * to.pages.number_bytes();
  const Chunks keys{from.pages.k_codes(source, head), to.pages.k_codes(target, head), source_pitch,
                    target_pitch, count};
  convert(keys, from.pages.kind, fill_static(from.k_scales, head, false), to.pages.kind,
          fill_static(to.k_scales, head, true));
  const Chunks values{from.pages.v_codes(source, head), to.pages.v_codes(target, head),
                      source_pitch, target_pitch, count};
  convert(values, from.pages.kind, fill_static(from.v_scales, head, false), to.pages.kind,
          fill_static(to.v_scales, head, true));
}

// Tokens first … first + kTokens - 1 of the keys of a head.
void convert_keys(const Side& from, const Side& to, int64_t source, int64_t target, int64_t head,
                  int64_t first) {
  const auto at = [&](const PageLayer& p, int64_t page) {
    return p.k_codes(page, head) + 2 * first * p.number_bytes();
  };
  const int64_t row = 2 * from.pages.page_size;
  const Chunks chunks{at(from.pages, source), at(to.pages, target),
                      row * from.pages.number_bytes(), row * to.pages.number_bytes(),
                      from.pages.head_dim / 2};
  ChunkScales source_scales = fill_static(from.k_scales, head, false);
  ChunkScales target_scales = fill_static(to.k_scales, head, true);
  if (from.pages.kind == kCacheFp8Token) {
    const uint16_t* scales = from.pages.k_scales(source, head) + first;
    for (int t = 0; t < kTokens; ++t) {
      source_scales.scale[2 * t] = source_scales.scale[2 * t + 1] = float_from_half(scales[t]);
    }
  }
  if (to.pages.kind == kCacheFp8Token) {
    float most[kChunk];
    greatest(chunks, from.pages.kind, source_scales, most);
    uint16_t* scales = to.pages.k_scales(target, head) + first;
    target_scales.reciprocal = false;
    for (int t = 0; t < kTokens; ++t) {
      const float absmax = most[2 * t] > most[2 * t + 1] ? most[2 * t] : most[2 * t + 1];
      scales[t] = token_scale_from_absmax(absmax);
      target_scales.scale[2 * t] = target_scales.scale[2 * t + 1] = float_from_half(scales[t]);
    }
  }
  convert(chunks, from.pages.kind, source_scales, to.pages.kind, target_scales);
}

// Tokens first and first + 1 of the values of a head.
void convert_values(const Side& from, const Side& to, int64_t source, int64_t target, int64_t head,
                    int64_t first) {
  const auto at = [&](const PageLayer& p, int64_t page) {
    return p.v_codes(page, head) + first * p.head_dim * p.number_bytes();
  };
  const Chunks chunks{at(from.pages, source), at(to.pages, target),
                      kChunk * from.pages.number_bytes(), kChunk * to.pages.number_bytes(),
                      2 * from.pages.head_dim / kChunk};
  ChunkScales source_scales = fill_static(from.v_scales, head, false);
  ChunkScales target_scales = fill_static(to.v_scales, head, true);
  if (from.pages.kind == kCacheFp8Token) {
    const uint16_t* scales = from.pages.v_scales(source, head) + first;
    source_scales = fill(float_from_half(scales[0]), float_from_half(scales[1]));
  }
  if (to.pages.kind == kCacheFp8Token) {
    float most[kChunk];
    greatest(chunks, from.pages.kind, source_scales, most);
    float absmax[2] = {};
    for (int i = 0; i < kChunk; ++i) absmax[i % 2] = most[i] > absmax[i % 2] ? most[i] : absmax[i % 2];
    uint16_t* scales = to.pages.v_scales(target, head) + first;
    for (int t = 0; t < 2; ++t) scales[t] = token_scale_from_absmax(absmax[t]);
    target_scales = fill(float_from_half(scales[0]), float_from_half(scales[1]));
  }
  convert(chunks, from.pages.kind, source_scales, to.pages.kind, target_scales);
}

void convert_layer(const ConvertPagesArgs& a, int64_t i, int64_t layer) {
  const auto scales = [&](const float* all) {
    return all == nullptr ? nullptr : all + layer * a.kv_heads;
  };
  const Side from{{const_cast<uint8_t*>(a.source), a.source_page_bytes,
                   a.source_layer_offset + layer * a.source_layer_bytes, a.page_size, a.kv_heads,
                   a.head_dim, a.source_kind},
                  scales(a.source_k_scales),
                  scales(a.source_v_scales)};
  const Side to{{a.target, a.target_page_bytes,
                 a.target_layer_offset + layer * a.target_layer_bytes, a.page_size, a.kv_heads,
                 a.head_dim, a.target_kind},
                scales(a.target_k_scales),
                scales(a.target_v_scales)};
  const int64_t source = a.source_index[i];
  const int64_t target = a.target_index[i];
  const bool plain = a.source_kind != kCacheFp8Token && a.target_kind != kCacheFp8Token;
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    if (plain) {
      convert_plain(from, to, source, target, head);
      continue;
    }
    for (int64_t token = 0; token < a.page_size; token += kTokens) {
      convert_keys(from, to, source, target, head, token);
    }
    for (int64_t token = 0; token < a.page_size; token += 2) {
      convert_values(from, to, source, target, head, token);
    }
  }
}

}  // namespace

void convert_pages(const ConvertPagesArgs& a, ThreadPool& pool) {
  parallel_for(pool, a.count * a.layers, [&](int64_t unit, int) {
    convert_layer(a, unit / a.layers, unit % a.layers);
  });
}

}  // namespace bifolio::BIFOLIO_ISA
