#include "kernels/sampling.hpp"

#include <cmath>
#include <limits>

#include "kernels/carve.hpp"
#include "kernels/lanes.hpp"

// Tokens are ranked by falling logit, equal ones by rising id, NaN last. No row is sorted whole if
// that can be helped. With top-k or min-p, the candidates within a distance of the best logit are,
// and the distance grows until they hold what is asked for. Else the weights above a few levels are
// summed, which tells between which two the answer stands, until few enough stand there to be
// sorted.

namespace bifolio::BIFOLIO_ISA {
namespace {

constexpr float kLog2E = 1.44269504F;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Largest {
  float value;
  bool finite;  // all numbers of the row, not the largest alone
};

Largest largest(const float* x, int64_t n) {
  Lanes best = splat(kLowest);
  Lanes excess{};  // x - x is 0 for finite numbers and NaN for all others, and NaN stays
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes here = load(x + i);
    best = max(here, best);
    excess += here - here;
  }
  Largest result{kLowest, sum_lanes(excess) == 0.0F};
  for (int lane = 0; lane < kLanes; ++lane) {
    if (best[lane] > result.value) result.value = best[lane];
  }
  for (; i < n; ++i) {
    if (x[i] > result.value) result.value = x[i];
    result.finite = result.finite && std::isfinite(x[i]);
  }
  return result;
}

// -1 if there is none: of the largest, where nothing is but NaN.
int64_t first_equal(const float* x, int64_t n, float value) {
  int64_t i = 0;
  while (i + kLanes <= n && !any(load(x + i) == splat(value))) i += kLanes;
  for (; i < n; ++i) {
    if (x[i] == value) return i;
  }
  return -1;
}

// What a logit weighs by: NaN as little as the lowest.
float weighed(float x) { return x > kLowest ? x : kLowest; }

// Whether a logit ranks before another whatever their ids.
bool ranks_before(double x, double other) {
  return x > other || (std::isnan(other) && !std::isnan(x));
}

// The sum of exp((x[i] - best) * sharpness), the terms in float, the sum in double. The terms go
// to `terms` if that is given. NaN adds nothing.
double sum_of_exp(const float* x, int64_t n, float best, float sharpness, float* terms = nullptr) {
  constexpr int64_t kBlock = 64 * kLanes;
  const Lanes factor = splat(sharpness * kLog2E);
  double sum = 0.0;
  int64_t i = 0;
  while (i + kLanes <= n) {
    Lanes part = splat(0.0F);
    const int64_t end = i + kBlock < n ? i + kBlock : n;
    for (; i + kLanes <= end; i += kLanes) {
      const Lanes here = max(load(x + i), splat(kLowest));
      const Lanes e = exp2_lanes((here - splat(best)) * factor);
      if (terms) store(terms + i, e);
      part += e;
    }
    sum += static_cast<double>(sum_lanes(part));
  }
  for (; i < n; ++i) {
    const auto e =
        static_cast<float>(std::exp(static_cast<double>((weighed(x[i]) - best) * sharpness)));
    if (terms) terms[i] = e;
    sum += static_cast<double>(e);
  }
  return sum;
}

struct Candidate {
  float logit;
  int32_t id;
};

// Bits that order as floats do, falling.
uint32_t falling_key(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits & 0x80000000U) != 0 ? bits : ~(bits | 0x80000000U);
}

// Stable sort by falling logit: ids that rise before rise after among equals.
void sort_falling(Candidate* items, Candidate* other, int64_t n) {
  constexpr int kBits = 8;
  for (int shift = 0; shift < 32; shift += kBits) {
    int64_t place[(1 << kBits) + 1] = {};
    for (int64_t i = 0; i < n; ++i) {
      ++place[((falling_key(items[i].logit) >> shift) & 0xFF) + 1];
    }
    for (int digit = 0; digit < (1 << kBits); ++digit) place[digit + 1] += place[digit];
    for (int64_t i = 0; i < n; ++i) {
      other[place[(falling_key(items[i].logit) >> shift) & 0xFF]++] = items[i];
    }
    Candidate* swapped = items;
    items = other;
    other = swapped;
  }
}

