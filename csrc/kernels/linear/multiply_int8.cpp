#include "kernels/linear/multiply.hpp"

namespace bifolio::BIFOLIO_ISA {

MultiplyFn multiply_int8(const WeightLayout& layout, int size) {
  const bool full = layout.scales == Scales::fp32;
  if (layout.int8_activations) {
    return full ? multiply_bytes_function<Int8Int8Codes, FullScales>(layout, size)
                : multiply_bytes_function<Int8Int8Codes, HalfScales<false>>(layout, size);
  }
  using Wide = WideCodes<Int8ToBf16>;
  return full ? multiply_function<Wide, FullScales>(size)
              : multiply_function<Wide, HalfScales<false>>(size);
}

}  // namespace bifolio::BIFOLIO_ISA
