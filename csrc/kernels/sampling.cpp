#include "kernels/sampling.hpp"

#include <cmath>
#include <limits>

#include "kernels/carve.hpp"
#include "kernels/lanes.hpp"

// Tokens are ranked by falling logit, equal ones by rising id. No row is sorted whole if that can
// be helped: the candidates within a distance of the best logit are, and the distance grows until
// they hold what is asked for.

namespace bifolio::BIFOLIO_ISA {
namespace {

constexpr float kLog2E = 1.44269504F;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

float largest(const float* x, int64_t n) {
  Lanes best = splat(kLowest);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) best = max(load(x + i), best);
  float result = kLowest;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (best[lane] > result) result = best[lane];
  }
  for (; i < n; ++i) {
    if (x[i] > result) result = x[i];
  }
  return result;
}

int64_t first_equal(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] == value) return i;
  }
  return 0;  // nothing but NaN
}

// The sum of exp((x[i] - best) * sharpness), the terms in float, the sum in double.
double sum_of_exp(const float* x, int64_t n, float best, float sharpness) {
  constexpr int64_t kBlock = 64 * kLanes;
  const Lanes factor = splat(sharpness * kLog2E);
  double sum = 0.0;
  int64_t i = 0;
  while (i + kLanes <= n) {
    Lanes part = splat(0.0F);
    const int64_t end = i + kBlock < n ? i + kBlock : n;
    for (; i + kLanes <= end; i += kLanes) {
      const Lanes e = exp2_lanes((load(x + i) - splat(best)) * factor);
      part += e;
    }
    for (int lane = 0; lane < kLanes; ++lane) sum += static_cast<double>(part[lane]);
  }
  for (; i < n; ++i) sum += std::exp(static_cast<double>((x[i] - best) * sharpness));
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

int64_t collect(const float* x, int64_t n, float threshold, Candidate* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t end = i + kLanes < n ? i + kLanes : n;
    if (end - i == kLanes) {
      const IntLanes above = load(x + i) >= splat(threshold);
      bool any = false;
      for (int lane = 0; lane < kLanes; ++lane) any |= above[lane] != 0;
      if (!any) continue;
    }
    for (int64_t j = i; j < end; ++j) {
      // Adding zero makes -0 and +0 one key.
      if (x[j] >= threshold) out[count++] = {x[j] + 0.0F, static_cast<int32_t>(j)};
    }
  }
  return count;
}

// Chooses among sorted candidates; -1: they may not hold the answer. `total` is the weight of the
// whole row, below 0 where the candidates are the whole row.
int32_t choose(const Candidate* items, int64_t count, double* weight, const DrawRule& rule,
               double total, float best) {
  const bool whole = total < 0.0;
  double sum = 0.0;
  int64_t keep = 0;
  bool cut = false;  // whether the list ends inside the candidates
  for (; keep < count; ++keep) {
    if (rule.top_k > 0 && keep == rule.top_k) {
      cut = true;
      break;
    }
    const double w =
        std::exp((static_cast<double>(items[keep].logit) - static_cast<double>(best)) /
                 rule.temperature);
    if (w < rule.min_p) {
      cut = true;
      break;
    }
    sum += w;
    weight[keep] = sum;  // cumulative
  }
  // The candidates reach beyond min-p, so what they lack does not count.
  cut |= rule.min_p > 0.0 || (rule.top_k > 0 && keep == rule.top_k);
  const double mass = cut || whole ? sum : total;
  double limit = mass;
  if (rule.top_p < 1.0) {
    int64_t place = 0;
    while (place < keep && weight[place] < rule.top_p * mass) ++place;
    if (place == keep && !cut && !whole) return -1;
    if (place < keep) keep = place + 1;
    limit = weight[keep - 1];
    cut = true;
  }
  const double target = rule.uniform * limit;
  for (int64_t i = 0; i < keep; ++i) {
    if (weight[i] > target) return items[i].id;
  }
  return cut || whole ? items[keep - 1].id : -1;
}

struct Scratch {
  Candidate* items;
  Candidate* other;
  double* weight;
};

Scratch carve_scratch(Carver& carver, int64_t vocab) {
  return {carver.take<Candidate>(vocab), carver.take<Candidate>(vocab),
          carver.take<double>(vocab)};
}

int32_t draw_row(const float* x, int64_t vocab, const DrawRule& rule, const Scratch& scratch) {
  const float best = largest(x, vocab);
  if (!(std::fabs(best) < std::numeric_limits<float>::infinity())) {
    return static_cast<int32_t>(first_equal(x, vocab, best));
  }
  double total = 0.0;
  if (rule.top_k <= 0 && rule.min_p <= 0.0) {
    total = sum_of_exp(x, vocab, best, static_cast<float>(1.0 / rule.temperature));
  }
  double reach = 4.0;
  if (rule.min_p > 0.0) reach = std::fmax(reach, 1.0 - std::log(rule.min_p));
  for (;; reach *= 2.0) {
    const auto threshold = static_cast<float>(best - reach * rule.temperature);
    const bool whole = !(reach < 64.0);
    const int64_t count = collect(x, vocab, whole ? kLowest : threshold, scratch.items);
    if (!whole && rule.top_k > count && rule.min_p <= 0.0) continue;
    sort_falling(scratch.items, scratch.other, count);
    const int32_t token =
        choose(scratch.items, count, scratch.weight, rule, whole ? -1.0 : total, best);
    if (token >= 0) return token;
  }
}

}  // namespace

void greedy(const GreedyArgs& a, ThreadPool& pool) {
  parallel_for(pool, a.rows, [&](int64_t row, int) {
    const float* x = a.logits + row * a.vocab;
    a.tokens[row] = static_cast<int32_t>(first_equal(x, a.vocab, largest(x, a.vocab)));
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
    a.tokens[i] = draw_row(a.rows[i], a.vocab, a.rules[i], scratch);
  });
}

void logprobs(const LogprobsArgs& a, ThreadPool&) {
  const float best = largest(a.logits, a.vocab);
  const double log_total = std::log(sum_of_exp(a.logits, a.vocab, best, 1.0F));
  const auto logprob = [&](float x) {
    return static_cast<double>(x) - static_cast<double>(best) - log_total;
  };
  const float own = a.logits[a.token];
  int32_t rank = 1;
  int64_t kept = 0;  // the best so far stand in ids[1 …] with their logits in logprobs[1 …]
  for (int64_t i = 0; i < a.vocab; ++i) {
    const float x = a.logits[i];
    rank += x > own || (x == own && i < a.token) ? 1 : 0;
    if (a.top == 0 || (kept == a.top && !(x > a.logprobs[a.top]))) continue;
    int64_t place = kept < a.top ? ++kept : a.top;
    for (; place > 1 && a.logprobs[place - 1] < x; --place) {
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
