#include "kernels/linear/multiply.hpp"

namespace bifolio::BIFOLIO_ISA {

MultiplyFn multiply_int8(const WeightLayout& layout, int size) {
  if (layout.int8_activations) {
    return multiply_bytes_function<Int8Int8Codes, HalfScales<false>>(layout, size);
  }
  return multiply_function<WideCodes<Int8ToBf16>, HalfScales<false>>(size);
}

}  // namespace bifolio::BIFOLIO_ISA
