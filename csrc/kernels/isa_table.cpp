// Compiled once per instruction set, as every kernel file is.
#include "kernels/table.hpp"

namespace bifolio::BIFOLIO_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {
    .attention = attention,
    .attention_workspace = attention_workspace,
    .convert_pages = convert_pages,
    .draw = draw,
    .draw_workspace = draw_workspace,
    .embedding = embedding,
    .gather = gather,
    .greedy = greedy,
    .index_select = index_select,
    .index_select_workspace = index_select_workspace,
    .latent_attention = latent_attention,
    .latent_attention_workspace = latent_attention_workspace,
    .linear = linear,
    .linear_workspace = linear_workspace,
    .logprobs = logprobs,
    .pack = pack,
    .page_check = page_check,
    .peak_probe = peak_probe,
    .read_probe = read_probe,
    .rope_store = rope_store,
    .seal = seal,
};

}  // namespace bifolio::BIFOLIO_ISA
