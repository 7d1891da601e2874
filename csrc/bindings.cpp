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
}
