#include "kernels/linear/activations.hpp"

#include <cmath>

namespace bifolio::BIFOLIO_ISA {
namespace {

constexpr int64_t kAlign = 64;
constexpr float kInt8Max = 127.0F;

using UintLanes [[gnu::vector_size(kLanes * 4)]] = uint32_t;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// How to read a whole vector, and the last one of a row, with zeros behind it.
struct Whole {
  Lanes operator()(const float* p) const { return load(p); }
};

struct Part {
  int64_t count;
  Lanes operator()(const float* p) const {
    Lanes x{};
    std::memcpy(&x, p, static_cast<std::size_t>(count) * sizeof(float));
    return x;
  }
};

// body(i, read) for the vectors at 0, kLanes, … of k numbers.
template <class Body>
void each_vector(int64_t k, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) body(i, Whole{});
  if (i < k) body(i, Part{k - i});
}

// The functions f(x) write whole vectors, zeros beyond k.

void copy_row(const float* x, int64_t k, float* y) {
  each_vector(k, [&](int64_t i, const auto& read) { store(y + i, read(x + i)); });
}

void norm_row(const float* x, const float* gain, float eps, int64_t k, float* y) {
  Lanes squares[4] = {};
  each_vector(k, [&](int64_t i, const auto& read) {
    const Lanes v = read(x + i);
    Lanes& sum = squares[i / kLanes % 4];
    sum = fma(v, v, sum);
  });
  const float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const Lanes inverse = splat(1.0F / std::sqrt(sum / static_cast<float>(k) + eps));
  each_vector(k, [&](int64_t i, const auto& read) {
    store(y + i, read(gain + i) * (read(x + i) * inverse));
  });
}

struct Quantized {
  float scale;
  int32_t sum;  // of the codes
};

// Codes of a part of a row and their scale, absmax / 127. A part that is not finite gets such a
// scale, and so a result that shows it.
Quantized quantize_part(const float* f, int64_t count, int8_t* codes) {
  constexpr float kLeast = 0x1p-120F;  // below, 127 / absmax overflows: such a part counts as zeros
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, half to even
  // Magnitudes are compared as integers, where a NaN is greater than all numbers.
  IntLanes greatest{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const IntLanes magnitude = bits(load(f + i)) & 0x7fffffff;
    greatest = magnitude > greatest ? magnitude : greatest;
  }
  const auto absmax = __builtin_bit_cast(float, max_lanes(greatest));
  const bool zeros = absmax < kLeast;
  const Lanes inverse = splat(zeros ? 0.0F : kInt8Max / absmax);
  using Bytes [[gnu::vector_size(kLanes)]] = int8_t;
  IntLanes sum{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const IntLanes code = bits(load(f + i) * inverse + kRound) - bits(splat(kRound));
    const auto bytes = __builtin_convertvector(code, Bytes);
    std::memcpy(codes + i, &bytes, sizeof bytes);
    sum += code;
  }
  return {zeros ? 1.0F : absmax / kInt8Max, sum_lanes(sum)};
}

// The numbers of a row as bf16, inputs 0, 2, 1, 3 of each quad; f becomes the rounded numbers.
void round_row(float* f, int64_t k_padded, uint16_t* halves) {
  using Halves [[gnu::vector_size(kLanes * 2)]] = uint16_t;
  for (int64_t i = 0; i < k_padded; i += kLanes) {
    const Lanes rounded = round_to_bf16(load(f + i));
    store(f + i, rounded);
    const auto narrow =
        __builtin_convertvector(reinterpret_cast<UintLanes>(rounded) >> 16, Halves);
#if defined(__AVX512F__)
    const Halves mixed = __builtin_shufflevector(narrow, narrow, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9,
                                                 11, 12, 14, 13, 15);
#elif defined(__AVX2__)
    const Halves mixed = __builtin_shufflevector(narrow, narrow, 0, 2, 1, 3, 4, 6, 5, 7);
#else
    const Halves mixed = __builtin_shufflevector(narrow, narrow, 0, 2, 1, 3);
#endif
    std::memcpy(halves + i, &mixed, sizeof mixed);
  }
}

float sum_numbers(const float* f, int64_t count) {
  Lanes sum{};
  for (int64_t i = 0; i < count; i += kLanes) sum = sum + load(f + i);
  return sum_lanes(sum);
}

// Memory of one thread: f(x), and the packed rows before they are interleaved.
struct Temporary {
  Temporary(uint8_t* memory, const RowShape& shape)
      : f(reinterpret_cast<float*>(memory)),
        rows(reinterpret_cast<int32_t*>(memory) + shape.k_padded),
        pitch(shape.k_padded) {}

