#include "kernels/linear/layout.hpp"

namespace bifolio {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t WeightLayout::panels() const noexcept {
  return gated ? ceil_div(n / 2, kHalfPanel) : ceil_div(n, kPanel);
}

int64_t WeightLayout::channel(int64_t panel, int64_t c) const noexcept {
  if (!gated) {
    const int64_t channel = panel * kPanel + c;
    return channel < n ? channel : -1;
  }
  const int64_t place = panel * kHalfPanel + c % kHalfPanel;
  return place < n / 2 ? c / kHalfPanel * (n / 2) + place : -1;
}

int64_t WeightLayout::groups() const noexcept { return group ? ceil_div(k, group) : 1; }

int64_t WeightLayout::group_quads() const noexcept {
  return group ? group / kQuad : row_quads();
}

int64_t WeightLayout::quads_of(int64_t group) const noexcept {
  const int64_t left = row_quads() - group * group_quads();
  return left < group_quads() ? left : group_quads();
}

int64_t WeightLayout::row_quads() const noexcept { return ceil_div(k, kQuad); }

int64_t WeightLayout::quads() const noexcept { return groups() * group_quads(); }

int64_t WeightLayout::part_quads() const noexcept {
  const int64_t most = kPart / kQuad;
  return group && group_quads() < most ? group_quads() : most;
}

int64_t WeightLayout::parts() const noexcept { return ceil_div(quads(), part_quads()); }

int64_t WeightLayout::scale_bytes() const noexcept {
  switch (scales) {
    case Scales::none: return 0;
    case Scales::fp16:
    case Scales::bf16: return kPanel * 2;
    case Scales::fp32: return kPanel * 4;
    case Scales::block: return kPanel / 2 * 4;
  }
  return 0;
}

int64_t WeightLayout::header_bytes() const noexcept { return scale_bytes() * (offsets ? 2 : 1); }

int64_t WeightLayout::quad_bytes() const noexcept {
  switch (codes) {
    case Codes::fp32: return kPanel * kQuad * 4;
    case Codes::bf16: return kPanel * kQuad * 2;
    case Codes::fp8:
    case Codes::int8: return kPanel * kQuad;
    case Codes::int4: return kPanel * kQuad / 2;
  }
  return 0;
}

int64_t WeightLayout::panel_bytes() const noexcept {
  return groups() * header_bytes() + row_quads() * quad_bytes();
}

int64_t WeightLayout::packed_bytes() const noexcept { return panels() * panel_bytes(); }

}  // namespace bifolio
