// Heads converted where either side has a scale per token: the quick ways of AVX-512.
#pragma once

#include "kernels/convert_codes.hpp"
#include "kernels/convert_side.hpp"

#if defined(__AVX512F__)
namespace bifolio::BIFOLIO_ISA {

template <int kValue>
struct IntConstant {
  static constexpr int value = kValue;
};

// Calls fn with the number of groups of kTokens in a page as a constant.
template <class Fn>
bool with_groups(int64_t page_size, const Fn& fn) {
  switch (page_size / kTokens) {
    case 1: return fn(IntConstant<1>{});
    case 2: return fn(IntConstant<2>{});
    case 4: return fn(IntConstant<4>{});
    case 8: return fn(IntConstant<8>{});
    case 16: return fn(IntConstant<16>{});
    default: return false;
  }
}

inline __m256i load_halves_256(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// To codes, by a coder of bf16 numbers or of codes.
template <class Coder, bool kTokenTarget>
class HeadEncoder {
 public:
  HeadEncoder(const Side& from, const Side& to) : from_(from), to_(to) {}

  // Of all tokens of a page. false: not with these numbers or scales; some of the target may be
  // written then.
  template <int kGroups>
  bool keys(int64_t head) const {
    const Chunks rows = keys_of(from_, to_, head, 0);
    typename Coder::Greatest best[kGroups];
    if constexpr (kTokenTarget) {
      for (int64_t i = 0; i < rows.count; ++i) {
        const uint8_t* row = rows.source + i * rows.source_pitch;
        for (int g = 0; g < kGroups; ++g) best[g].take(row + g * Coder::kBytes);
      }
    }
    decltype(Scales{}.keys()) scales[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      Scales found;
      const __m512 absmax = absmax_of_keys(best[g].result(widen_));
      if (!find(from_.pages.k_scales(from_.page, head) + g * kTokens, from_.k_scale(head), absmax,
                to_.pages.k_scales(to_.page, head) + g * kTokens, to_.k_scale(head), found)) {
        return false;
      }
      scales[g] = found.keys();
    }
    // Larger heads and the next one are too much for the first cache.
    constexpr _mm_hint kHint = kGroups > 4 ? _MM_HINT_T1 : _MM_HINT_T0;
    for (int64_t i = 0; i < rows.count; i += 2) {  // in the order of memory: no row is met twice
      const uint8_t* source = rows.source + i * rows.source_pitch;
      uint8_t* target = rows.target + i * rows.target_pitch;
      for (int g = 0; g < kGroups; ++g) {
        prefetch<kHint>(source + g * Coder::kBytes + rows.count * rows.source_pitch);
        prefetch<kHint>(source + g * Coder::kBytes + (rows.count + 1) * rows.source_pitch);
        code_(source + g * Coder::kBytes, target + g * kChunk, kGroups, scales[g]);
      }
    }
    return true;
  }

  // Of kTokens tokens; false as above.
  bool values(int64_t head, int64_t first) const {
    const Chunks pair = values_of(from_, to_, head, first);
    const int64_t source_bytes = pair.count * pair.source_pitch;
    __m512i best[kTokens / 2] = {};
    if constexpr (kTokenTarget) {
      for (int p = 0; p < kTokens / 2; ++p) {
        typename Coder::Greatest of_pair;
        for (int64_t i = 0; i < pair.count; ++i) {
          of_pair.take(pair.source + p * source_bytes + i * Coder::kBytes);
        }
        best[p] = of_pair.result(widen_);
      }
    }
    Scales all;
    if (!find(from_.pages.v_scales(from_.page, head) + first, from_.v_scale(head),
              absmax_of_values(best), to_.pages.v_scales(to_.page, head) + first,
              to_.v_scale(head), all)) {
      return false;
    }
    for (int p = 0; p < kTokens / 2; ++p) {
      const auto scales = all.values(p);
      for (int64_t i = 0; i < pair.count; i += 2) {
        const uint8_t* source = pair.source + p * source_bytes + i * Coder::kBytes;
        uint8_t* target = pair.target + (p * pair.count + i) * kChunk;
        prefetch<_MM_HINT_T0>(source + kTokens / 2 * source_bytes);
        prefetch<_MM_HINT_T0>(source + kTokens / 2 * source_bytes + Coder::kBytes);
        code_(source, target, i + 1 < pair.count, scales);  // or the last chunk twice
      }
    }
    return true;
  }

 private:
  using Scales = typename Coder::Scales;

  // The scales of kTokens tokens; those of the target are found and stored.
  bool find(const uint16_t* source_scales, float source_scale, __m512 absmax,
            uint16_t* target_scales, float target_scale, Scales& scales) const {
    __m512 from = _mm512_set1_ps(source_scale);
    if (from_.token_scales()) {
      const __m256i halves = load_halves_256(source_scales);
      constexpr int16_t kMost = 0x7bff;
      if (_mm256_cmpgt_epu16_mask(halves, _mm256_set1_epi16(kMost)) != 0) return false;
      from = _mm512_cvtph_ps(halves);
    }
    __m512 to = _mm512_set1_ps(target_scale);
    if constexpr (kTokenTarget) {
      absmax *= from;
      if (!has_token_scales(absmax)) return false;
      const __m256i halves = token_scales(absmax);
      std::memcpy(target_scales, &halves, sizeof halves);
      to = _mm512_cvtph_ps(halves);
    }
    scales = Scales::over(from, to);
    return true;
  }

  // A chunk of what comes next.
  template <_mm_hint kHint>
  static void prefetch(const uint8_t* source) {
    _mm_prefetch(source, kHint);
  }

  const Side& from_;
  const Side& to_;
  Coder code_;
  E4m3ToBf16 widen_;
};

// To bf16.
class HeadDecoder {
 public:
  HeadDecoder(const Side& from, const Side& to) : from_(from), to_(to) {}

  template <int kGroups>
  bool keys(int64_t head) const {
    const __m512i half = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i other = _mm512_add_epi32(half, _mm512_set1_epi32(kTokens / 2));
    const Chunks rows = keys_of(from_, to_, head, 0);
    __m512 scales[kGroups][2];
    for (int g = 0; g < kGroups; ++g) {
      const __m512 all = load_scales(from_.pages.k_scales(from_.page, head) + g * kTokens);
      scales[g][0] = _mm512_permutexvar_ps(half, all);
      scales[g][1] = _mm512_permutexvar_ps(other, all);
    }
    for (int64_t i = 0; i < rows.count; ++i) {
      for (int g = 0; g < kGroups; ++g) {
        decode_(rows.source + i * rows.source_pitch + g * kChunk,
                rows.target + i * rows.target_pitch + 2 * g * kChunk, scales[g][0], scales[g][1]);
      }
    }
    return true;
  }

  bool values(int64_t head, int64_t first) const {
    Chunks pair = values_of(from_, to_, head, first);
    double scales[kTokens / 2];  // two in each
    _mm512_storeu_ps(scales, load_scales(from_.pages.v_scales(from_.page, head) + first));
    for (const double both : scales) {
      const __m512 alternating = _mm512_castpd_ps(_mm512_set1_pd(both));
      for (int64_t i = 0; i < pair.count; ++i) {
        decode_(pair.source, pair.target, alternating, alternating);
        pair.source += pair.source_pitch;
        pair.target += pair.target_pitch;
      }
    }
    return true;
  }

 private:
  static __m512 load_scales(const uint16_t* scales) {
    return _mm512_cvtph_ps(load_halves_256(scales));
  }

  const Side& from_;
  const Side& to_;
  TokenDecoder decode_;
};

}  // namespace bifolio::BIFOLIO_ISA
#endif
