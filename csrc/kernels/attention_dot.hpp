// The two products of attention as register tiles, for each kind of operand.
//
//   FloatDot  one number a step: float32 keys [dim][key], values [key][dim], unpacked beforehand
//   PairDot   two numbers a step: bf16 pairs as they stand in a page, sums in float32 (AVX-512)
//   CodeDot   as PairDot, from fp8 pairs as they stand in a page, for few queries a block
//
// Sums run in the order of dimensions (scores) and of keys (outputs), one accumulator for each
// number of the result, so neither the tile nor the neighbours of a row touch its bits.
#pragma once

#include "kernels/fp8.hpp"
#include "kernels/lanes.hpp"

namespace bifolio::BIFOLIO_ISA {

inline constexpr int kBlock = 64;  // keys that are weighed together
inline constexpr int kGroup = 16;  // keys that stand in one page for certain
inline constexpr int kGroups = kBlock / kGroup;
inline constexpr int kBlockVectors = kBlock / kLanes;
inline constexpr int kGroupVectors = kGroup / kLanes;

// Most query rows of a register tile, of any kind of operand.
inline constexpr int kMostTileRows = 8;

// Operands of one block of one KV head. A step covers Dot::kPack dimensions or keys.
struct Block {
  const char* k[kGroups];  // 16 keys of the first step
  const char* v[kGroups];  // all dimensions of the first step
  int64_t k_step, v_step;  // bytes from one step to the next
  // The same of the block that comes next, to be fetched meanwhile; where there is none, any
  // readable address.
  const char* next_k[kGroups];
  const char* next_v[kGroups];
};

// Asks for the 64 bytes at p to be brought into the second-level cache, where Dot reads pages.
template <class Dot>
void fetch([[maybe_unused]] const char* p) {
  if constexpr (Dot::kPack == 2) __builtin_prefetch(p, 0, 2);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls fn with n, 1 <= n <= N, as a constant.
template <int N, class Fn>
void with_constant(int n, const Fn& fn) {
  if (n == N) {
    fn(Constant<N>{});
  } else if constexpr (N > 1) {
    with_constant<N - 1>(n, fn);
  }
}

template <bool kRounded>
struct FloatDot {
  static constexpr bool kTwoAtOnce = false;  // whether two neighbouring vectors load faster together
  static constexpr int kPack = 1;
  static constexpr int kVectorBytes = sizeof(Lanes);
  // A register tile is so many rows high, and so many groups of keys or vectors of outputs wide.
#if defined(__AVX512F__)
  static constexpr int kTileRows = 6, kTileGroups = 4, kTileVectors = 4;
#elif defined(__AVX2__)
  static constexpr int kTileRows = 6, kTileGroups = 1, kTileVectors = 2;
#else
  static constexpr int kTileRows = 2, kTileGroups = 1, kTileVectors = 4;
#endif
  using Element = float;
  using Operand = Lanes;

  Operand load(const char* p) const {
    return BIFOLIO_ISA::load(reinterpret_cast<const float*>(p));
  }
  static Operand splat(Element x) { return BIFOLIO_ISA::splat(x); }
  static Lanes dot(Lanes sum, Operand a, Operand b) { return fma(a, b, sum); }

  static void pack(const float* x, int64_t n, Element* packed) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const Lanes lanes = BIFOLIO_ISA::load(x + i);
      store(packed + i, kRounded ? round_to_bf16(lanes) : lanes);
    }
  }
  // Stores the weights of a block as the output product reads them; their sum per lane, rounded
  // as stored.
  [[gnu::always_inline]] static Lanes pack_weights(const Lanes (&x)[kBlockVectors], Element* packed) {
    Lanes sum{};
    for (int i = 0; i < kBlockVectors; ++i) {
      const Lanes w = kRounded ? round_to_bf16(x[i]) : x[i];
      store(packed + i * kLanes, w);
      sum += w;
    }
    return sum;
  }
};

#if defined(__AVX512F__)
struct PairDot {
  static constexpr bool kTwoAtOnce = false;
  static constexpr int kPack = 2;
  static constexpr int kVectorBytes = sizeof(Lanes);
  static constexpr int kTileRows = 6, kTileGroups = 4, kTileVectors = 4;
  using Element = uint32_t;
  using Operand = __m512i;

