// How a weight matrix [n, k] lies in memory once it is packed for multiplication.
//
// Panels of 32 output channels; in a panel, the groups along k; in a group, a header and then one
// line for every four inputs ("quad"). Panels, groups and lines follow each other without gaps, so
// that a product reads one stream. The last group has the quads that are left of k. Channels that n
// lacks, and inputs that k lacks in its last quad, are packed as zeros.
//
//   panel   group 0 │ group 1 │ …
//   group   scales of 32 channels │ offsets of 32 channels │ quad 0 │ quad 1 │ …
//   quad    int4   64 B: byte [16][4], low nibbles channels 0 … 15, high nibbles 16 … 31
//           8 bit 128 B: byte [32][4]
//           bf16  256 B: [2][32][2], inputs 0 and 2 of the quad before 1 and 3
//           fp32  512 B: [4][32]
//
// Bytes of a quad are the operands of a four-way integer product as they stand. Inputs 0 and 2 are
// its even bytes, 1 and 3 its odd ones, so 8-bit and 4-bit codes widen to bf16 pairs by shifts.
// int8 codes that meet int8 activations are stored + 128, because that product takes unsigned
// weights. A weight without groups has one group; fp8 blocks are groups of 128 whose scale, the
// same for all channels of a panel, is stored 16 times. Offsets are numbers to add, or with `zeros`
// zero points: codes that mean zero, which one half of 16 bits holds exactly where the number to
// add, -zero * scale, would need more.
//
// A panel of a gated weight is 16 gates and the ups of the same places, so that one product makes
// both operands of silu(gate) * up.
#pragma once

#include <cstdint>

namespace bifolio {

inline constexpr int64_t kPanel = 32;   // channels
inline constexpr int64_t kHalfPanel = kPanel / 2;
inline constexpr int64_t kQuad = 4;     // inputs
inline constexpr int64_t kBlock = 128;  // side of an fp8 block
inline constexpr int64_t kPart = 64;    // most inputs whose int8 activations share a scale

enum class Codes : int64_t { fp32, bf16, fp8, int8, int4 };
enum class Scales : int64_t { none, fp16, bf16, fp32, block };

struct WeightLayout {
  int64_t n, k;
  int64_t group;  // inputs that share a scale, a multiple of 4; 0: all of a row
  Codes codes;
  Scales scales;
  bool offsets;
  bool zeros;  // offsets are zero points
  bool int8_activations;
  bool gated;  // channels are gates, then as many ups

  // Defined outside the class so that no kernel file keeps a copy (see parallel.hpp).
  int64_t panels() const noexcept;
  // Of place c of a panel, or -1 beyond n.
  int64_t channel(int64_t panel, int64_t c) const noexcept;
  int64_t groups() const noexcept;
  int64_t group_quads() const noexcept;  // of a whole group
  int64_t quads_of(int64_t group) const noexcept;
  int64_t row_quads() const noexcept;
  int64_t quads() const noexcept;  // of a row of activations: whole groups
  int64_t part_quads() const noexcept;  // whose int8 activations share a scale
  int64_t parts() const noexcept;
  int64_t scale_bytes() const noexcept;   // of a group's scales
  int64_t header_bytes() const noexcept;  // scales and offsets
  int64_t quad_bytes() const noexcept;
  int64_t panel_bytes() const noexcept;
  int64_t packed_bytes() const noexcept;
};

}  // namespace bifolio
