// silu(gate) * up of a block of rows, behind the product that made both.
#pragma once

#include "kernels/lanes.hpp"
#include "kernels/linear/layout.hpp"

namespace bifolio::BIFOLIO_ISA {

// x * sigmoid(x); the exponential is taken of what is not above 0, so nothing overflows.
inline Lanes silu(Lanes x) {
  constexpr float kLog2E = 1.44269504F;
  const Lanes e = exp2_lanes(abs(x) * -kLog2E);
  return x * ((x < 0 ? e : splat(1.0F)) / (e + 1.0F));
}

// y of `rows` rows from a panel of 16 gates and their ups, the first `width` of each.
inline void gate_rows(const float* panel, int64_t rows, int64_t width, float* y, int64_t pitch) {
  for (int64_t r = 0; r < rows; ++r, panel += kPanel, y += pitch) {
    for (int64_t c = 0; c < width; c += kLanes) {
      const Lanes product = silu(load(panel + c)) * load(panel + kHalfPanel + c);
      const int64_t left = width - c < kLanes ? width - c : kLanes;
      if (left == kLanes) {
        store(y + c, product);
      } else {
        std::memcpy(y + c, &product, static_cast<std::size_t>(left) * sizeof(float));
      }
    }
  }
}

}  // namespace bifolio::BIFOLIO_ISA
