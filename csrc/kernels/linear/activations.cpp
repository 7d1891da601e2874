#include "kernels/linear/activations.hpp"

#include <cmath>

namespace bifolio::BIFOLIO_ISA {
namespace {

constexpr int64_t kAlign = 64;
constexpr float kInt8Max = 127.0F;
constexpr float kLog2E = 1.44269504F;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The first `count` of kLanes numbers, zeros behind them.
Lanes load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  Lanes x{};
  if (count > 0) std::memcpy(&x, p, static_cast<std::size_t>(count) * sizeof(float));
  return x;
}

// Writes f(x) to y, k_padded numbers: zeros beyond k.
void copy_row(const float* x, int64_t k, int64_t k_padded, float* y) {
  for (int64_t i = 0; i < k_padded; i += kLanes) store(y + i, load_some(x + i, k - i));
}

void norm_row(const float* x, const float* gain, float eps, int64_t k, int64_t k_padded,
              float* y) {
  Lanes squares[2] = {};
  for (int64_t i = 0; i < k_padded; i += kLanes) {
    const Lanes v = load_some(x + i, k - i);
    Lanes& sum = squares[i / kLanes % 2];
    sum = fma(v, v, sum);
  }
  const float mean = sum_lanes(squares[0] + squares[1]) / static_cast<float>(k);
  const Lanes inverse = splat(1.0F / std::sqrt(mean + eps));
  for (int64_t i = 0; i < k_padded; i += kLanes) {
    store(y + i, load_some(gain + i, k - i) * (load_some(x + i, k - i) * inverse));
  }
}

// x * sigmoid(x); the exponential is taken of what is not above 0, so nothing overflows.
Lanes silu(Lanes x) {
  const Lanes e = exp2_lanes(abs(x) * -kLog2E);
  return x * ((x < 0 ? e : splat(1.0F)) / (e + 1.0F));
}

void gate_row(const float* x, int64_t k, int64_t k_padded, float* y) {
  for (int64_t i = 0; i < k_padded; i += kLanes) {
    store(y + i, silu(load_some(x + i, k - i)) * load_some(x + k + i, k - i));
  }
}

// Codes of a row and their scale, absmax / 127. The greatest magnitude is found among the bits, as
// integers, where a NaN is greater than all numbers: a row that holds one gets NaN for its scale.
float quantize_row(const float* f, int64_t k_padded, int8_t* codes) {
  IntLanes greatest{};
  for (int64_t i = 0; i < k_padded; i += kLanes) {
    const IntLanes magnitude = bits(load(f + i)) & 0x7fffffff;
    greatest = magnitude > greatest ? magnitude : greatest;
  }
  int32_t most = 0;
  for (int lane = 0; lane < kLanes; ++lane) most = greatest[lane] > most ? greatest[lane] : most;
  const float scale = most == 0 ? 1.0F : __builtin_bit_cast(float, most) / kInt8Max;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, half to even
  using Bytes [[gnu::vector_size(kLanes)]] = int8_t;
  for (int64_t i = 0; i < k_padded; i += kLanes) {
    const Lanes q = load(f + i) / scale;
    const Lanes clamped = max(splat(-kInt8Max), q > kInt8Max ? splat(kInt8Max) : q);
    const IntLanes whole = bits(clamped + kRound) - bits(splat(kRound));
    const auto bytes = __builtin_convertvector(whole, Bytes);
    std::memcpy(codes + i, &bytes, sizeof bytes);
  }
  return scale;
}

// The numbers of a row as bf16, inputs 0, 2, 1, 3 of each quad; f becomes the rounded numbers.
void round_row(float* f, int64_t k_padded, uint16_t* halves) {
  for (int64_t i = 0; i < k_padded; i += kLanes) {
    const Lanes rounded = round_to_bf16(load(f + i));
    store(f + i, rounded);
    uint32_t words[kLanes];
    std::memcpy(words, &rounded, sizeof words);
    for (int j = 0; j < kLanes; j += 4) {
      halves[i + j] = static_cast<uint16_t>(words[j] >> 16);
      halves[i + j + 1] = static_cast<uint16_t>(words[j + 2] >> 16);
      halves[i + j + 2] = static_cast<uint16_t>(words[j + 1] >> 16);
      halves[i + j + 3] = static_cast<uint16_t>(words[j + 3] >> 16);
    }
  }
}

int32_t sum_codes(const int8_t* codes, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += codes[i];
  return sum;
}

float sum_numbers(const float* f, int64_t count) {
  Lanes sum{};
  for (int64_t i = 0; i < count; i += kLanes) sum = sum + load(f + i);
  return sum_lanes(sum);
}

// Turns f into the words, group sums and scale of row r.
void pack_row(const WeightLayout& layout, const RowShape& shape, float* f, int32_t* temporary,
              int64_t r, int64_t rows, int32_t* words, int32_t* sums, float* scales) {
  int32_t* row = rows == 1 ? words : temporary;
  const int64_t group = layout.group_quads() * kQuad;
  if (layout.int8_activations) {
    auto* codes = reinterpret_cast<int8_t*>(row);
    scales[r] = quantize_row(f, shape.k_padded, codes);
    const int32_t zero = layout.codes == Codes::int4 ? 8 : 128;
    for (int64_t g = 0; g < shape.sums; ++g) {
      const int32_t sum = sum_codes(codes + g * group, group);
      sums[g * rows + r] = layout.offsets
                               ? __builtin_bit_cast(int32_t, static_cast<float>(sum))
                               : -zero * sum;
    }
  } else if (layout.codes == Codes::fp32) {
    std::memcpy(row, f, static_cast<std::size_t>(shape.k_padded) * sizeof(float));
  } else {
    round_row(f, shape.k_padded, reinterpret_cast<uint16_t*>(row));
    for (int64_t g = 0; g < shape.sums; ++g) {
      sums[g * rows + r] = __builtin_bit_cast(int32_t, sum_numbers(f + g * group, group));
    }
  }
  if (rows == 1) return;
  for (int64_t i = 0; i < shape.words; ++i) words[i * rows + r] = row[i];
}

void activate(const LinearArgs& a, const float* x, int64_t k_padded, float* f) {
  const int64_t k = a.layout.k;
  if (a.gain) {
    norm_row(x, a.gain, a.eps, k, k_padded, f);
  } else if (a.gated) {
    gate_row(x, k, k_padded, f);
  } else {
    copy_row(x, k, k_padded, f);
  }
}

}  // namespace

