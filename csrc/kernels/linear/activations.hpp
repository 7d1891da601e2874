// What comes before the product: RMSNorm, rounding, and the layout of RowBlock.
#pragma once

#include "kernels/linear/linear.hpp"
#include "kernels/linear/multiply.hpp"

namespace bifolio::BIFOLIO_ISA {

// Sizes of one weight's packed activations.
struct RowShape {
  explicit RowShape(const WeightLayout& layout);

  int64_t k_padded;   // numbers of a row
  int64_t words;      // 32-bit words of a row
  int64_t sums;       // groups or parts whose sums are needed, or 0
  int64_t scales;     // parts with a scale of their own, or 0
  int64_t block_bytes(int64_t rows) const;
  int64_t temporary_bytes() const;  // of pack_block, aligned to 64
};

// Packs rows first … first + count - 1 of x (count <= rows) as a block of `rows` rows, the rest
// zeros. `temporary` belongs to the calling thread.
void pack_block(const LinearArgs& args, const RowShape& shape, int64_t first, int64_t count,
                int64_t rows, uint8_t* block, uint8_t* temporary);

// Where the parts of a block lie.
RowBlock view_block(const RowShape& shape, int64_t rows, uint8_t* block);

}  // namespace bifolio::BIFOLIO_ISA
