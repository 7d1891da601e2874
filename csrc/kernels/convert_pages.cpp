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
};

// A pass over the chunks of one head that share their tokens.
struct Chunks {
  const uint8_t* source;
  uint8_t* target;
  int64_t source_pitch, target_pitch;  // bytes from chunk to chunk
  int64_t count;
};

using Numbers = Lanes[kVectors];

void decode(const uint8_t* codes, int64_t kind, const ChunkScales& scales, Numbers& x) {
  for (int v = 0; v < kVectors; ++v) {
    if (kind == kCacheFp32) {
      std::memcpy(&x[v], codes + v * sizeof(Lanes), sizeof(Lanes));
      continue;
    }
    if (kind == kCacheBf16) {
      using Packed [[gnu::vector_size(2 * kLanes)]] = uint16_t;
      Packed packed;
      std::memcpy(&packed, codes + v * sizeof packed, sizeof packed);
      x[v] = from_bits(__builtin_convertvector(packed, IntLanes) << 16);
      continue;
    }
    using Packed [[gnu::vector_size(kLanes)]] = uint8_t;
    Packed packed;
    std::memcpy(&packed, codes + v * sizeof packed, sizeof packed);
    x[v] = lanes_from_e4m3(__builtin_convertvector(packed, IntLanes)) *
           load(scales.scale + v * kLanes);
  }
}

void encode(const Numbers& x, int64_t kind, const ChunkScales& scales, uint8_t* codes) {
  for (int v = 0; v < kVectors; ++v) {
    if (kind == kCacheFp32) {
      std::memcpy(codes + v * sizeof(Lanes), &x[v], sizeof(Lanes));
      continue;
    }
    if (kind == kCacheBf16) {
      using Packed [[gnu::vector_size(2 * kLanes)]] = uint16_t;
      const auto packed = __builtin_convertvector(bits(round_to_bf16(x[v])) >> 16, Packed);
      std::memcpy(codes + v * sizeof packed, &packed, sizeof packed);
      continue;
    }
    using Packed [[gnu::vector_size(kLanes)]] = uint8_t;
    const IntLanes code = e4m3_from_lanes(x[v] / load(scales.scale + v * kLanes));
    const auto packed = __builtin_convertvector(code, Packed);
    std::memcpy(codes + v * sizeof packed, &packed, sizeof packed);
  }
}

void convert(const Chunks& c, int64_t source_kind, const ChunkScales& source_scales,
             int64_t target_kind, const ChunkScales& target_scales) {
  for (int64_t i = 0; i < c.count; ++i) {
    Numbers x;
    decode(c.source + i * c.source_pitch, source_kind, source_scales, x);
    encode(x, target_kind, target_scales, c.target + i * c.target_pitch);
  }
}

// Greatest magnitude of each number's place in the chunks, NaN left out.
void greatest(const Chunks& c, int64_t kind, const ChunkScales& scales, float (&most)[kChunk]) {
  Numbers best = {};
  for (int64_t i = 0; i < c.count; ++i) {
    Numbers x;
    decode(c.source + i * c.source_pitch, kind, scales, x);
    for (int v = 0; v < kVectors; ++v) best[v] = max(abs(x[v]), best[v]);
  }
  for (int v = 0; v < kVectors; ++v) store(most + v * kLanes, best[v]);
}

ChunkScales fill(float scale) {
  ChunkScales s;
  for (float& x : s.scale) x = scale;
  return s;
}

struct Side {
  PageLayer pages;
  const float* k_scales;  // [kv_heads] of this layer, or null
  const float* v_scales;
};

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
  ChunkScales source_scales = fill(from.k_scales == nullptr ? 1.0F : from.k_scales[head]);
  ChunkScales target_scales = fill(to.k_scales == nullptr ? 1.0F : to.k_scales[head]);
  if (from.pages.kind == kCacheFp8Token) {
    const uint16_t* scales = from.pages.k_scales(source, head) + first;
    for (int i = 0; i < kChunk; ++i) source_scales.scale[i] = float_from_half(scales[i / 2]);
  }
  if (to.pages.kind == kCacheFp8Token) {
    float most[kChunk];
    greatest(chunks, from.pages.kind, source_scales, most);
    uint16_t* scales = to.pages.k_scales(target, head) + first;
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
  ChunkScales source_scales = fill(from.v_scales == nullptr ? 1.0F : from.v_scales[head]);
  ChunkScales target_scales = fill(to.v_scales == nullptr ? 1.0F : to.v_scales[head]);
  if (from.pages.kind == kCacheFp8Token) {
    const uint16_t* scales = from.pages.v_scales(source, head) + first;
    for (int i = 0; i < kChunk; ++i) source_scales.scale[i] = float_from_half(scales[i % 2]);
  }
  if (to.pages.kind == kCacheFp8Token) {
    float most[kChunk];
    greatest(chunks, from.pages.kind, source_scales, most);
    uint16_t* scales = to.pages.v_scales(target, head) + first;
    for (int t = 0; t < 2; ++t) {
      float absmax = 0;
      for (int i = t; i < kChunk; i += 2) absmax = most[i] > absmax ? most[i] : absmax;
      scales[t] = token_scale_from_absmax(absmax);
      for (int i = t; i < kChunk; i += 2) target_scales.scale[i] = float_from_half(scales[t]);
    }
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
  for (int64_t head = 0; head < a.kv_heads; ++head) {
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
