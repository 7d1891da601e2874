#include "kernels/convert_pages.hpp"

#include "kernels/convert_chunks.hpp"
#include "kernels/convert_tokens.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

ChunkScales static_scales(const float* scales, int64_t head) {
  return ChunkScales::of(scales == nullptr ? 1.0F : scales[head]);
}

// The kind of a page's codes, apart from where their scales stand.
int64_t codes_of(int64_t kind) { return kind == kCacheFp8Token ? int64_t{kCacheFp8} : kind; }

struct Side {
  PageLayer pages;
  const float* k_scales;  // [kv_heads] of this layer, or null
  const float* v_scales;
};

// All keys and values of a page, where numbers have no scale of their own: those of heads with equal
// scales on either side are one run.
void convert_plain(const Side& from, const Side& to, int64_t source, int64_t target) {
  const int64_t heads = from.pages.kv_heads;
  const auto scale_of = [heads](const Side& side, int64_t head) {
    const float* scales = head < heads ? side.k_scales : side.v_scales;
    return scales == nullptr ? 1.0F : scales[head % heads];
  };
  const int64_t chunks = from.pages.page_size * from.pages.head_dim / kChunk;
  for (int64_t first = 0, end; first < 2 * heads; first = end) {  // the heads of V follow those of K
    end = first + 1;
    while (end < 2 * heads && scale_of(from, end) == scale_of(from, first) &&
           scale_of(to, end) == scale_of(to, first)) {
      ++end;
    }
    const Chunks run{from.pages.k_codes(source, first), to.pages.k_codes(target, first),
                     kChunk * from.pages.number_bytes(), kChunk * to.pages.number_bytes(),
                     chunks * (end - first)};
    convert(run, from.pages.kind, ChunkScales::of(scale_of(from, first)), to.pages.kind,
            ChunkScales::of(scale_of(to, first)));
  }
}

// Scales of the tokens of a chunk, from fp16: number i belongs to token i / 2 of 16 in one of keys,
// to token i % 2 of 2 in one of values.
ChunkScales key_scales(const uint16_t* scales) {
  float token[kTokens];
  for (int t = 0; t < kTokens; ++t) token[t] = float_from_half(scales[t]);
  return ChunkScales::each([&](int i) { return token[i / 2]; });
}

ChunkScales value_scales(const uint16_t* scales) {
  const float token[] = {float_from_half(scales[0]), float_from_half(scales[1])};
  return ChunkScales::each([&](int i) { return token[i % 2]; });
}

// Tokens first … first + kTokens - 1 of the keys of a head.
Chunks keys_of(const Side& from, const Side& to, int64_t source, int64_t target, int64_t head,
               int64_t first) {
  const auto at = [&](const PageLayer& p, int64_t page) {
    return p.k_codes(page, head) + 2 * first * p.number_bytes();
  };
  const int64_t row = 2 * from.pages.page_size;
  return {at(from.pages, source), at(to.pages, target), row * from.pages.number_bytes(),
          row * to.pages.number_bytes(), from.pages.head_dim / 2};
}

// Tokens first and first + 1 of the values of a head.
Chunks values_of(const Side& from, const Side& to, int64_t source, int64_t target, int64_t head,
                 int64_t first) {
  const auto at = [&](const PageLayer& p, int64_t page) {
    return p.v_codes(page, head) + first * p.head_dim * p.number_bytes();
  };
  return {at(from.pages, source), at(to.pages, target), kChunk * from.pages.number_bytes(),
          kChunk * to.pages.number_bytes(), 2 * from.pages.head_dim / kChunk};
}

void convert_keys(const Side& from, const Side& to, int64_t source, int64_t target, int64_t head,
                  int64_t first) {
  const Chunks chunks = keys_of(from, to, source, target, head, first);
  const ChunkScales source_scales =
      from.pages.kind == kCacheFp8Token ? key_scales(from.pages.k_scales(source, head) + first)
                                        : static_scales(from.k_scales, head);
  if (to.pages.kind != kCacheFp8Token) {
    convert(chunks, codes_of(from.pages.kind), source_scales, to.pages.kind,
            static_scales(to.k_scales, head));
    return;
  }
  float most[kChunk];
  greatest(chunks, codes_of(from.pages.kind), source_scales, most);
  uint16_t* scales = to.pages.k_scales(target, head) + first;
  for (int t = 0; t < kTokens; ++t) {
    scales[t] = token_scale_from_absmax(most[2 * t] > most[2 * t + 1] ? most[2 * t] : most[2 * t + 1]);
  }
  convert(chunks, codes_of(from.pages.kind), source_scales, kCacheFp8, key_scales(scales));
}

void convert_values(const Side& from, const Side& to, int64_t source, int64_t target, int64_t head,
                    int64_t first) {
  const Chunks chunks = values_of(from, to, source, target, head, first);
  const ChunkScales source_scales =
      from.pages.kind == kCacheFp8Token ? value_scales(from.pages.v_scales(source, head) + first)
                                        : static_scales(from.v_scales, head);
  if (to.pages.kind != kCacheFp8Token) {
    convert(chunks, codes_of(from.pages.kind), source_scales, to.pages.kind,
            static_scales(to.v_scales, head));
    return;
  }
  float most[kChunk];
  greatest(chunks, codes_of(from.pages.kind), source_scales, most);
  for (int half = kChunk / 2; half > 1; half /= 2) {  // folded, even and odd places apart
    for (int i = 0; i < half; ++i) most[i] = most[i] > most[i + half] ? most[i] : most[i + half];
  }
  uint16_t* scales = to.pages.v_scales(target, head) + first;
  for (int t = 0; t < 2; ++t) scales[t] = token_scale_from_absmax(most[t]);
  convert(chunks, codes_of(from.pages.kind), source_scales, kCacheFp8, value_scales(scales));
}

