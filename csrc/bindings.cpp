// The Python face of the native kernels: integers in, nothing kept. One statement per kernel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <initializer_list>
#include <new>
#include <stdexcept>

#include "bind.hpp"

namespace nb = nanobind;
using namespace bifolio;

#define FIELD(name) \
  Field { #name, &A::name }

namespace {

void bind_rows(nb::class_<Runtime>& runtime) {
  using A = GatherArgs;
  bind_kernel(runtime, "gather", &KernelTable::gather, FIELD(x), FIELD(index), FIELD(y),
              FIELD(rows), FIELD(h), FIELD(ldx));
}

void bind_rope_store(nb::class_<Runtime>& runtime) {
  using A = RopeStoreArgs;
  bind_kernel(runtime, "rope_store", &KernelTable::rope_store, FIELD(qkv), FIELD(q),
              FIELD(positions), FIELD(row_of_token), FIELD(block_table), FIELD(cos_sin),
              FIELD(q_gain), FIELD(k_gain), FIELD(pool), FIELD(page_bytes), FIELD(layer_offset),
              FIELD(page_size), FIELD(kv_heads), FIELD(head_dim), FIELD(kind), FIELD(k_scales),
              FIELD(v_scales), FIELD(tokens), FIELD(heads), FIELD(table_width), FIELD(rope_dim),
              FIELD(q_eps), FIELD(k_eps));
}

void bind_attention(nb::class_<Runtime>& runtime) {
  using A = AttentionArgs;
  bind_workspace(runtime, "attention_workspace", &KernelTable::attention_workspace,
                 FIELD(page_size), FIELD(kv_heads), FIELD(head_dim), FIELD(tokens), FIELD(heads),
                 FIELD(table_width));
  bind_kernel(runtime, "attention", &KernelTable::attention, FIELD(q), FIELD(out),
              FIELD(query_start), FIELD(context_len), FIELD(block_table), FIELD(pool),
              FIELD(page_bytes), FIELD(layer_offset), FIELD(page_size), FIELD(kv_heads),
              FIELD(head_dim), FIELD(kind), FIELD(k_scales), FIELD(v_scales), FIELD(workspace),
              FIELD(rows), FIELD(tokens), FIELD(heads), FIELD(table_width), FIELD(window),
              FIELD(scale));
}

void bind_latent(nb::class_<Runtime>& runtime) {
  {
    using A = LatentAttentionArgs;
    bind_workspace(runtime, "latent_attention_workspace", &KernelTable::latent_attention_workspace,
                   FIELD(page_size), FIELD(kv_lora), FIELD(rope), FIELD(tokens), FIELD(heads),
                   FIELD(table_width));
    bind_kernel(runtime, "latent_attention", &KernelTable::latent_attention, FIELD(q), FIELD(out),
                FIELD(query_start), FIELD(context_len), FIELD(block_table), FIELD(chosen),
                FIELD(pool), FIELD(page_bytes), FIELD(layer_offset), FIELD(page_size),
                FIELD(kv_lora), FIELD(rope), FIELD(kind), FIELD(scales), FIELD(workspace),
                FIELD(rows), FIELD(tokens), FIELD(heads), FIELD(table_width), FIELD(chosen_width),
                FIELD(scale));
  }
  {
    using A = IndexSelectArgs;
    bind_workspace(runtime, "index_select_workspace", &KernelTable::index_select_workspace,
                   FIELD(dim), FIELD(heads), FIELD(max_context));
    bind_kernel(runtime, "index_select", &KernelTable::index_select, FIELD(q), FIELD(weights),
                FIELD(query_start), FIELD(context_len), FIELD(block_table), FIELD(chosen),
                FIELD(pool), FIELD(page_bytes), FIELD(index_offset), FIELD(page_size), FIELD(dim),
                FIELD(kind), FIELD(workspace), FIELD(rows), FIELD(tokens), FIELD(heads),
                FIELD(table_width), FIELD(width), FIELD(top_k), FIELD(max_context), FIELD(scale));
  }
}

void bind_sampling(nb::class_<Runtime>& runtime) {
  {
    using A = GreedyArgs;
    bind_kernel(runtime, "greedy", &KernelTable::greedy, FIELD(logits), FIELD(tokens), FIELD(rows),
                FIELD(vocab), FIELD(stride));
  }
  {
    using A = DrawArgs;
    bind_workspace(runtime, "draw_workspace", &KernelTable::draw_workspace, FIELD(vocab));
    bind_kernel(runtime, "draw", &KernelTable::draw, FIELD(rows), FIELD(rules), FIELD(tokens),
                FIELD(workspace), FIELD(count), FIELD(vocab));
  }
  {
    using A = LogprobsArgs;
    bind_kernel(runtime, "logprobs", &KernelTable::logprobs, FIELD(logits), FIELD(logprobs),
                FIELD(ids), FIELD(vocab), FIELD(token), FIELD(top));
  }
}

void bind_pages(nb::class_<Runtime>& runtime) {
  {
    using A = PageCheckArgs;
    bind_kernel(runtime, "page_check", &KernelTable::page_check, FIELD(block_table),
                FIELD(table_width), FIELD(counts), FIELD(pages), FIELD(tags), FIELD(pool),
                FIELD(page_bytes), FIELD(pool_pages), FIELD(rows), FIELD(wrong), FIELD(found),
                FIELD(faults));
  }
  {
    using A = SealArgs;
    bind_kernel(runtime, "seal", &KernelTable::seal, FIELD(data), FIELD(stride), FIELD(bytes),
                FIELD(index), FIELD(count), FIELD(digests));
  }
  {
    using A = ConvertPagesArgs;
    bind_kernel(runtime, "convert_pages", &KernelTable::convert_pages, FIELD(source),
                FIELD(target), FIELD(source_index), FIELD(target_index), FIELD(source_k_scales),
                FIELD(source_v_scales), FIELD(target_k_scales), FIELD(target_v_scales),
                FIELD(count), FIELD(layers), FIELD(page_size), FIELD(kv_heads), FIELD(head_dim),
                FIELD(source_kind), FIELD(source_page_bytes), FIELD(source_layer_offset),
                FIELD(source_layer_bytes), FIELD(target_kind), FIELD(target_page_bytes),
                FIELD(target_layer_offset), FIELD(target_layer_bytes));
  }
}

void bind_probes(nb::class_<Runtime>& runtime) {
  {
    using A = ReadProbeArgs;
    bind_kernel(runtime, "read_probe", &KernelTable::read_probe, FIELD(data), FIELD(bytes),
                FIELD(sink));
  }
  {
    using A = PeakProbeArgs;
    bind_kernel(runtime, "peak_probe", &KernelTable::peak_probe, FIELD(product), FIELD(repeats),
                FIELD(operations), FIELD(sink));
  }
}

// A layout is made from the names of Python's side; std::invalid_argument would be our own mistake.
WeightLayout make_layout(int64_t n, int64_t k, int64_t group, const std::string& codes,
                         const std::string& scales, bool offsets, bool zeros,
                         bool int8_activations, bool gated) {
  const auto index = [](const std::string& name, std::initializer_list<const char*> names) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) throw std::invalid_argument(name);
    return found - names.begin();
  };
  return {.n = n,
          .k = k,
          .group = group,
          .codes = Codes{index(codes, {"fp32", "bf16", "fp8", "int8", "int4"})},
          .scales = Scales{index(scales, {"none", "fp16", "bf16", "fp32", "block"})},
          .offsets = offsets,
          .zeros = zeros,
          .int8_activations = int8_activations,
          .gated = gated};
}

