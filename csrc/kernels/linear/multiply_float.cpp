#include "kernels/linear/multiply.hpp"

namespace bifolio::BIFOLIO_ISA {

MultiplyFn multiply_float(const WeightLayout& layout, int size) {
  if (layout.codes == Codes::bf16) return multiply_function<Bf16Codes, NoScales>(size);
  return multiply_function<Fp32Codes, NoScales>(size);
}

}  // namespace bifolio::BIFOLIO_ISA
