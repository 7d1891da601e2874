#include "kernels/rows.hpp"

#include <cstring>

namespace bifolio::BIFOLIO_ISA {

void gather(const GatherArgs& a, ThreadPool& pool) {
  const auto bytes = static_cast<std::size_t>(a.h) * sizeof(float);
  parallel_for(pool, a.rows, [&](int64_t row, int) {
    std::memcpy(a.y + row * a.h, a.x + a.index[row] * a.ldx, bytes);
  });
}

}  // namespace bifolio::BIFOLIO_ISA
