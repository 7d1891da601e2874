// The inner kernel: R rows against one panel of 32 channels, over all of k.
#pragma once

#include <type_traits>

#include "kernels/linear/codes.hpp"
#include "kernels/linear/layout.hpp"

namespace bifolio::BIFOLIO_ISA {

// Rows that meet a panel together; between the numbers, the next larger kernel runs with zeros.
// The sums of the largest must leave registers for a line of weights.
#if defined(__AVX512F__)
#define BIFOLIO_BLOCK_ROWS 1, 2, 3, 4, 6, 8
#elif defined(__AVX2__)
#define BIFOLIO_BLOCK_ROWS 1, 2
#else
#define BIFOLIO_BLOCK_ROWS 1
#endif
inline constexpr int kBlockRows[] = {BIFOLIO_BLOCK_ROWS};
inline constexpr int kBlockSizes = sizeof kBlockRows / sizeof kBlockRows[0];
inline constexpr int kMaxRows = kBlockRows[kBlockSizes - 1];

// Activations of R rows, ready for the product: words interleaved by row.
struct RowBlock {
  int32_t* words;   // [quads][words of a quad][R]
  int32_t* sums;    // [groups][R], [parts][R] if int8: corrections by sums of activations
  float* scales;    // [parts][R]: of int8 activations
};

inline constexpr int64_t kLineBytes = 64;  // of the processor's caches

// Memory to fetch while a panel is multiplied: `step` bytes for every 64 of the panel.
struct Ahead {
  const uint8_t* start;
  int64_t step;
};

// Few rows read weights as fast as memory gives them: there the processor's own prefetcher does
// best, and instructions only disturb it. Many rows take so long over a line that it falls behind.
inline constexpr int kFetchingRows = 6;

template <int R>
inline void fetch(Ahead& ahead, int64_t bytes) {
  if constexpr (R >= kFetchingRows) {
    for (int64_t i = 0; i < bytes; i += kLineBytes) {
      __builtin_prefetch(ahead.start, 0, 2);
      ahead.start += ahead.step;
    }
  }
}

// Where the results of a panel go, straight from the registers: row r to y + r * pitch.
struct Output {
  float* y;
  int64_t pitch;
  const float* bias;      // of the panel's channels; nullptr: none
  const float* residual;  // rows at the pitch of y; nullptr: none
};

// y = residual + (total + bias)
template <int R>
inline void write(const Output& out, Lanes (&total)[R][kVectors]) {
  if (out.bias) {
    for (int v = 0; v < kVectors; ++v) {
      const Lanes bias = load(out.bias + v * kLanes);
      for (int r = 0; r < R; ++r) total[r][v] = total[r][v] + bias;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = r * out.pitch + v * kLanes;
      store(out.y + at, out.residual ? total[r][v] + load(out.residual + at) : total[r][v]);
    }
  }
}

using MultiplyFn = void (*)(const WeightLayout& layout, const uint8_t* panel, Ahead ahead,
                            const RowBlock& rows, const Output& out);

struct NoScales {
  static constexpr bool kOffsets = false;
  explicit NoScales(const WeightLayout&) {}
  void scales(const uint8_t*, Lanes (&)[kVectors]) const {}
};

template <bool kWithOffsets>
struct HalfScales {
  static constexpr bool kOffsets = kWithOffsets;
  explicit HalfScales(const WeightLayout& layout)
      : bf16(layout.scales == Scales::bf16), zeros(layout.zeros) {}
  void scales(const uint8_t* header, Lanes (&s)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t* p = header + 2 * v * kLanes;
      s[v] = bf16 ? load_bf16(p) : load_fp16(p);
    }
  }
  void offsets(const uint8_t* header, Lanes (&s)[kVectors]) const {
    scales(header + 2 * kPanel, s);
    if (!zeros) return;
    Lanes scale[kVectors];
    scales(header, scale);
    for (int v = 0; v < kVectors; ++v) s[v] = -(s[v] * scale[v]);
  }
  bool bf16, zeros;
};

struct FullScales {
  static constexpr bool kOffsets = false;
  explicit FullScales(const WeightLayout&) {}
  void scales(const uint8_t* header, Lanes (&s)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v) {
      s[v] = load(reinterpret_cast<const float*>(header) + v * kLanes);
    }
  }
};

struct BlockScale {
  static constexpr bool kOffsets = false;
  explicit BlockScale(const WeightLayout&) {}
  void scales(const uint8_t* header, Lanes (&s)[kVectors]) const {
    const Lanes one = load(reinterpret_cast<const float*>(header));
    for (int v = 0; v < kVectors; ++v) s[v] = one;
  }
};

inline Lanes to_float(IntLanes x) { return __builtin_convertvector(x, Lanes); }

// What the sums of a group start from. Codes that meet int8 activations are unsigned, zero * Σx
// too large; RowBlock::sums holds the correction, -zero * Σx.
template <class Codes, class Header, int R>
inline void start_sums(const int32_t* part_sums, typename Codes::Sum (&sums)[R][kVectors]) {
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (!Header::kOffsets) {
        sums[r][v] = splat(part_sums[r]);
      } else {
        sums[r][v] = typename Codes::Sum{};
      }
    }
  }
}

// total += offset * Σx, for the sums of one group or part.
template <class Header, int R>
inline void add_offsets(const Header& header, const uint8_t* head, const int32_t* sums,
                        Lanes (&total)[R][kVectors]) {
  Lanes o[kVectors];
  header.offsets(head, o);
  for (int r = 0; r < R; ++r) {
    const Lanes sum = splat(__builtin_bit_cast(float, sums[r]));
    for (int v = 0; v < kVectors; ++v) total[r][v] = fma(o[v], sum, total[r][v]);
  }
}

