// The Python face of the native kernels: integers in, nothing kept. One statement per kernel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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

}  // namespace

NB_MODULE(_native, m) {
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
}
