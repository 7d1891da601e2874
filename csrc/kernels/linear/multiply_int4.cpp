#include "kernels/linear/multiply.hpp"

namespace bifolio::BIFOLIO_ISA {

MultiplyFn multiply_int4(const WeightLayout& layout, int size) {
  if (layout.int8_activations) {
    return layout.offsets
               ? multiply_bytes_function<Int4Int8Codes, HalfScales<true>>(layout, size)
               : multiply_bytes_function<Int4Int8Codes, HalfScales<false>>(layout, size);
  }
  return layout.offsets ? multiply_function<Int4Codes, HalfScales<true>>(size)
                        : multiply_function<Int4Codes, HalfScales<false>>(size);
}

}  // namespace bifolio::BIFOLIO_ISA