RowShape::RowShape(const WeightLayout& layout) {
  const int64_t numbers = layout.quads() * kQuad;
  // Whole vectors: what a vector writes beyond the row's own words is not read.
  k_padded = (numbers + kLanes - 1) / kLanes * kLanes;
  const int64_t size = layout.int8_activations ? 1 : layout.codes == Codes::fp32 ? 4 : 2;
  words = numbers * size / 4;
  sums = layout.int8_activations || layout.offsets ? layout.groups() : 0;
}

int64_t RowShape::block_bytes(int64_t rows) const {
  // One vector more: a single row is written in place, in whole vectors.
  return aligned(rows * (words + sums + 1) * 4 + kLanes * 4);
}

int64_t RowShape::temporary_bytes() const { return aligned(2 * k_padded * 4); }

RowBlock view_block(const RowShape& shape, int64_t rows, const uint8_t* block) {
  const auto* sums = reinterpret_cast<const int32_t*>(block);
  const int32_t* scales = sums + rows * shape.sums;
  return {.words = scales + rows, .sums = sums, .scales = reinterpret_cast<const float*>(scales)};
}

RowBlock pack_block(const LinearArgs& args, const RowShape& shape, int64_t first, int64_t count,
                    int64_t rows, uint8_t* block, uint8_t* temporary) {
  const RowBlock view = view_block(shape, rows, block);
  if (count < rows) std::memset(block, 0, static_cast<std::size_t>(shape.block_bytes(rows)));
  auto* f = reinterpret_cast<float*>(temporary);
  auto* row = reinterpret_cast<int32_t*>(temporary) + shape.k_padded;
  const int64_t width = args.layout.k * (args.gated ? 2 : 1);
  for (int64_t r = 0; r < count; ++r) {
    activate(args, args.x + (first + r) * width, shape.k_padded, f);
    pack_row(args.layout, shape, f, row, r, rows, const_cast<int32_t*>(view.words),
             const_cast<int32_t*>(view.sums), const_cast<float*>(view.scales));
  }
  return view;
}

}  // namespace bifolio::BIFOLIO_ISA
