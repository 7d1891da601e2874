// One thread's work on one unit: queries against blocks of keys, with an online softmax
// (Milakov & Gimelshein 2018; blocks as in FlashAttention, Dao et al. 2022).
//
// The arithmetic of one query row, the same on every path: keys in splits of 256 and blocks of 64,
// both at fixed positions; within a split a running maximum over blocks; splits merged from first
// to last. Keys outside [lowest seen, own position] weigh nothing and their values are not
// multiplied, so their bytes cannot matter.
#pragma once

#include <type_traits>

#include "kernels/attention_block.hpp"
#include "kernels/attention_plan.hpp"

namespace bifolio::BIFOLIO_ISA {

inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kNoMaximum = -__builtin_inff();

// Memory of one thread. A query row is a token and a query head of the KV head: token * group + g.
struct Scratch {
  BlockMemory block;
  uint32_t* q;          // [rows][key_dim] floats, or pairs of bf16
  float* scores;        // [kMostTileRows][kBlock]
  uint32_t* weights;    // [kMostTileRows][kBlock] floats, or pairs of bf16
  float* edge;          // [dim] pairs: values of a pair of keys of which only one counts
  float* o;             // [rows][dim] of the split at hand
  float* maximum;       // [rows], and some to be read in vain
  float* sum;           // [rows][kLanes]
  int64_t* lowest;      // [rows] first position seen
  int64_t* end;         // [rows] one past the last position seen
  float* total_o;       // [rows][dim] of all splits so far
  float* total_maximum;  // [rows]
  float* total_sum;     // [rows]

  // `dim` numbers of a value, `key_dim` of a query and a key.
  static Scratch carve(Carver& carver, int64_t rows, int64_t key_dim, int64_t dim) {
    Scratch s;
    s.block = {carver.take<float>(key_dim * kBlock), carver.take<float>(dim * kBlock),
               carver.take<float>(kBlock), carver.take<float>(kBlock)};
    s.q = carver.take<uint32_t>(rows * key_dim);
    s.scores = carver.take<float>(kMostTileRows * kBlock);
    s.weights = carver.take<uint32_t>(kMostTileRows * kBlock);
    s.edge = carver.take<float>(dim);
    s.o = carver.take<float>(rows * dim);
    s.maximum = carver.take<float>(rows + kLanes);
    s.sum = carver.take<float>(rows * kLanes);
    s.lowest = carver.take<int64_t>(rows);
    s.end = carver.take<int64_t>(rows);
    s.total_o = carver.take<float>(rows * dim);
    s.total_maximum = carver.take<float>(rows);
    s.total_sum = carver.take<float>(rows);
    return s;
  }
};

// Keys [begin, end) of a block that a token sees.
struct Seen {
  int begin, end;
  bool empty() const { return begin >= end; }
  bool full() const { return begin == 0 && end == kBlock; }
};

// Reader turns keys of pages into blocks, as BlockReader does.
template <class Dot, class Reader = BlockReader<Dot>>
class Worker {
 public:
  using Element = typename Dot::Element;
  static constexpr int kTileRows = Dot::kTileRows;

  Worker(const AttentionArgs& args, const Scratch& scratch)
      : Worker(args, scratch, Reader(page_layer(args), scratch.block), args.head_dim) {}

  // `value_dim` numbers of a value; those of a key are args.head_dim.
  Worker(const AttentionArgs& args, const Scratch& scratch, const Reader& reader, int64_t value_dim)
      : a_(args),
        s_(scratch),
        reader_(reader),
        group_(args.heads / args.kv_heads),
        key_dim_(args.head_dim),
        dim_(value_dim),
        q_(reinterpret_cast<Element*>(scratch.q)),
        weights_(reinterpret_cast<Element*>(scratch.weights)) {}