int64_t count_within(const float* x, int64_t n, float low, float high) {
  IntLanes found{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes here = load(x + i);
    found -= (here >= splat(low)) & (here < splat(high));
  }
  int64_t count = sum_lanes(found);
  for (; i < n; ++i) count += x[i] >= low && x[i] < high ? 1 : 0;
  return count;
}

// Tokens whose logits lie in [low, high), by rising id.
int64_t collect(const float* x, int64_t n, float low, float high, Candidate* out) {
  int64_t count = 0;
  // Adding zero makes -0 and +0 one key.
  const auto take = [&](int64_t i) { out[count++] = {x[i] + 0.0F, static_cast<int32_t>(i)}; };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes here = load(x + i);
    uint32_t mask = lane_mask((here >= splat(low)) & (here < splat(high)));
    for (; mask != 0; mask &= mask - 1) take(i + __builtin_ctz(mask));
  }
  for (; i < n; ++i) {
    if (x[i] >= low && x[i] < high) take(i);
  }
  return count;
}

// Chooses by top-k or min-p, and top-p, among sorted candidates that hold the answer.
int32_t choose(const Candidate* items, int64_t count, double* weight, const DrawRule& rule,
               float best) {
  double sum = 0.0;
  int64_t keep = 0;
  for (; keep < count && !(rule.top_k > 0 && keep == rule.top_k); ++keep) {
    const double w =
        std::exp((static_cast<double>(items[keep].logit) - static_cast<double>(best)) /
                 rule.temperature);
    if (w < rule.min_p) break;
    sum += w;
    weight[keep] = sum;  // cumulative
  }
  if (rule.top_p < 1.0) {
    int64_t place = 0;
    while (place < keep && weight[place] < rule.top_p * sum) ++place;
    if (place < keep) keep = place + 1;
  }
  const double target = rule.uniform * weight[keep - 1];
  int64_t i = 0;
  while (i + 1 < keep && !(weight[i] > target)) ++i;
  return items[i].id;
}

constexpr int kLevels = 8;

// Sums of the weights whose logits are at least levels[i].
void masses_above(const float* x, const float* weights, int64_t n, const float (&levels)[kLevels],
                  double (&masses)[kLevels]) {
  constexpr int64_t kBlock = 64 * kLanes;
  for (double& mass : masses) mass = 0.0;
  int64_t i = 0;
  while (i + kLanes <= n) {
    Lanes parts[kLevels] = {};
    const int64_t end = i + kBlock < n ? i + kBlock : n;
    for (; i + kLanes <= end; i += kLanes) {
      const Lanes here = load(x + i);
      const Lanes w = load(weights + i);
      for (int l = 0; l < kLevels; ++l) parts[l] += here >= splat(levels[l]) ? w : Lanes{};
    }
    for (int l = 0; l < kLevels; ++l) masses[l] += static_cast<double>(sum_lanes(parts[l]));
  }
  for (; i < n; ++i) {
    for (int l = 0; l < kLevels; ++l) masses[l] += x[i] >= levels[l] ? weights[i] : 0.0F;
  }
}

// Tokens with logits in [low, high), and the weight of those above.
struct Slab {
  float low, high;
  double before;
};

struct Scratch {
  Candidate* items;
  Candidate* other;
  double* sums;
  float* weights;
};

Scratch carve_scratch(Carver& carver, int64_t vocab) {
  return {carver.take<Candidate>(vocab), carver.take<Candidate>(vocab),
          carver.take<double>(vocab), carver.take<float>(vocab)};
}

