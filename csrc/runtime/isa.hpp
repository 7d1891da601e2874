// Which build of the kernels this processor runs.
#pragma once

#include <string>
#include <vector>

namespace bifolio {

enum class Isa { portable, avx2, avx512 };

const char* isa_name(Isa isa);

// Instruction sets that this build has and this processor runs, the slowest first.
std::vector<Isa> supported_isas();

// "auto" (the fastest), or the name of one; std::invalid_argument names the ones that would do.
Isa choose_isa(const std::string& name);

}  // namespace bifolio
