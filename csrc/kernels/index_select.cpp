// The lightning indexer's choice (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): every token scores
// the positions before it and keeps the best. A token is computed by itself, so its neighbours
// change nothing.
#include "kernels/attention_block.hpp"
#include "kernels/carve.hpp"
#include "kernels/latent.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

// Memory of one thread.
struct IndexScratch {
  uint32_t* q;      // [heads][dim] floats, or pairs of bf16
  float* keys;      // [dim][kBlock] floats, or [kGroups][dim / 2][kGroup] pairs of bf16
  float* products;  // [kMostTileRows][kBlock]
  float* scores;    // [positions], a whole number of blocks

  static IndexScratch carve(Carver& carver, const IndexSelectArgs& a) {
    IndexScratch s;
    s.q = carver.take<uint32_t>(a.heads * a.dim);
    s.keys = carver.take<float>(a.dim * kBlock);
    s.products = carver.take<float>(kMostTileRows * kBlock);
    s.scores = carver.take<float>((a.max_context + kBlock - 1) / kBlock * kBlock);
    return s;
  }
};

template <class Dot>
class IndexScorer {
 public:
  IndexScorer(const IndexSelectArgs& args, const IndexScratch& scratch) : a_(args), s_(scratch) {}

  // Scores of positions 0 … count - 1 of a row for one token.
  void score(int64_t token, const int32_t* table, int64_t count) {
    auto* q = reinterpret_cast<typename Dot::Element*>(s_.q);
    Dot::pack(a_.q + token * a_.heads * a_.dim, a_.heads * a_.dim, q);
    for (int64_t first = 0; first < count; first += kBlock) {
      const int keys = count - first < kBlock ? static_cast<int>(count - first) : kBlock;
      const int groups = (keys + kGroup - 1) / kGroup;
      Block block{};
      for (int g = 0; g < groups; ++g) load_group(table, first + g * kGroup, g, block);
      add_heads(q, a_.weights + token * a_.heads, block, groups, s_.scores + first);
      scale_keys(table, first, keys);
    }
  }

 private:
  // scores = Σ_h weight_h relu(scale · q_h · code); the key's own scale follows.
  void add_heads(const typename Dot::Element* q, const float* weights, const Block& block,
                 int groups, float* scores) {
    const int64_t steps = a_.dim / Dot::kPack;
    Lanes sum[kBlockVectors] = {};
    for (int64_t h = 0; h < a_.heads; h += Dot::kTileRows) {
      const int64_t left = a_.heads - h;
      const int rows = left < Dot::kTileRows ? static_cast<int>(left) : Dot::kTileRows;
      with_constant<Dot::kTileRows>(rows, [&](auto n) {
        for (int g = 0; g < groups; g += Dot::kTileGroups) {
          const int wide = groups - g < Dot::kTileGroups ? groups - g : Dot::kTileGroups;
          with_constant<Dot::kTileGroups>(wide, [&](auto m) {
            score_tile<Dot, n.value, m.value>(dot_, q + h * steps, steps, steps, block, g,
                                              s_.products + g * kGroup);
          });
        }
      });
      for (int r = 0; r < rows; ++r) {
        const Lanes weight = splat(weights[h + r] * a_.scale);
        for (int c = 0; c < groups * kGroupVectors; ++c) {
          const Lanes product = load(s_.products + r * kBlock + c * kLanes);
          sum[c] = fma(max(product, Lanes{}), weight, sum[c]);
        }
      }
    }
    for (int c = 0; c < kBlockVectors; ++c) store(scores + c * kLanes, sum[c]);
  }

  const uint8_t* record(const int32_t* table, int64_t key) const {
    return a_.pool + table[key / a_.page_size] * a_.page_bytes + a_.index_offset;
  }

  void scale_keys(const int32_t* table, int64_t first, int keys) {
    if (a_.kind != kCacheFp8Token) return;
    for (int i = 0; i < keys; ++i) {
      const auto* scales = reinterpret_cast<const float*>(record(table, first + i) +
                                                          a_.dim * a_.page_size);
      s_.scores[first + i] *= scales[(first + i) % a_.page_size];
    }
  }