// One row without top-k and min-p: weights exp((x - best) / temperature) of the whole row.
class WholeRow {
 public:
  WholeRow(const float* x, int64_t vocab, float best, double temperature, const Scratch& scratch)
      : x_(x), vocab_(vocab), best_(best), temperature_(temperature), scratch_(scratch) {
    constexpr double kSharpest = 1e30;  // where all but the best weigh nothing; 0 times it is 0
    const auto sharpness = static_cast<float>(std::fmin(1.0 / temperature, kSharpest));
    total_ = sum_of_exp(x, vocab, best, sharpness, scratch.weights);
  }

  int32_t draw(double top_p, double uniform) const {
    if (top_p >= 1.0) return find(uniform * total_, false).id;
    const Place last = find(top_p * total_, true);
    const Place drawn = find(uniform * last.sum, false);
    // Sums of floats and of doubles differ in their last bits, so rank decides and not the sums.
    return ranks_behind(drawn, last) ? last.id : drawn.id;
  }

 private:
  struct Place {
    int32_t id;
    float logit;
    double sum;  // of the weights down to it
  };

  static bool ranks_behind(const Place& one, const Place& other) {
    return one.logit < other.logit || (one.logit == other.logit && one.id > other.id);
  }

  // The first token in rank down to which the weights sum to more than the goal, or with `equal` to
  // as much. A goal that no sum exceeds counts as the whole: what weighs nothing is never found.
  Place find(double goal, bool equal) const {
    constexpr int64_t kFew = 256;
    constexpr int kMostRounds = 5;
    if (goal >= total_) {
      goal = total_;
      equal = true;
    }
    const auto reached = [=](double sum) { return sum > goal || (equal && sum == goal); };
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    Slab slab{-kInfinity, kInfinity, 0.0};
    for (int round = 0; round < kMostRounds; ++round) {
      narrow(slab, reached);
      if (count_within(x_, vocab_, slab.low, slab.high) <= kFew) break;
    }
    const int64_t count = collect(x_, vocab_, slab.low, slab.high, scratch_.items);
    sort_falling(scratch_.items, scratch_.other, count);
    Place place{0, static_cast<float>(best_), slab.before};
    for (int64_t i = 0; i < count && (i == 0 || !reached(place.sum)); ++i) {
      const Candidate& item = scratch_.items[i];
      const double w = std::exp((static_cast<double>(item.logit) - best_) / temperature_);
      if (i > 0 && w == 0.0) break;
      place = {item.id, item.logit, place.sum + w};
    }
    return place;
  }

  // Cuts the slab at a few levels and keeps the part that holds the answer. Levels are chosen by
  // the distance to the best logit, in temperatures: first where weights are large at all.
  template <class Reached>
  void narrow(Slab& slab, const Reached& reached) const {
    constexpr double kFirst[kLevels] = {1, 2, 3, 4, 6, 8, 12, 16};
    constexpr double kFarthest = 104;  // beyond, a float has no number for the weight
    const bool first = slab.before == 0.0 && slab.low < -std::numeric_limits<float>::max();
    const double top = slab.high < best_ ? (best_ - slab.high) / temperature_ : 0.0;
    const double bottom =
        std::fmax(top, std::fmin(kFarthest, (best_ - slab.low) / temperature_));
    float levels[kLevels];
    for (int l = 0; l < kLevels; ++l) {
      const double distance = first ? kFirst[l] : top + (bottom - top) * (l + 1) / kLevels;
      levels[l] = static_cast<float>(best_ - distance * temperature_);
    }
    double masses[kLevels];
    masses_above(x_, scratch_.weights, vocab_, levels, masses);
    for (int l = 0; l < kLevels; ++l) {
      if (levels[l] <= slab.low || levels[l] >= slab.high) continue;
      if (reached(masses[l])) {
        slab.low = levels[l];
        return;
      }
      slab.high = levels[l];
      slab.before = masses[l];
    }
  }

  const float* x_;
  int64_t vocab_;
  double best_, temperature_;
  const Scratch& scratch_;
  double total_;
};

