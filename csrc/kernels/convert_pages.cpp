#include "kernels/convert_pages.hpp"

#include "kernels/convert_heads.hpp"
#include "kernels/convert_runs.hpp"
#include "kernels/convert_side.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

// The kind of a page's codes, apart from where their scales stand.
int64_t codes_of(const Side& side) {
  return side.token_scales() ? int64_t{kCacheFp8} : side.pages.kind;
}

// All keys and values of a page, where numbers have no scale of their own: those of heads with equal
// scales on either side are one run.
void convert_plain(const Side& from, const Side& to) {
  const int64_t heads = from.pages.kv_heads;
  const auto scale_of = [heads](const Side& side, int64_t head) {
    return head < heads ? side.k_scale(head) : side.v_scale(head - heads);
  };
  const int64_t chunks = from.pages.page_size * from.pages.head_dim / kChunk;
  for (int64_t first = 0, end; first < 2 * heads; first = end) {  // the heads of V follow those of K
    end = first + 1;
    while (end < 2 * heads && scale_of(from, end) == scale_of(from, first) &&
           scale_of(to, end) == scale_of(to, first)) {
      ++end;
    }
    Chunks run = keys_of(from, to, first, 0);
    run.source_pitch = kChunk * from.pages.number_bytes();
    run.target_pitch = kChunk * to.pages.number_bytes();
    run.count = chunks * (end - first);
    const float source_scale = scale_of(from, first);
    const float target_scale = scale_of(to, first);
#if defined(__AVX512F__)
    if (convert_run(run, from.pages.kind, source_scale, to.pages.kind, target_scale)) continue;
#endif
    convert(run, from.pages.kind, ChunkScales::of(source_scale), to.pages.kind,
            ChunkScales::of(target_scale));
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
void convert_keys(const Side& from, const Side& to, int64_t head, int64_t first) {
  const Chunks chunks = keys_of(from, to, head, first);
  const ChunkScales source_scales = from.token_scales()
                                        ? key_scales(from.pages.k_scales(from.page, head) + first)
                                        : ChunkScales::of(from.k_scale(head));
  if (!to.token_scales()) {
    convert(chunks, codes_of(from), source_scales, to.pages.kind, ChunkScales::of(to.k_scale(head)));
    return;
  }
  float most[kChunk];
  greatest(chunks, codes_of(from), source_scales, most);
  uint16_t* scales = to.pages.k_scales(to.page, head) + first;
  for (int t = 0; t < kTokens; ++t) {
    scales[t] = token_scale_from_absmax(most[2 * t] > most[2 * t + 1] ? most[2 * t] : most[2 * t + 1]);
  }
  convert(chunks, codes_of(from), source_scales, kCacheFp8, key_scales(scales));
}

// Tokens first and first + 1 of the values of a head.
void convert_values(const Side& from, const Side& to, int64_t head, int64_t first) {
  const Chunks chunks = values_of(from, to, head, first);
  const ChunkScales source_scales = from.token_scales()
                                        ? value_scales(from.pages.v_scales(from.page, head) + first)
                                        : ChunkScales::of(from.v_scale(head));
  if (!to.token_scales()) {
    convert(chunks, codes_of(from), source_scales, to.pages.kind, ChunkScales::of(to.v_scale(head)));
    return;
  }
  float most[kChunk];
  greatest(chunks, codes_of(from), source_scales, most);
  for (int half = kChunk / 2; half > 1; half /= 2) {  // folded, even and odd places apart
    for (int i = 0; i < half; ++i) most[i] = most[i] > most[i + half] ? most[i] : most[i + half];
  }
  uint16_t* scales = to.pages.v_scales(to.page, head) + first;
  for (int t = 0; t < 2; ++t) scales[t] = token_scale_from_absmax(most[t]);
  convert(chunks, codes_of(from), source_scales, kCacheFp8, value_scales(scales));
}

// All tokens of the keys of a head, and of its values.
void convert_head_keys(const Side& from, const Side& to, int64_t head) {
  for (int64_t first = 0; first < from.pages.page_size; first += kTokens) {
    convert_keys(from, to, head, first);
  }
}

void convert_head_values(const Side& from, const Side& to, int64_t head) {
  for (int64_t first = 0; first < from.pages.page_size; first += 2) {
    convert_values(from, to, head, first);
  }
}

#if defined(__AVX512F__)
// The same by a HeadEncoder or HeadDecoder, and what it cannot do one by one.
template <class Coder>
void convert_head_keys(const Side& from, const Side& to, int64_t head, const Coder& coder) {
  const bool done = with_groups(from.pages.page_size, [&](auto groups) {
    return coder.template keys<groups.value>(head);
  });
  if (!done) convert_head_keys(from, to, head);
}

template <class Coder>
void convert_head_values(const Side& from, const Side& to, int64_t head, const Coder& coder) {
  for (int64_t first = 0; first < from.pages.page_size; first += kTokens) {
    if (coder.values(head, first)) continue;
    for (int t = 0; t < kTokens; t += 2) convert_values(from, to, head, first + t);
  }
}

template <class Coder>
void convert_heads(const Side& from, const Side& to, const Coder& coder) {  // in the order of memory
  for (int64_t head = 0; head < from.pages.kv_heads; ++head) {
    convert_head_keys(from, to, head, coder);
  }
  for (int64_t head = 0; head < from.pages.kv_heads; ++head) {
    convert_head_values(from, to, head, coder);
  }
}

// From codes to codes: one side has a scale per token, the other too or these static ones.
template <bool kTokenTarget>
void convert_codes(const Side& from, const Side& to) {
  const HeadEncoder<CodeCoder, kTokenTarget> coder(from, to);
  const Side& fixed = kTokenTarget ? from : to;
  for (int64_t head = 0; head < from.pages.kv_heads; ++head) {
    if (Quotient::can_use(fixed.k_scale(head))) {
      convert_head_keys(from, to, head, coder);
    } else {
      convert_head_keys(from, to, head);
    }
  }
  for (int64_t head = 0; head < from.pages.kv_heads; ++head) {
    if (Quotient::can_use(fixed.v_scale(head))) {
      convert_head_values(from, to, head, coder);
    } else {
      convert_head_values(from, to, head);
    }
  }
}
#endif

// Where numbers of either side have a scale per token.
void convert_tokens(const Side& from, const Side& to) {
#if defined(__AVX512F__)
  if (from.pages.kind == kCacheBf16) {
    return convert_heads(from, to, HeadEncoder<Bf16Coder, true>(from, to));
  }
  if (to.pages.kind == kCacheBf16) return convert_heads(from, to, HeadDecoder(from, to));
  if (from.pages.kind != kCacheFp32 && to.pages.kind != kCacheFp32) {
    return to.token_scales() ? convert_codes<true>(from, to) : convert_codes<false>(from, to);
  }
#endif
  for (int64_t head = 0; head < from.pages.kv_heads; ++head) {
    convert_head_keys(from, to, head);
    convert_head_values(from, to, head);
  }
}

void convert_layer(const ConvertPagesArgs& a, int64_t i, int64_t layer) {
  const auto scales = [&](int64_t kind, const float* all) {
    return kind != kCacheFp8 || all == nullptr ? nullptr : all + layer * a.kv_heads;
  };
  const Side from{{const_cast<uint8_t*>(a.source), a.source_page_bytes,
                   a.source_layer_offset + layer * a.source_layer_bytes, a.page_size, a.kv_heads,
                   a.head_dim, a.source_kind},
                  a.source_index[i],
                  scales(a.source_kind, a.source_k_scales),
                  scales(a.source_kind, a.source_v_scales)};
  const Side to{{a.target, a.target_page_bytes,
                 a.target_layer_offset + layer * a.target_layer_bytes, a.page_size, a.kv_heads,
                 a.head_dim, a.target_kind},
                a.target_index[i],
                scales(a.target_kind, a.target_k_scales),
                scales(a.target_kind, a.target_v_scales)};
  if (from.token_scales() || to.token_scales()) {
    convert_tokens(from, to);
  } else {
    convert_plain(from, to);
  }
}

}  // namespace

void convert_pages(const ConvertPagesArgs& a, ThreadPool& pool) {
  parallel_for(pool, a.count * a.layers, [&](int64_t unit, int) {
    convert_layer(a, unit / a.layers, unit % a.layers);
  });
}

}  // namespace bifolio::BIFOLIO_ISA