#if defined(__AVX512F__)
// Keys of tokens first … first + kTokens - 1 of a head, from bf16 to codes with a scale per token.
void encode_keys(const TokenEncoder& encode, const Side& from, const Side& to, int64_t source,
                 int64_t target, int64_t head, int64_t first) {
  const Chunks chunks = keys_of(from, to, source, target, head, first);
  const __m512 absmax = Absmax::of_keys(chunks);
  if (!TokenEncoder::can_encode(absmax)) {
    convert_keys(from, to, source, target, head, first);
    return;
  }
  const __m256i scales = TokenEncoder::scales(absmax);
  std::memcpy(to.pages.k_scales(target, head) + first, &scales, sizeof scales);
  const __m512 factors = TokenEncoder::factors(scales);
  const int64_t after = first + kTokens;
  const Chunks next = after < from.pages.page_size
                          ? keys_of(from, to, source, target, head, after)
                          : keys_of(from, to, source, target, head + 1, 0);
  encode(chunks, factors, factors, next.source - chunks.source);
}

// The same of their values.
void encode_values(const TokenEncoder& encode, const Side& from, const Side& to, int64_t source,
                   int64_t target, int64_t head, int64_t first) {
  Chunks pair = values_of(from, to, source, target, head, first);
  const int64_t source_bytes = pair.count * pair.source_pitch;
  const __m512 absmax = Absmax::of_values(pair, source_bytes);
  if (!TokenEncoder::can_encode(absmax)) {
    for (int t = 0; t < kTokens; t += 2) {
      convert_values(from, to, source, target, head, first + t);
    }
    return;
  }
  const __m256i scales = TokenEncoder::scales(absmax);
  std::memcpy(to.pages.v_scales(target, head) + first, &scales, sizeof scales);
  float factors[kTokens];
  _mm512_storeu_ps(factors, TokenEncoder::factors(scales));
  for (int t = 0; t < kTokens; t += 2) {
    encode(pair, _mm512_set1_ps(factors[t]), _mm512_set1_ps(factors[t + 1]),
           kTokens / 2 * source_bytes);
    pair.source += source_bytes;
    pair.target += pair.count * pair.target_pitch;
  }
}

__m512 load_scales(const uint16_t* scales) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
}

// And back.
void decode_keys(const TokenDecoder& decode, const Side& from, const Side& to, int64_t source,
                 int64_t target, int64_t head, int64_t first) {
  const __m512i half = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i other = _mm512_add_epi32(half, _mm512_set1_epi32(kTokens / 2));
  const __m512 scales = load_scales(from.pages.k_scales(source, head) + first);
  decode(keys_of(from, to, source, target, head, first), _mm512_permutexvar_ps(half, scales),
         _mm512_permutexvar_ps(other, scales));
}

void decode_values(const TokenDecoder& decode, const Side& from, const Side& to, int64_t source,
                   int64_t target, int64_t head, int64_t first) {
  Chunks pair = values_of(from, to, source, target, head, first);
  double scales[kTokens / 2];  // two in each
  _mm512_storeu_ps(scales, load_scales(from.pages.v_scales(source, head) + first));
  for (const double both : scales) {
    const __m512 alternating = _mm512_castpd_ps(_mm512_set1_pd(both));
    decode(pair, alternating, alternating);
    pair.source += pair.count * pair.source_pitch;
    pair.target += pair.count * pair.target_pitch;
  }
}

// Calls fn(head, first) for all tokens of all heads, kTokens at a time.
template <class Fn>
void for_tokens(const PageLayer& pages, const Fn& fn) {
  for (int64_t head = 0; head < pages.kv_heads; ++head) {
    for (int64_t first = 0; first < pages.page_size; first += kTokens) fn(head, first);
  }
}

// The quick ways between bf16 and codes with a scale per token, in the order of memory; false for
// other pages.
bool convert_tokens(const Side& from, const Side& to, int64_t source, int64_t target) {
  if (from.pages.kind == kCacheBf16) {
    const TokenEncoder encode;
    for_tokens(from.pages, [&](int64_t head, int64_t first) {
      encode_keys(encode, from, to, source, target, head, first);
    });
    for_tokens(from.pages, [&](int64_t head, int64_t first) {
      encode_values(encode, from, to, source, target, head, first);
    });
    return true;
  }
  if (to.pages.kind == kCacheBf16) {
    const TokenDecoder decode;
    for_tokens(from.pages, [&](int64_t head, int64_t first) {
      decode_keys(decode, from, to, source, target, head, first);
    });
    for_tokens(from.pages, [&](int64_t head, int64_t first) {
      decode_values(decode, from, to, source, target, head, first);
    });
    return true;
  }
  return false;
}
#endif

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
  if (a.source_kind != kCacheFp8Token && a.target_kind != kCacheFp8Token) {
    convert_plain(from, to, source, target);
    return;
  }
#if defined(__AVX512F__)
  if (convert_tokens(from, to, source, target)) return;
#endif
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
