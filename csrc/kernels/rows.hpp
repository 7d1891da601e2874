// Moving whole rows.
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct GatherArgs {
  const float* x;        // [., h], rows ldx apart
  const int32_t* index;  // [rows]
  float* y;              // [rows, h], contiguous
  int64_t rows, h, ldx;
};

BIFOLIO_DECLARE(gather, GatherArgs)

}  // namespace bifolio