  Operand load(const char* p) const { return _mm512_loadu_si512(p); }
  static Operand splat(Element x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
  static Lanes dot(Lanes sum, Operand a, Operand b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  static void pack(const float* x, int64_t n, Element* packed) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const __m256bh half = _mm512_cvtneps_pbh(BIFOLIO_ISA::load(x + i));
      std::memcpy(packed + i / 2, &half, sizeof half);
    }
  }
  [[gnu::always_inline]] static Lanes pack_weights(const Lanes (&x)[kBlockVectors], Element* packed) {
    const Operand ones = splat(0x3f803f80);
    Lanes sum{};
    for (int i = 0; i < kBlockVectors; i += 2) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(x[i + 1], x[i]);
      std::memcpy(packed + i * kLanes / 2, &pairs, sizeof pairs);
      sum = dot(sum, ones, reinterpret_cast<__m512i>(pairs));
    }
    return sum;
  }
};

struct CodeDot : PairDot {
  static constexpr bool kTwoAtOnce = true;
  static constexpr int kVectorBytes = 2 * kLanes;
  static constexpr int kTileRows = 8, kTileGroups = 2, kTileVectors = 2;  // tables take registers

  Operand load(const char* p) const { return widen(p); }
  void load_two(const char* p, Operand& first, Operand& second) const { widen(p, first, second); }

  E4m3ToBf16 widen;
};
#endif

// Scores of R rows with G groups of keys: s[r][key] = sum over steps of q[r] * k.
template <class Dot, int R, int G>
void score_tile(const Dot& dot, const typename Dot::Element* q, int64_t ldq, int64_t steps,
                const Block& block, int first_group, float* s) {
  const char* const* k = block.k + first_group;
  const char* const* next = block.next_k + first_group;
  const int64_t k_step = block.k_step;
  constexpr int C = G * kGroupVectors;
  Lanes sum[R][C] = {};
  const auto add = [&](int64_t i, const typename Dot::Operand(&b)[C]) {
    for (int r = 0; r < R; ++r) {
      const auto a = Dot::splat(q[r * ldq + i]);
      for (int c = 0; c < C; ++c) sum[r][c] = Dot::dot(sum[r][c], a, b[c]);
    }
  };
  int64_t i = 0;
  if constexpr (Dot::kTwoAtOnce) {
    // In pages of 16 tokens, the steps of a group are neighbours.
    for (; k_step == Dot::kVectorBytes && i < steps; i += 2) {
      typename Dot::Operand b[2][C];
      for (int c = 0; c < C; ++c) fetch<Dot>(next[c] + i * k_step);
      for (int c = 0; c < C; ++c) dot.load_two(k[c] + i * k_step, b[0][c], b[1][c]);
      add(i, b[0]);
      add(i + 1, b[1]);
    }
  }
  for (; i < steps; ++i) {
    typename Dot::Operand b[C];
    for (int g = 0; g < G; ++g) fetch<Dot>(next[g] + i * k_step);
    for (int c = 0; c < C; ++c) {
      b[c] = dot.load(k[c / kGroupVectors] + i * k_step + (c % kGroupVectors) * Dot::kVectorBytes);
    }
    add(i, b);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(s + r * kBlock + c * kLanes, sum[r][c]);
  }
}

// The outputs of R rows, C vectors from number `vector` on: o = alpha * o + sum over the steps
// [first, last) of w * v.
template <class Dot, int R, int C>
void output_tile(const Dot& dot, const typename Dot::Element* w, const Block& block, int64_t vector,
                 int first, int last, const float* alpha, float* o, int64_t ldo) {
  constexpr int kGroupSteps = kGroup / Dot::kPack;
  constexpr int ldw = kBlock / Dot::kPack;
  Lanes sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = load(o + r * ldo + c * kLanes) * alpha[r];
  }
  while (first < last) {
    const int group = first / kGroupSteps;
    const int end = last < (group + 1) * kGroupSteps ? last : (group + 1) * kGroupSteps;
    const int64_t offset =
        (first - group * kGroupSteps) * block.v_step + vector * Dot::kVectorBytes;
    const char* v = block.v[group] + offset;
    const char* next = block.next_v[group] + offset;
    for (; first < end; ++first, v += block.v_step, next += block.v_step) {
      typename Dot::Operand b[C];
      for (int line = 0; line < C * Dot::kVectorBytes; line += 64) fetch<Dot>(next + line);
      if constexpr (Dot::kTwoAtOnce && C == 2) {
        dot.load_two(v, b[0], b[1]);
      } else {
        for (int c = 0; c < C; ++c) b[c] = dot.load(v + c * Dot::kVectorBytes);
      }
      for (int r = 0; r < R; ++r) {
        const auto a = Dot::splat(w[r * ldw + first]);
        for (int c = 0; c < C; ++c) sum[r][c] = Dot::dot(sum[r][c], a, b[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(o + r * ldo + c * kLanes, sum[r][c]);
  }
}

}  // namespace bifolio::BIFOLIO_ISA
