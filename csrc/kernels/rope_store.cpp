#include "kernels/rope_store.hpp"

#include "kernels/fp8.hpp"
#include "kernels/page_layer.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

// RMSNorm: x * 1 / sqrt(mean(x²) + eps) * gain.
void rms_norm(float* x, const float* gain, float eps, int64_t dim) {
  Lanes squares{};
  for (int64_t i = 0; i < dim; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const float mean = sum_lanes(squares) / static_cast<float>(dim);
  const float scale = 1.0F / __builtin_sqrtf(mean + eps);
  for (int64_t i = 0; i < dim; i += kLanes) store(x + i, load(x + i) * scale * load(gain + i));
}

// Rotation by halves of the first `rope_dim` numbers.
void rotate(float* x, const float* cos_sin, int64_t rope_dim) {
  const int64_t half = rope_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float cos = cos_sin[i];
    const float sin = cos_sin[half + i];
    const float first = x[i] * cos - x[half + i] * sin;
    x[half + i] = x[half + i] * cos + x[i] * sin;
    x[i] = first;
  }
}

// The codes of x, one in the low bits of each int.
void encode(const float* x, int64_t dim, int64_t kind, float scale, int32_t* codes) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Lanes lanes = load(x + i);
    IntLanes code = bits(lanes);
    if (kind == kCacheBf16) {
      code = bits(round_to_bf16(lanes)) >> 16;
    } else if (kind != kCacheFp32) {
      code = e4m3_from_lanes(lanes / scale);
    }
    std::memcpy(codes + i, &code, sizeof code);
  }
}

uint16_t token_scale(const float* x, int64_t dim) {
  Lanes greatest{};
  for (int64_t i = 0; i < dim; i += kLanes) greatest = max(abs(load(x + i)), greatest);  // no NaN
  return token_scale_from_absmax(max_lanes(greatest));
}

// Writes `pairs` × 2 codes: pair i goes to out + i * pitch, its second code `gap` numbers behind.
template <class Number>
void scatter(const int32_t* codes, int64_t pairs, uint8_t* out, int64_t pitch, int64_t gap) {
  for (int64_t i = 0; i < pairs; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      const auto number = static_cast<Number>(codes[2 * i + j]);
      std::memcpy(out + (i * pitch + j * gap) * sizeof(Number), &number, sizeof(Number));
    }
  }
}

void scatter(const PageLayer& pages, const int32_t* codes, uint8_t* out, int64_t pitch,
             int64_t gap) {
  switch (pages.kind) {
    case kCacheFp32: return scatter<uint32_t>(codes, pages.head_dim / 2, out, pitch, gap);
    case kCacheBf16: return scatter<uint16_t>(codes, pages.head_dim / 2, out, pitch, gap);
    default: return scatter<uint8_t>(codes, pages.head_dim / 2, out, pitch, gap);
  }
}

float static_scale(const float* scales, int64_t head) {
  return scales == nullptr ? 1.0F : scales[head];
}

void store_key(const RopeStoreArgs& a, const PageLayer& pages, int64_t page, int64_t slot,
               int64_t head, const float* k) {
  float scale = static_scale(a.k_scales, head);
  if (a.kind == kCacheFp8Token) {
    const uint16_t half = token_scale(k, a.head_dim);
    pages.k_scales(page, head)[slot] = half;
    scale = float_from_half(half);
  }
  int32_t codes[kMaxHeadDim];
  encode(k, a.head_dim, a.kind, scale, codes);
  uint8_t* out = pages.k_codes(page, head) + 2 * slot * pages.number_bytes();
  scatter(pages, codes, out, 2 * pages.page_size, 1);
}

void store_value(const RopeStoreArgs& a, const PageLayer& pages, int64_t page, int64_t slot,
                 int64_t head, const float* v) {
  float scale = static_scale(a.v_scales, head);
  if (a.kind == kCacheFp8Token) {
    const uint16_t half = token_scale(v, a.head_dim);
    pages.v_scales(page, head)[slot] = half;
    scale = float_from_half(half);
  }
  int32_t codes[kMaxHeadDim];
  encode(v, a.head_dim, a.kind, scale, codes);
  uint8_t* out = pages.v_codes(page, head) +
                 (slot / 2 * 2 * a.head_dim + slot % 2) * pages.number_bytes();
  scatter(pages, codes, out, 4, 2);
}

void store_token(const RopeStoreArgs& a, const PageLayer& pages, int64_t token) {
  const int64_t dim = a.head_dim;
  const int64_t position = a.positions[token];
  const float* cos_sin = a.cos_sin + position * a.rope_dim;
  const float* x = a.qkv + token * (a.heads + 2 * a.kv_heads) * dim;
  float* q = a.q + token * a.heads * dim;
  std::memcpy(q, x, a.heads * dim * sizeof(float));
  for (int64_t head = 0; head < a.heads; ++head, q += dim) {
    if (a.q_gain != nullptr) rms_norm(q, a.q_gain, a.q_eps, dim);
    rotate(q, cos_sin, a.rope_dim);
  }
  const int64_t page =
      a.block_table[a.row_of_token[token] * a.table_width + position / a.page_size];
  const int64_t slot = position % a.page_size;
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    float k[kMaxHeadDim];
    std::memcpy(k, x + (a.heads + head) * dim, dim * sizeof(float));
    if (a.k_gain != nullptr) rms_norm(k, a.k_gain, a.k_eps, dim);
    rotate(k, cos_sin, a.rope_dim);
    store_key(a, pages, page, slot, head, k);
    store_value(a, pages, page, slot, head, x + (a.heads + a.kv_heads + head) * dim);
  }
}

}  // namespace

void rope_store(const RopeStoreArgs& a, ThreadPool& pool) {
  constexpr int64_t kTokens = 4;  // of one tile
  const PageLayer pages = page_layer(a);
  parallel_for(pool, (a.tokens + kTokens - 1) / kTokens, [&](int64_t tile, int) {
    const int64_t end = (tile + 1) * kTokens < a.tokens ? (tile + 1) * kTokens : a.tokens;
    for (int64_t token = tile * kTokens; token < end; ++token) store_token(a, pages, token);
  });
}

}  // namespace bifolio::BIFOLIO_ISA
