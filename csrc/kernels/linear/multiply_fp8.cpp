#include "kernels/linear/multiply.hpp"

namespace bifolio::BIFOLIO_ISA {

MultiplyFn multiply_fp8(const WeightLayout& layout, int size) {
  using Fp8 = WideCodes<E4m3ToBf16Pairs>;
  if (layout.scales == Scales::block) return multiply_function<Fp8, BlockScale>(size);
  return multiply_function<Fp8, FullScales>(size);
}

}  // namespace bifolio::BIFOLIO_ISA