  float* f;
  int32_t* rows;  // [kMaxRows][pitch] words
  int64_t pitch;
};

// Where the sums and scales of a row of a block go.
struct Slot {
  int32_t* sums;
  float* scales;
  int64_t rows;
};

void pack_int8(const WeightLayout& layout, const RowShape& shape, const float* f, int32_t* row,
               const Slot& slot) {
  auto* codes = reinterpret_cast<int8_t*>(row);
  const int64_t numbers = layout.part_quads() * kQuad;
  const int32_t zero = layout.codes == Codes::int4 ? 8 : 128;
  for (int64_t part = 0; part < shape.scales; ++part) {
    const int64_t start = part * numbers;
    const int64_t left = shape.k_padded - start;
    const Quantized q = quantize_part(f + start, numbers < left ? numbers : left, codes + start);
    slot.scales[part * slot.rows] = q.scale;
    slot.sums[part * slot.rows] =
        layout.offsets ? __builtin_bit_cast(int32_t, static_cast<float>(q.sum) * q.scale)
                       : -zero * q.sum;
  }
}

// Turns f into words, group sums and scales.
void pack_row(const WeightLayout& layout, const RowShape& shape, float* f, int32_t* row,
              const Slot& slot) {
  if (layout.int8_activations) {
    pack_int8(layout, shape, f, row, slot);
  } else if (layout.codes == Codes::fp32) {
    std::memcpy(row, f, static_cast<std::size_t>(shape.k_padded) * sizeof(float));
  } else {
    round_row(f, shape.k_padded, reinterpret_cast<uint16_t*>(row));
    const int64_t group = layout.group_quads() * kQuad;
    for (int64_t g = 0; g < shape.sums; ++g) {
      slot.sums[g * slot.rows] =
          __builtin_bit_cast(int32_t, sum_numbers(f + g * group, group));
    }
  }
}

using Eight [[gnu::vector_size(32)]] = int32_t;

// Eight words of each of eight rows, row after row, as eight rows of each word.
void transpose(const int32_t* rows, int64_t pitch, int32_t* out) {
  Eight a[8];
  Eight b[8];
  for (int r = 0; r < 8; ++r) std::memcpy(&a[r], rows + r * pitch, sizeof a[r]);
  for (int r = 0; r < 8; r += 2) {
    b[r] = __builtin_shufflevector(a[r], a[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    b[r + 1] = __builtin_shufflevector(a[r], a[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int r = 0; r < 8; r += 4) {
    for (int i = 0; i < 2; ++i) {
      a[r + 2 * i] = __builtin_shufflevector(b[r + i], b[r + 2 + i], 0, 1, 8, 9, 4, 5, 12, 13);
      a[r + 2 * i + 1] =
          __builtin_shufflevector(b[r + i], b[r + 2 + i], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  std::memcpy(out, b, sizeof b);
}

// Rows of words to words of rows.
void interleave(const int32_t* in, int64_t pitch, int64_t words, int64_t rows, int32_t* out) {
  int64_t i = 0;
  if (rows == 8) {
    for (; i + 8 <= words; i += 8) transpose(in + i, pitch, out + i * rows);
  }
  for (; i < words; ++i) {
    for (int64_t r = 0; r < rows; ++r) out[i * rows + r] = in[r * pitch + i];
  }
}

void activate(const LinearArgs& a, const float* x, float* f) {
  const int64_t k = a.layout.k;
  if (a.gain) {
    norm_row(x, a.gain, a.eps, k, f);
  } else {
    copy_row(x, k, f);
  }
}

}  // namespace

RowShape::RowShape(const WeightLayout& layout) {
  const int64_t numbers = layout.quads() * kQuad;
  // Whole vectors: what a vector writes beyond the row's own words is not read.
  k_padded = (numbers + kLanes - 1) / kLanes * kLanes;
  const int64_t size = layout.int8_activations ? 1 : layout.codes == Codes::fp32 ? 4 : 2;
  words = numbers * size / 4;
  scales = layout.int8_activations ? layout.parts() : 0;
  sums = layout.int8_activations ? scales : layout.offsets ? layout.groups() : 0;
}

int64_t RowShape::block_bytes(int64_t rows) const {
  // One vector more: a single row is written in place, in whole vectors.
  return aligned(rows * (words + sums + scales) * 4 + kLanes * 4);
}

int64_t RowShape::temporary_bytes() const { return aligned((1 + kMaxRows) * k_padded * 4); }

RowBlock view_block(const RowShape& shape, int64_t rows, uint8_t* block) {
  auto* sums = reinterpret_cast<int32_t*>(block);
  int32_t* scales = sums + rows * shape.sums;
  return {.words = scales + rows * shape.scales,
          .sums = sums,
          .scales = reinterpret_cast<float*>(scales)};
}

void pack_block(const LinearArgs& args, const RowShape& shape, int64_t first, int64_t count,
                int64_t rows, uint8_t* block, uint8_t* temporary) {
  const RowBlock view = view_block(shape, rows, block);
  const Temporary memory(temporary, shape);
  if (count < rows) {
    std::memset(block, 0, static_cast<std::size_t>(shape.block_bytes(rows)));
    std::memset(memory.rows + count * memory.pitch, 0,
                static_cast<std::size_t>((rows - count) * memory.pitch) * sizeof(int32_t));
  }
  for (int64_t i = args.layout.k; i < shape.k_padded; ++i) memory.f[i] = 0;
  for (int64_t r = 0; r < count; ++r) {
    const float* x = args.x + (first + r) * args.layout.k;
    int32_t* words = memory.rows + r * memory.pitch;
    if (args.order) {
      auto* natural = reinterpret_cast<float*>(words);
      activate(args, x, natural);
      for (int64_t i = 0; i < args.layout.k; ++i) memory.f[i] = natural[args.order[i]];
    } else {
      activate(args, x, memory.f);
    }
    pack_row(args.layout, shape, memory.f, rows == 1 ? view.words : words,
             {.sums = view.sums + r, .scales = view.scales + r, .rows = rows});
  }
  if (rows > 1) interleave(memory.rows, memory.pitch, shape.words, rows, view.words);
}

}  // namespace bifolio::BIFOLIO_ISA