  // Splits [begin, end), counted from the item's first, of one KV head. Unshared items write their
  // output, shared ones their partial results to `partial` [split][row].
  void run(const Item& item, int64_t head, int64_t begin, int64_t end, float* partial) {
    item_ = &item;
    head_ = head;
    load_bounds();
    load_queries();
    const float k_scale = a_.k_scales == nullptr ? 1.0F : a_.k_scales[head];
    score_scale_ = a_.scale * k_scale * kLog2E;
    key_end_ = (item.split_first + end) * kSplit;
    for (int64_t split = begin; split < end; ++split) {
      run_split(item.split_first + split);
      for (int64_t r = 0; r < rows(); ++r) {
        const float sum = sum_lanes(load(s_.sum + r * kLanes));
        if (item.shared) {
          float* p = partial + (split * rows() + r) * partial_floats(dim_);
          std::memcpy(p, s_.o + r * dim_, dim_ * sizeof(float));
          p[dim_] = s_.maximum[r];
          p[dim_ + 1] = sum;
        } else {
          merge(r, split, s_.o + r * dim_, s_.maximum[r], sum);
        }
      }
    }
    if (!item.shared) write_outputs();
  }

  // Merges the partial results of a shared item.
  void finish(const Item& item, int64_t head, const float* partial) {
    item_ = &item;
    head_ = head;
    load_bounds();
    for (int64_t split = 0; split < item.splits; ++split) {
      for (int64_t r = 0; r < rows(); ++r) {
        const float* p = partial + (split * rows() + r) * partial_floats(dim_);
        merge(r, split, p, p[dim_], p[dim_ + 1]);
      }
    }
    write_outputs();
  }

  Reader& reader() { return reader_; }

 private:
  int64_t rows() const { return item_->count * group_; }
  int64_t ldq() const { return key_dim_ / Dot::kPack; }

  Seen seen(int64_t r, int64_t first_key) const {
    const int64_t begin = s_.lowest[r] - first_key;
    const int64_t end = s_.end[r] - first_key;
    return {static_cast<int>(begin < 0 ? 0 : begin < kBlock ? begin : kBlock),
            static_cast<int>(end < 0 ? 0 : end < kBlock ? end : kBlock)};
  }

  const float* query(int64_t r) const {
    return a_.q + ((item_->first + r / group_) * a_.heads + head_ * group_ + r % group_) *
                     key_dim_;
  }

  float* output(int64_t r) const {
    return a_.out + (query(r) - a_.q) / key_dim_ * dim_;
  }

  void load_bounds() {
    for (int64_t r = 0; r < rows(); ++r) {
      const int64_t position = item_->position + r / group_;
      s_.lowest[r] = lowest_seen(position, a_.window);
      s_.end[r] = position + 1;
    }
  }

  void load_queries() {
    for (int64_t r = 0; r < rows(); ++r) Dot::pack(query(r), key_dim_, q_ + r * ldq());
  }

  void run_split(int64_t split) {
    for (int64_t r = 0; r < rows(); ++r) {
      s_.maximum[r] = kNoMaximum;
      store(s_.sum + r * kLanes, Lanes{});
    }
    std::memset(s_.o, 0, rows() * dim_ * sizeof(float));
    for (int64_t key = split * kSplit; key < (split + 1) * kSplit; key += kBlock) run_block(key);
  }

  void run_block(int64_t first_key) {
    const Seen first = seen(0, first_key);
    const Seen last = seen(rows() - 1, first_key);
    const Seen all{first.begin, last.end};
    if (all.empty()) return;
    const int32_t* table = a_.block_table + item_->row * a_.table_width;
    Block block{};
    reader_.read(table, head_, first_key, all.begin, all.end, block);
    if (first_key + kBlock < key_end_) {
      const Seen next{seen(0, first_key + kBlock).begin, seen(rows() - 1, first_key + kBlock).end};
      reader_.announce(table, head_, first_key + kBlock, next.begin, next.end, block);
    }
    // Strips of equal height, as far as that goes.
    const int64_t strips = (rows() + kTileRows - 1) / kTileRows;
    const int64_t height = (rows() + strips - 1) / strips;
    for (int64_t r = 0; r < rows(); r += height) {
      const int64_t left = rows() - r;
      with_constant<kTileRows>(static_cast<int>(left < height ? left : height),
                               [&](auto n) { run_strip<n.value>(r, first_key, block); });
    }
  }

