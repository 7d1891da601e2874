// From the canonical layout of a weight to the packed one, and rows back out of it.
#pragma once

#include "kernels/declare.hpp"
#include "kernels/linear/layout.hpp"

namespace bifolio {

struct PackArgs {
  WeightLayout layout;
  const uint8_t* codes;    // rows of k codes, each row on a byte; int4: low nibble is the even one
  const uint8_t* scales;   // [n, groups], or [ceil(n / 128), groups] for blocks; nullptr: none
  const uint8_t* offsets;  // [n, groups]; nullptr: none
  int64_t scale_stride;    // elements from a channel's (or block row's) scales to the next's
  uint8_t* packed;         // layout.packed_bytes(), aligned to 64
};

struct EmbeddingArgs {
  WeightLayout layout;
  const uint8_t* packed;
  const int32_t* ids;  // [t]
  float* y;            // [t, k]: each number as the format's definition gives it, in float32
  int64_t t;
};

BIFOLIO_DECLARE(pack, PackArgs)
BIFOLIO_DECLARE(embedding, EmbeddingArgs)

}  // namespace bifolio