  void load_group(const int32_t* table, int64_t key, int g, Block& block) {
    const int64_t bytes = a_.kind == kCacheFp32 ? 4 : 1;
    const int64_t pitch = 2 * a_.page_size * bytes;
    const uint8_t* codes = record(table, key) + 2 * (key % a_.page_size) * bytes;
    if constexpr (Dot::kPack == 2) {
#if defined(__AVX512F__)
      auto* keys = reinterpret_cast<__m512i*>(s_.keys) + g * a_.dim / 2;
      for (int64_t i = 0; i < a_.dim / 2; ++i) {
        _mm512_storeu_si512(keys + i, widen_(codes + i * pitch));
      }
      block.k[g] = reinterpret_cast<const char*>(keys);
      block.k_step = sizeof(__m512i);
#endif
    } else {
      float* keys = s_.keys + g * kGroup;
      for (int64_t i = 0; i < a_.dim / 2; ++i) {
        detail::split_pairs(a_.kind, codes + i * pitch, kGroup, keys + 2 * i * kBlock,
                            keys + (2 * i + 1) * kBlock);
      }
      block.k[g] = reinterpret_cast<const char*>(keys);
      block.k_step = kBlock * sizeof(float);
    }
    block.next_k[g] = block.k[g];
  }

  const IndexSelectArgs& a_;
  IndexScratch s_;
  Dot dot_;
#if defined(__AVX512F__)
  E4m3ToBf16 widen_;
#endif
};

// Unsigned numbers in the order of the floats.
uint32_t rank_of(float x) {
  const auto u = __builtin_bit_cast(uint32_t, x + 0.0F);  // -0 becomes 0
  return u & 0x80000000 ? ~u : u | 0x80000000;
}

// Writes the positions of the `wanted` best of `count` scores in rising order; of equal ones the
// earlier are better. The rank of the last that is good enough is found digit by digit.
void choose_best(const float* scores, int64_t count, int64_t wanted, int64_t* chosen) {
  uint32_t prefix = 0;
  int64_t left = wanted;  // of those whose higher digits are those of `prefix`
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t histogram[256] = {};
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t rank = rank_of(scores[i]);
      const bool candidate = shift == 24 || rank >> (shift + 8) == prefix >> (shift + 8);
      histogram[rank >> shift & 0xff] += candidate;
    }
    uint32_t digit = 255;
    while (histogram[digit] < left) left -= histogram[digit--];
    prefix |= digit << shift;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t rank = rank_of(scores[i]);
    if (rank < prefix || (rank == prefix && left == 0)) continue;
    left -= rank == prefix;
    *chosen++ = i;
  }
}

template <class Dot>
void select(const IndexSelectArgs& a, int64_t thread_bytes, ThreadPool& pool) {
  parallel_section(pool, a.tokens, [&](TileCursor& cursor, int thread) {
    Carver carver(a.workspace + thread * thread_bytes);
    const IndexScratch scratch = IndexScratch::carve(carver, a);
    IndexScorer<Dot> scorer(a, scratch);
    for (int64_t tile = next_tile(cursor); tile >= 0; tile = next_tile(cursor)) {
      const int64_t token = mirrored(tile, a.tokens, pool);  // the later see more
      int64_t row = 0;
      while (token >= a.query_start[row + 1]) ++row;
      const int64_t count = a.context_len[row] - a.query_start[row + 1] + token + 1;
      int64_t* chosen = a.chosen + token * a.width;
      const int64_t kept = count < a.top_k ? count : a.top_k;
      if (count <= a.top_k) {
        for (int64_t i = 0; i < count; ++i) chosen[i] = i;
      } else {
        scorer.score(token, a.block_table + row * a.table_width, count);
        choose_best(scratch.scores, count, kept, chosen);
      }
      for (int64_t i = kept; i < a.width; ++i) chosen[i] = -1;
    }
  });
}

int64_t thread_bytes(const IndexSelectArgs& a) {
  Carver carver(nullptr);
  IndexScratch::carve(carver, a);
  return carver.used();
}

}  // namespace

int64_t index_select_workspace(const IndexSelectArgs& a, const ThreadPool& pool) {
  return thread_count(pool) * thread_bytes(a);
}

void index_select(const IndexSelectArgs& a, ThreadPool& pool) {
#if defined(__AVX512F__)
  if (a.kind != kCacheFp32) return select<PairDot>(a, thread_bytes(a), pool);
  return select<FloatDot<false>>(a, thread_bytes(a), pool);
#else
  if (a.kind == kCacheFp32) return select<FloatDot<false>>(a, thread_bytes(a), pool);
  return select<FloatDot<true>>(a, thread_bytes(a), pool);
#endif
}

}  // namespace bifolio::BIFOLIO_ISA