// The best token of a row whose best logit is given; 0 where nothing is but NaN.
int32_t best_token(const float* x, int64_t vocab, float best) {
  const int64_t first = first_equal(x, vocab, best);
  return static_cast<int32_t>(first < 0 ? 0 : first);
}

int32_t draw_row(const float* x, int64_t vocab, float best, const DrawRule& rule,
                 const Scratch& scratch) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (!(std::fabs(best) < kInfinity)) return best_token(x, vocab, best);
  if (rule.top_k <= 0 && rule.min_p <= 0.0) {
    return WholeRow(x, vocab, best, rule.temperature, scratch).draw(rule.top_p, rule.uniform);
  }
  double reach = 4.0;
  if (rule.min_p > 0.0) reach = std::fmax(reach, 1.0 - std::log(rule.min_p));
  for (;; reach *= 2.0) {
    const bool whole = !(reach < 64.0);
    const auto low = whole ? kLowest : static_cast<float>(best - reach * rule.temperature);
    const int64_t count = collect(x, vocab, low, kInfinity, scratch.items);
    // Candidates that reach beyond min-p are all there is.
    if (!whole && rule.top_k > count && rule.min_p <= 0.0) continue;
    sort_falling(scratch.items, scratch.other, count);
    return choose(scratch.items, count, scratch.sums, rule, best);
  }
}

}  // namespace

void greedy(const GreedyArgs& a, ThreadPool& pool) {
  parallel_for(pool, a.rows, [&](int64_t row, int) {
    const float* x = a.logits + row * a.stride;
    const Largest best = largest(x, a.vocab);
    const int32_t token = best_token(x, a.vocab, best.value);
    a.tokens[row] = best.finite ? token : ~token;
  });
}

int64_t draw_workspace(const DrawArgs& a, const ThreadPool& pool) {
  Carver carver(nullptr);
  for (int thread = 0; thread < thread_count(pool); ++thread) carve_scratch(carver, a.vocab);
  return carver.used();
}

void draw(const DrawArgs& a, ThreadPool& pool) {
  parallel_for(pool, a.count, [&](int64_t i, int thread) {
    Carver carver(a.workspace);
    Scratch scratch{};
    for (int t = 0; t <= thread; ++t) scratch = carve_scratch(carver, a.vocab);
    const Largest best = largest(a.rows[i], a.vocab);
    const int32_t token = draw_row(a.rows[i], a.vocab, best.value, a.rules[i], scratch);
    a.tokens[i] = best.finite ? token : ~token;
  });
}

void logprobs(const LogprobsArgs& a, ThreadPool&) {
  const float best = largest(a.logits, a.vocab).value;
  const double log_total = std::log(sum_of_exp(a.logits, a.vocab, best, 1.0F));
  const auto logprob = [&](float x) {
    return static_cast<double>(weighed(x)) - static_cast<double>(best) - log_total;
  };
  const float own = a.logits[a.token];
  int32_t rank = 1;
  int64_t kept = 0;  // the best so far stand in ids[1 …] with their logits in logprobs[1 …]
  for (int64_t i = 0; i < a.vocab; ++i) {
    const float x = a.logits[i];
    rank += ranks_before(x, own) || (i < a.token && !ranks_before(own, x)) ? 1 : 0;
    if (a.top == 0 || (kept == a.top && !ranks_before(x, a.logprobs[a.top]))) continue;
    int64_t place = kept < a.top ? ++kept : a.top;
    for (; place > 1 && ranks_before(x, a.logprobs[place - 1]); --place) {
      a.logprobs[place] = a.logprobs[place - 1];
      a.ids[place] = a.ids[place - 1];
    }
    a.logprobs[place] = x;
    a.ids[place] = static_cast<int32_t>(i);
  }
  for (int64_t i = 1; i <= kept; ++i) {
    a.logprobs[i] = logprob(static_cast<float>(a.logprobs[i]));
  }
  a.logprobs[0] = logprob(own);
  a.ids[0] = rank;
}

}  // namespace bifolio::BIFOLIO_ISA
