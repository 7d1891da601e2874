// Compiled once per instruction set, as every kernel file is.
#include "kernels/rows.hpp"
#include "kernels/table.hpp"

namespace bifolio::BIFOLIO_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {
    .gather = gather,
};

}  // namespace bifolio::BIFOLIO_ISA