  // R query rows from row r on.
  template <int R>
  void run_strip(int64_t r, int64_t first_key, const Block& block) {
    const Seen first = seen(r, first_key);
    const Seen last = seen(r + R - 1, first_key);
    const Seen all{first.begin, last.end};
    if (all.empty()) return;
    for (int g = all.begin / kGroup; g * kGroup < all.end; g += Dot::kTileGroups) {
      const int left = (all.end - 1) / kGroup + 1 - g;
      with_constant<Dot::kTileGroups>(left < Dot::kTileGroups ? left : Dot::kTileGroups, [&](auto n) {
        score_tile<Dot, R, n.value>(dot_, q_ + r * ldq(), ldq(), ldq(), block, g,
                                            s_.scores + g * kGroup);
      });
    }
    if (first.full() && last.full()) {
      weigh<R, true>(r, first_key);
      outputs<R>(r, 0, block, 0, kBlock / Dot::kPack, rescale_);
    } else {
      weigh<R, false>(r, first_key);
      partial_outputs<R>(r, first_key, block);
    }
  }

  // Turns the scores of R rows into weights, and moves their running maxima and sums. What the sums
  // and outputs so far must be multiplied with goes to rescale_.
  template <int R, bool kFull>
  void weigh(int64_t r, int64_t first_key) {
    static_assert(R <= kLanes);
    const Lanes old = load(s_.maximum + r);  // beyond row R - 1 too, where nothing changes
    Lanes highest = splat(kNoMaximum);
    for (int i = 0; i < R; ++i) {
      const Seen keys = kFull ? Seen{0, kBlock} : seen(r + i, first_key);
      if (!kFull && keys.empty()) continue;
      const Lanes here = splat(score_scale_ * prepare_scores<kFull>(i, keys));
      highest = lane_index() == i ? here : highest;
    }
    // A row that sees nothing keeps all it has, also when that is nothing: -inf - -inf is no number.
    const Lanes now = max(highest, old);
    store(rescale_, exp2_lanes(old == now ? Lanes{} : old - now));
    store(s_.maximum + r, now);
    for (int i = 0; i < R; ++i) {
      const Seen keys = kFull ? Seen{0, kBlock} : seen(r + i, first_key);
      if (!kFull && keys.empty()) continue;
      Lanes x[kBlockVectors];
      const Lanes shift = splat(-s_.maximum[r + i]);
      for (int c = 0; c < kBlockVectors; ++c) {
        x[c] = fma(load(s_.scores + i * kBlock + c * kLanes), splat(score_scale_), shift);
      }
      exp2_lanes(x);
      const Lanes sum = pack<kFull>(x, keys, i);
      float* total = s_.sum + (r + i) * kLanes;
      store(total, fma(load(total), splat(rescale_[i]), sum));
    }
  }

  // Applies scales of keys and shuts out keys that are not seen; the greatest score, unscaled.
  template <bool kFull>
  [[gnu::always_inline]] float prepare_scores(int i, Seen keys) {
    float* scores = s_.scores + i * kBlock;
    Lanes greatest = splat(kNoMaximum);
    for (int c = 0; c < kBlockVectors; ++c) {
      Lanes x = load(scores + c * kLanes);
      if (a_.kind == kCacheFp8Token) x *= load(s_.block.k_scale + c * kLanes);
      if (!kFull) x = inside(keys, c) ? x : splat(kNoMaximum);
      if (!kFull || a_.kind == kCacheFp8Token) store(scores + c * kLanes, x);
      greatest = max(greatest, x);
    }
    return max_lanes(greatest);
  }

