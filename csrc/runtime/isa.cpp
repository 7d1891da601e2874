#include "runtime/isa.hpp"

#include <stdexcept>

namespace bifolio {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable: return "portable";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
  }
  return "";
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> found{Isa::portable};
#if defined(BIFOLIO_X86)
  __builtin_cpu_init();
  // All of x86-64-v3 that a hypervisor could hide: without LZCNT its instruction would count wrong
  // instead of failing. Clang learned the names of some later; every processor with the rest has them.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
#if !defined(__clang__)
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt") &&
                    __builtin_cpu_supports("movbe") &&
#endif
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (avx2) found.push_back(Isa::avx2);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
    found.push_back(Isa::avx512);
  }
#endif
  return found;
}

Isa choose_isa(const std::string& name) {
  const std::vector<Isa> supported = supported_isas();
  if (name == "auto") return supported.back();
  std::string names;
  for (const Isa isa : supported) {
    if (name == isa_name(isa)) return isa;
    names += names.empty() ? isa_name(isa) : std::string(", ") + isa_name(isa);
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' is unknown or not supported here; this processor runs: " + names);
}

}  // namespace bifolio