void bind_linear(nb::module_& m, nb::class_<Runtime>& runtime) {
  nb::class_<WeightLayout>(m, "WeightLayout")
      .def("__init__",
           [](WeightLayout* self, int64_t n, int64_t k, int64_t group, const std::string& codes,
              const std::string& scales, bool offsets, bool zeros, bool int8_activations, bool gated) {
             new (self) WeightLayout(
                 make_layout(n, k, group, codes, scales, offsets, zeros, int8_activations, gated));
           },
           nb::arg("n"), nb::arg("k"), nb::arg("group"), nb::arg("codes"), nb::arg("scales"),
           nb::arg("offsets"), nb::arg("zeros"), nb::arg("int8_activations"),
           nb::arg("gated"))
      .def_prop_ro("packed_bytes", &WeightLayout::packed_bytes);
  {
    using A = PackArgs;
    bind_kernel(runtime, "pack", &KernelTable::pack, FIELD(layout), FIELD(codes), FIELD(scales),
                FIELD(offsets), FIELD(scale_stride), FIELD(packed));
  }
  {
    using A = EmbeddingArgs;
    bind_kernel(runtime, "embedding", &KernelTable::embedding, FIELD(layout), FIELD(packed),
                FIELD(ids), FIELD(y), FIELD(t));
  }
  {
    using A = LinearArgs;
    bind_kernel(runtime, "linear", &KernelTable::linear, FIELD(layout), FIELD(packed), FIELD(x),
                FIELD(gain), FIELD(bias), FIELD(residual), FIELD(order), FIELD(y), FIELD(workspace),
                FIELD(t), FIELD(eps));
  }
  {
    using A = LinearArgs;
    bind_workspace(runtime, "linear_workspace", &KernelTable::linear_workspace, FIELD(layout),
                   FIELD(t));
  }
}

}  // namespace

NB_MODULE(_native, m) {
  // An engine freezes its model for the garbage collector, so a process ends with weights alive.
  nb::set_leak_warnings(false);
  m.doc() = "Native CPU kernels of bifolio";
  m.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
    return names;
  });
  nb::class_<Tape>(m, "Tape").def("__len__", &Tape::size);

  auto runtime = nb::class_<Runtime>(m, "Runtime");
  runtime.def(nb::init<int, const std::string&>(), nb::arg("threads"), nb::arg("isa"))
      .def_prop_ro("isa", [](const Runtime& self) { return isa_name(self.isa()); })
      .def_prop_ro("threads", [](Runtime& self) { return self.pool().threads(); })
      .def_prop_ro("recording", &Runtime::recording)
      .def("start_recording", &Runtime::start_recording)
      .def("stop_recording", &Runtime::stop_recording)
      .def("replay", &Runtime::replay, nb::arg("tape"),
           nb::call_guard<nb::gil_scoped_release>());
  bind_rows(runtime);
  bind_rope_store(runtime);
  bind_attention(runtime);
  bind_latent(runtime);
  bind_linear(m, runtime);
  bind_sampling(runtime);
  bind_pages(runtime);
  bind_probes(runtime);
}