  // Stores weights, times the scales of the values where each has its own; their sum per lane.
  template <bool kFull>
  [[gnu::always_inline]] Lanes pack(Lanes (&x)[kBlockVectors], Seen keys, int i) {
    Element* packed = weights_ + i * (kBlock / Dot::kPack);
    if (a_.kind != kCacheFp8Token) return Dot::pack_weights(x, packed);
    Lanes sum{};
    for (int c = 0; c < kBlockVectors; ++c) {
      sum += x[c];
      x[c] *= load(s_.block.v_scale + c * kLanes);
      if (!kFull) x[c] = inside(keys, c) ? x[c] : Lanes{};
    }
    Dot::pack_weights(x, packed);
    return sum;
  }

  static IntLanes inside(Seen keys, int c) {
    const IntLanes key = lane_index() + c * kLanes;
    return (key >= keys.begin) & (key < keys.end);
  }

  // Adds steps [first, last) to the outputs of R rows; their weights stand from row i on.
  template <int R>
  void outputs(int64_t r, int i, const Block& block, int first, int last, const float* rescale) {
    constexpr int kMost = Dot::kTileVectors;
    for (int64_t vector = 0; vector * kLanes < dim_; vector += kMost) {
      const int64_t left = dim_ / kLanes - vector;
      with_constant<kMost>(left < kMost ? static_cast<int>(left) : kMost, [&](auto n) {
        output_tile<Dot, R, n.value>(dot_, weights_ + i * (kBlock / Dot::kPack), block, vector, first,
                                     last, rescale, s_.o + r * dim_ + vector * kLanes, dim_);
      });
    }
  }

  // Where tokens see different parts of a block: the steps that all rows see in full are taken
  // together, those before and behind token by token.
  template <int R>
  void partial_outputs(int64_t r, int64_t first_key, const Block& block) {
    Seen common{0, kBlock / Dot::kPack};
    for (int i = 0; i < R; ++i) {
      scale_output(r + i, rescale_[i]);
      const Seen steps = whole_steps(seen(r + i, first_key));
      if (steps.begin > common.begin) common.begin = steps.begin;
      if (steps.end < common.end) common.end = steps.end;
    }
    for (int i = 0; i < R;) {
      const Seen keys = seen(r + i, first_key);
      const Seen steps = whole_steps(keys);
      const int n = rows_of_token(r + i, R - i);
      if (!keys.empty()) {
        if (keys.begin % Dot::kPack != 0) edge_output(r + i, i, n, block, keys.begin, 1);
        const int end = common.empty() ? steps.end : common.begin;
        token_outputs(r + i, i, n, block, steps.begin, end);
        if (common.empty()) end_output(r + i, i, n, block, keys);
      }
      i += n;
    }
    if (common.empty()) return;
    outputs<R>(r, 0, block, common.begin, common.end, kOnes);
    for (int i = 0; i < R;) {
      const Seen keys = seen(r + i, first_key);
      const int n = rows_of_token(r + i, R - i);
      token_outputs(r + i, i, n, block, common.end, whole_steps(keys).end);
      end_output(r + i, i, n, block, keys);
      i += n;
    }
  }

  int rows_of_token(int64_t r, int most) const {
    const int64_t n = group_ - r % group_;
    return n < most ? static_cast<int>(n) : most;
  }

  // Steps of which every key is seen.
  static Seen whole_steps(Seen keys) {
    return {(keys.begin + Dot::kPack - 1) / Dot::kPack, keys.end / Dot::kPack};
  }

  void scale_output(int64_t r, float scale) {
    float* o = s_.o + r * dim_;
    for (int64_t d = 0; d < dim_; d += kLanes) store(o + d, load(o + d) * scale);
  }

