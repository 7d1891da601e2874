// Binds a kernel from the list of its arguments: pointers arrive as integers, by keyword.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <tuple>
#include <type_traits>

#include "runtime/runtime.hpp"

namespace bifolio {

template <class Args, class T>
struct Field {
  const char* name;
  T Args::*member;
};
template <class Args, class T>
Field(const char*, T Args::*) -> Field<Args, T>;

// What Python passes for a field: addresses are integers, 0 stands for "none".
template <class T>
using FromPython = std::conditional_t<std::is_pointer_v<T>, std::uintptr_t, T>;

template <class T>
T from_python(FromPython<T> value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(value);
  } else {
    return value;
  }
}

template <class Args, class... T>
void bind_kernel(nanobind::class_<Runtime>& runtime, const char* name,
                 Kernel<Args> KernelTable::*kernel, Field<Args, T>... fields) {
  runtime.def(
      name,
      [kernel, members = std::tuple(fields.member...)](Runtime& self, FromPython<T>... values) {
        Args args{};
        std::apply([&](auto... member) { ((args.*member = from_python<T>(values)), ...); },
                   members);
        self.call(kernel, args);
      },
      nanobind::arg(fields.name)..., nanobind::call_guard<nanobind::gil_scoped_release>());
}

// The bytes of workspace for such a call; takes the same arguments.
template <class Args, class... T>
void bind_workspace(nanobind::class_<Runtime>& runtime, const char* name,
                    WorkspaceSize<Args> KernelTable::*size, Field<Args, T>... fields) {
  runtime.def(
      name,
      [size, members = std::tuple(fields.member...)](const Runtime& self, FromPython<T>... values) {
        Args args{};
        std::apply([&](auto... member) { ((args.*member = from_python<T>(values)), ...); },
                   members);
        return self.workspace_bytes(size, args);
      },
      nanobind::arg(fields.name)...);
}

}  // namespace bifolio
