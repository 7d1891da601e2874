// Compiled once per instruction set, as every kernel file is.
#include "kernels/attention.hpp"
#include "kernels/rope_store.hpp"
#include "kernels/rows.hpp"
#include "kernels/table.hpp"

namespace bifolio::BIFOLIO_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {
    .gather = gather,
    .rope_store = rope_store,
    .attention = attention,
    .attention_workspace = attention_workspace,
};

}  // namespace bifolio::BIFOLIO_ISA
