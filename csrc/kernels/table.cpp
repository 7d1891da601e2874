#include "kernels/table.hpp"

#include "runtime/isa.hpp"

namespace bifolio {

namespace portable {
extern const KernelTable kTable;
}
#if defined(BIFOLIO_X86)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif

const KernelTable& kernel_table(Isa isa) {
#if defined(BIFOLIO_X86)
  if (isa == Isa::avx512) return avx512::kTable;
  if (isa == Isa::avx2) return avx2::kTable;
#endif
  static_cast<void>(isa);
  return portable::kTable;
}

}  // namespace bifolio
