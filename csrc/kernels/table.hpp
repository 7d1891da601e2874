// The kernels of one instruction set as a table. Adding a kernel: its arguments in a header of its
// own, its code in a .cpp file inside namespace bifolio::BIFOLIO_ISA, a line in the struct below,
// one in table.cpp, one in bindings.cpp.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/convert_pages.hpp"
#include "kernels/latent.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/linear/pack.hpp"
#include "kernels/page_check.hpp"
#include "kernels/probe.hpp"
#include "kernels/rope_store.hpp"
#include "kernels/rows.hpp"
#include "kernels/sampling.hpp"
#include "kernels/seal.hpp"
#include "runtime/parallel.hpp"

namespace bifolio {

enum class Isa;

struct KernelTable {
  Kernel<AttentionArgs> attention;
  WorkspaceSize<AttentionArgs> attention_workspace;
  Kernel<ConvertPagesArgs> convert_pages;
  Kernel<DrawArgs> draw;
  WorkspaceSize<DrawArgs> draw_workspace;
  Kernel<EmbeddingArgs> embedding;
  Kernel<GatherArgs> gather;
  Kernel<GreedyArgs> greedy;
  Kernel<IndexSelectArgs> index_select;
  WorkspaceSize<IndexSelectArgs> index_select_workspace;
  Kernel<LatentAttentionArgs> latent_attention;
  WorkspaceSize<LatentAttentionArgs> latent_attention_workspace;
  Kernel<LinearArgs> linear;
  WorkspaceSize<LinearArgs> linear_workspace;
  Kernel<LogprobsArgs> logprobs;
  Kernel<PackArgs> pack;
  Kernel<PageCheckArgs> page_check;
  Kernel<PeakProbeArgs> peak_probe;
  Kernel<ReadProbeArgs> read_probe;
  Kernel<RopeStoreArgs> rope_store;
  Kernel<SealArgs> seal;
};

// The table of an instruction set that supported_isas() names.
const KernelTable& kernel_table(Isa isa);

}  // namespace bifolio
