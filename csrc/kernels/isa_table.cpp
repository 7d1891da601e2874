// Compiled once per instruction set, as every kernel file is.
#include "kernels/table.hpp"

namespace bifolio::BIFOLIO_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {
    .attention = attention,
    .attention_workspace = attention_workspace,
    .embedding = embedding,
    .gather = gather,
    .linear = linear,
    .linear_workspace = linear_workspace,
    .pack = pack,
    .rope_store = rope_store,
};

}  // namespace bifolio::BIFOLIO_ISA
