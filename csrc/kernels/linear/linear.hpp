// y = f(x) Wᵀ + bias + residual for one row to thousands, from one packed weight; f is RMSNorm or
// nothing. Of a gated weight the first half of f(x) Wᵀ + bias are gates, the second are ups, and
// y = silu(gate) * up.
//
// A row's bits depend on the row and the weight alone: each output is one chain of sums along k,
// group after group, whatever the number of rows, tiles or threads.
#pragma once

#include "kernels/declare.hpp"
#include "kernels/linear/layout.hpp"

namespace bifolio {

struct LinearArgs {
  WeightLayout layout;
  const uint8_t* packed;
  const float* x;         // [t, k]
  const float* gain;      // [k]: RMSNorm before the product; nullptr: none
  const float* bias;      // [n] or nullptr
  const float* residual;  // [t, n] or nullptr; none if gated
  const int32_t* order;   // [k]: input j of the weight is number order[j] of f(x); nullptr: j
  float* y;               // [t, n], gated [t, n / 2]
  uint8_t* workspace;     // linear_workspace bytes, aligned to 64
  int64_t t;
  float eps;
};

BIFOLIO_DECLARE(linear, LinearArgs)

// Looks at layout and t.
BIFOLIO_DECLARE_SIZE(linear_workspace, LinearArgs)

}  // namespace bifolio