  void token_outputs(int64_t r, int i, int n, const Block& block, int first, int last) {
    if (first >= last) return;
    with_constant<kTileRows>(
        n, [&](auto rows) { outputs<rows.value>(r, i, block, first, last, kOnes); });
  }

  void end_output(int64_t r, int i, int n, const Block& block, Seen keys) {
    if (keys.end % Dot::kPack != 0 && (keys.begin < keys.end - 1 || keys.begin % Dot::kPack == 0)) {
      edge_output(r, i, n, block, keys.end - 1, 0);
    }
  }

  // One key without its partner in the pair, which is `half` (0 first, 1 second) of the pair.
  void edge_output(int64_t r, int i, int n, const Block& block, int key, int half) {
    const int step = key / 2;
    constexpr int kGroupSteps = kGroup / 2;
    const char* pairs =
        block.v[step / kGroupSteps] + (step % kGroupSteps) * block.v_step;
    using Pair = std::conditional_t<Dot::kVectorBytes == 2 * kLanes, uint16_t, uint32_t>;
    constexpr int kHalfBits = 4 * sizeof(Pair);
    for (int64_t d = 0; d < dim_; ++d) {
      Pair pair;
      std::memcpy(&pair, pairs + d * sizeof pair, sizeof pair);
      constexpr auto kFirst = static_cast<Pair>((1U << kHalfBits) - 1);
      pair = static_cast<Pair>(pair & (half == 0 ? kFirst : ~kFirst));
      std::memcpy(reinterpret_cast<char*>(s_.edge) + d * sizeof pair, &pair, sizeof pair);
    }
    // The patched pair stands in for step 0 of a block; the weights are read from its own step.
    Block patched{};
    patched.v[0] = patched.next_v[0] = reinterpret_cast<const char*>(s_.edge);
    Element* const weights = weights_;
    weights_ += step;
    token_outputs(r, i, n, patched, 0, 1);
    weights_ = weights;
  }

  // Adds what split `split` of the item contributes to row r, if the row sees any of it.
  void merge(int64_t r, int64_t split, const float* o, float maximum, float sum) {
    const int64_t lowest = s_.lowest[r] / kSplit - item_->split_first;
    if (split < lowest || split > (s_.end[r] - 1) / kSplit - item_->split_first) return;
    float* total = s_.total_o + r * dim_;
    if (split == lowest) {
      std::memcpy(total, o, dim_ * sizeof(float));
      s_.total_maximum[r] = maximum;
      s_.total_sum[r] = sum;
      return;
    }
    const float old = s_.total_maximum[r];
    const float now = maximum > old ? maximum : old;
    const float keep = exp2_one(old - now);
    const float add = exp2_one(maximum - now);
    for (int64_t d = 0; d < dim_; d += kLanes) {
      store(total + d, fma(load(o + d), splat(add), load(total + d) * keep));
    }
    s_.total_maximum[r] = now;
    s_.total_sum[r] = s_.total_sum[r] * keep + sum * add;
  }

  void write_outputs() {
    const float v_scale = a_.v_scales == nullptr ? 1.0F : a_.v_scales[head_];
    for (int64_t r = 0; r < rows(); ++r) {
      float* out = output(r);
      const float scale = v_scale / s_.total_sum[r];
      for (int64_t d = 0; d < dim_; d += kLanes) {
        store(out + d, load(s_.total_o + r * dim_ + d) * scale);
      }
    }
  }

  static constexpr float kOnes[kMostTileRows] = {1, 1, 1, 1, 1, 1, 1, 1};

  const AttentionArgs& a_;
  Dot dot_;
  Scratch s_;
  Reader reader_;
  int64_t group_, key_dim_, dim_;
  Element* q_;
  Element* weights_;
  const Item* item_ = nullptr;
  int64_t head_ = 0;
  int64_t key_end_ = 0;  // keys from here on are not for this run
  float score_scale_ = 0;
  alignas(Lanes) float rescale_[kLanes];
};

}  // namespace bifolio::BIFOLIO_ISA