// What a scale of the weight spans: at most one scale of int8 activations, several, or all of a row.
enum class Span { part, parts, row };

template <class Codes, class Header, Span kSpan, int R>
void multiply_bytes(const WeightLayout& layout, const uint8_t* panel, Ahead ahead,
                    const RowBlock& rows, const Output& out) {
  constexpr bool kManyParts = kSpan != Span::part;
  const Codes codes(layout);
  const Header header(layout);
  const int64_t groups = kSpan == Span::row ? 1 : layout.groups();
  const int64_t group_quads = layout.group_quads();
  const int64_t part_quads = layout.part_quads();
  const int64_t header_bytes = layout.header_bytes();
  int64_t row_left = layout.row_quads();
  const int32_t* x = rows.words;
  const int32_t* part_sums = rows.sums;
  const float* scales = rows.scales;
  Lanes total[R][kVectors];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) total[r][v] = Lanes{};
  }
  for (int64_t group = 0; group < groups; ++group) {
    const uint8_t* head = panel;
    panel += header_bytes;
    fetch<R>(ahead, header_bytes);
    Lanes product[R][kVectors] = {};
    int64_t left = group_quads < row_left ? group_quads : row_left;
    row_left -= left;
    do {
      const int64_t quads = kManyParts && part_quads < left ? part_quads : left;
      IntLanes sums[R][kVectors];
      start_sums<Codes, Header, R>(part_sums, sums);
      for (int64_t q = 0; q < quads; ++q) {
        fetch<R>(ahead, Codes::kLine);
        codes.template quad<R>(panel, x, sums);
        panel += Codes::kLine;
        x += Codes::kWords * R;
      }
      for (int r = 0; r < R; ++r) {
        const Lanes scale = splat(scales[r]);
        for (int v = 0; v < kVectors; ++v) {
          const Lanes part = to_float(sums[r][v]) * scale;
          product[r][v] = kManyParts ? product[r][v] + part : part;
        }
      }
      if constexpr (Header::kOffsets) add_offsets<Header, R>(header, head, part_sums, total);
      part_sums += R;
      scales += R;
      left -= quads;
    } while (kManyParts && left > 0);
    Lanes s[kVectors];
    header.scales(head, s);
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) total[r][v] = fma(s[v], product[r][v], total[r][v]);
    }
  }
  write<R>(out, total);
}

template <class Codes, class Header, int R>
void multiply(const WeightLayout& layout, const uint8_t* panel, Ahead ahead, const RowBlock& rows,
              const Output& out) {
  const Codes codes(layout);
  const Header header(layout);
  const int64_t groups = layout.groups();
  const int64_t group_quads = layout.group_quads();
  const int64_t header_bytes = layout.header_bytes();
  int64_t left = layout.row_quads();
  const int32_t* x = rows.words;
  const int32_t* group_sums = rows.sums;
  Lanes total[R][kVectors];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) total[r][v] = Lanes{};
  }
  for (int64_t group = 0; group < groups; ++group, group_sums += R) {
    const uint8_t* head = panel;
    panel += header_bytes;
    fetch<R>(ahead, header_bytes);
    Lanes sums[R][kVectors];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Lanes{};
    }
    const int64_t quads = group_quads < left ? group_quads : left;
    left -= quads;
    for (int64_t q = 0; q < quads; ++q) {
      fetch<R>(ahead, Codes::kLine);
      codes.template quad<R>(panel, x, sums);
      panel += Codes::kLine;
      x += Codes::kWords * R;
    }
    if constexpr (std::is_same_v<Header, NoScales>) {
      for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVectors; ++v) total[r][v] = sums[r][v];
      }
    } else {
      Lanes s[kVectors];
      header.scales(head, s);
      for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          total[r][v] = fma(s[v], sums[r][v], total[r][v]);
        }
      }
    }
    if constexpr (Header::kOffsets) add_offsets<Header, R>(header, head, group_sums, total);
  }
  write<R>(out, total);
}

template <class Codes, class Header, int... R>
struct MultiplyTable {
  static constexpr MultiplyFn kFunctions[] = {multiply<Codes, Header, R>...};
};

template <class Codes, class Header, Span kSpan, int... R>
struct MultiplyBytesTable {
  static constexpr MultiplyFn kFunctions[] = {multiply_bytes<Codes, Header, kSpan, R>...};
};

// The kernel of the `size`-th entry of kBlockRows, for int8 activations.
template <class Codes, class Header>
inline MultiplyFn multiply_bytes_function(const WeightLayout& layout, int size) {
  if (layout.part_quads() >= layout.group_quads()) {
    return MultiplyBytesTable<Codes, Header, Span::part, BIFOLIO_BLOCK_ROWS>::kFunctions[size];
  }
  if (layout.group) {
    return MultiplyBytesTable<Codes, Header, Span::parts, BIFOLIO_BLOCK_ROWS>::kFunctions[size];
  }
  return MultiplyBytesTable<Codes, Header, Span::row, BIFOLIO_BLOCK_ROWS>::kFunctions[size];
}

// The kernel of the `size`-th entry of kBlockRows.
template <class Codes, class Header>
inline MultiplyFn multiply_function(int size) {
  return MultiplyTable<Codes, Header, BIFOLIO_BLOCK_ROWS>::kFunctions[size];
}

MultiplyFn multiply_float(const WeightLayout& layout, int size);
MultiplyFn multiply_fp8(const WeightLayout& layout, int size);
MultiplyFn multiply_int8(const WeightLayout& layout, int size);
MultiplyFn multiply_int4(const WeightLayout& layout, int size);

}  // namespace bifolio::BIFOLIO_ISA
