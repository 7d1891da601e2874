#include "kernels/linear/pack.hpp"

#include <cstring>

#include "kernels/fp8.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

// Four inputs of one channel (-1: none) from canonical rows; what lies beyond n or k is zero.
template <class Code>
struct Rows {
  const uint8_t* codes;
  int64_t k;

  void quad(int64_t channel, int64_t input, Code (&out)[kQuad]) const {
    std::memset(out, 0, sizeof out);
    if (channel < 0 || input >= k) return;
    const int64_t count = k - input < kQuad ? k - input : kQuad;
    const uint8_t* row = codes + channel * k * static_cast<int64_t>(sizeof(Code));
    std::memcpy(out, row + input * static_cast<int64_t>(sizeof(Code)),
                static_cast<std::size_t>(count) * sizeof(Code));
  }
};

// Four nibbles, the first lowest, as the four bytes of a word.
uint32_t spread_nibbles(uint32_t nibbles) {
  const uint32_t pairs = (nibbles | nibbles << 8) & 0x00ff00ffU;
  return (pairs | pairs << 4) & 0x0f0f0f0fU;
}

// The same of one channel's nibbles; what lies beyond n or k is zero.
uint32_t nibble_quad(const PackArgs& a, int64_t channel, int64_t input) {
  if (channel < 0 || input >= a.layout.k) return 0;
  const int64_t row_bytes = (a.layout.k + 1) / 2;
  const int64_t left = a.layout.k - input;
  const uint8_t* p = a.codes + channel * row_bytes + input / 2;
  const uint32_t low = left > 1 ? p[0] : p[0] & 15U;
  const uint32_t high = left > 3 ? p[1] : left > 2 ? p[1] & 15U : 0U;
  return spread_nibbles(low | high << 8);
}

// The lines of one group, channel by channel: each reads its row on, and the lines of a group stay
// in the first cache until all channels have been there.

void pack_int4(const PackArgs& a, int64_t panel, int64_t input, int64_t quads, uint8_t* lines) {
  constexpr int64_t kLine = 64;
  const int64_t row_bytes = (a.layout.k + 1) / 2;
  for (int64_t c = 0; c < kHalfPanel; ++c) {
    uint8_t* out = lines + 4 * c;
    const int64_t first = a.layout.channel(panel, c);
    const int64_t second = a.layout.channel(panel, c + kHalfPanel);
    const bool whole = input + quads * kQuad <= a.layout.k && first >= 0 && second >= 0;
    const uint8_t* low = whole ? a.codes + first * row_bytes + input / 2 : nullptr;
    const uint8_t* high = whole ? a.codes + second * row_bytes + input / 2 : nullptr;
    for (int64_t q = 0; q < quads; ++q, out += kLine) {
      uint32_t word;
      if (whole) {
        uint16_t codes[2];
        std::memcpy(&codes[0], low + 2 * q, 2);
        std::memcpy(&codes[1], high + 2 * q, 2);
        word = spread_nibbles(codes[0]) | spread_nibbles(codes[1]) << 4;
      } else {
        const int64_t at = input + q * kQuad;
        word = nibble_quad(a, first, at) | nibble_quad(a, second, at) << 4;
      }
      std::memcpy(out, &word, 4);
    }
  }
}

// put(line of a quad, channel, four codes) for all channels and quads of a group.
template <class Code, class Put>
void each_quad(const PackArgs& a, int64_t panel, int64_t input, int64_t quads, uint8_t* lines,
               const Put& put) {
  const Rows<Code> rows{a.codes, a.layout.k};
  const int64_t line_bytes = a.layout.quad_bytes();
  for (int64_t c = 0; c < kPanel; ++c) {
    const int64_t channel = a.layout.channel(panel, c);
    for (int64_t q = 0; q < quads; ++q) {
      Code quad[kQuad];
      rows.quad(channel, input + q * kQuad, quad);
      put(lines + q * line_bytes, c, quad);
    }
  }
}

void pack_bytes(const PackArgs& a, int64_t panel, int64_t input, int64_t quads, uint8_t* lines) {
  const uint8_t flip = a.layout.int8_activations ? 0x80 : 0;
  each_quad<uint8_t>(a, panel, input, quads, lines,
                     [flip](uint8_t* line, int64_t c, const uint8_t (&quad)[kQuad]) {
                       for (int64_t j = 0; j < kQuad; ++j) line[4 * c + j] = quad[j] ^ flip;
                     });
}

void pack_bf16(const PackArgs& a, int64_t panel, int64_t input, int64_t quads, uint8_t* lines) {
  each_quad<uint16_t>(a, panel, input, quads, lines,
                      [](uint8_t* line, int64_t c, const uint16_t (&quad)[kQuad]) {
                        auto* out = reinterpret_cast<uint16_t*>(line);
                        for (int64_t j = 0; j < kQuad; ++j) {
                          out[(j % 2) * 2 * kPanel + 2 * c + j / 2] = quad[j];
                        }
                      });
}

void pack_fp32(const PackArgs& a, int64_t panel, int64_t input, int64_t quads, uint8_t* lines) {
  each_quad<float>(a, panel, input, quads, lines,
                   [](uint8_t* line, int64_t c, const float (&quad)[kQuad]) {
                     auto* out = reinterpret_cast<float*>(line);
                     for (int64_t j = 0; j < kQuad; ++j) out[j * kPanel + c] = quad[j];
                   });
}

// One group's scales (or offsets) of a panel. Channels beyond n get the bytes of zero.
void pack_scales(const PackArgs& a, const uint8_t* source, int64_t panel, int64_t group,
                 uint8_t* header) {
  const bool block = a.layout.scales == Scales::block;
  const int64_t size = block || a.layout.scales == Scales::fp32 ? 4 : 2;
  const int64_t count = a.layout.scale_bytes() / size;
  std::memset(header, 0, static_cast<std::size_t>(a.layout.scale_bytes()));
  for (int64_t c = 0; c < count; ++c) {
    const int64_t row = block ? panel * kPanel / kBlock : a.layout.channel(panel, c);
    if (row < 0) continue;
    std::memcpy(header + c * size, source + (row * a.scale_stride + group) * size,
                static_cast<std::size_t>(size));
  }
}

void pack_panel(const PackArgs& a, int64_t panel) {
  const WeightLayout& layout = a.layout;
  const int64_t line_bytes = layout.quad_bytes();
  uint8_t* out = a.packed + panel * layout.panel_bytes();
  for (int64_t group = 0; group < layout.groups(); ++group) {
    if (a.scales) pack_scales(a, a.scales, panel, group, out);
    if (a.offsets) pack_scales(a, a.offsets, panel, group, out + layout.scale_bytes());
    out += layout.header_bytes();
    const int64_t input = group * layout.group_quads() * kQuad;
    const int64_t quads = layout.quads_of(group);
    switch (layout.codes) {
      case Codes::int4: pack_int4(a, panel, input, quads, out); break;
      case Codes::int8:
      case Codes::fp8: pack_bytes(a, panel, input, quads, out); break;
      case Codes::bf16: pack_bf16(a, panel, input, quads, out); break;
      case Codes::fp32: pack_fp32(a, panel, input, quads, out); break;
    }
    out += quads * line_bytes;
  }
}

float read_scale(const WeightLayout& layout, const uint8_t* header, int64_t channel) {
  uint16_t half;
  float full;
  switch (layout.scales) {
    case Scales::none: return 1.0F;
    case Scales::fp16:
      std::memcpy(&half, header + 2 * channel, 2);
      return float_from_half(half);
    case Scales::bf16:
      std::memcpy(&half, header + 2 * channel, 2);
      return float_from_bf16(half);
    case Scales::fp32: std::memcpy(&full, header + 4 * channel, 4); return full;
    case Scales::block: std::memcpy(&full, header, 4); return full;
  }
  return 1.0F;
}

// The code of input j of a quad, as a number.
float read_code(const WeightLayout& layout, const uint8_t* line, int64_t c, int64_t j) {
  uint16_t half;
  float full;
  switch (layout.codes) {
    case Codes::int4: {
      const int nibble = line[4 * (c % kHalfPanel) + j] >> (c / kHalfPanel * 4) & 15;
      return static_cast<float>(layout.offsets ? nibble : nibble - 8);
    }
    case Codes::int8: {
      const uint8_t flip = layout.int8_activations ? 0x80 : 0;
      return static_cast<float>(static_cast<int8_t>(line[4 * c + j] ^ flip));
    }
    case Codes::fp8: return float_from_e4m3(line[4 * c + j]);
    case Codes::bf16:
      std::memcpy(&half, line + 2 * ((j % 2) * 2 * kPanel + 2 * c + j / 2), 2);
      return float_from_bf16(half);
    case Codes::fp32: std::memcpy(&full, line + 4 * (j * kPanel + c), 4); return full;
  }
  return 0.0F;
}

void read_row(const EmbeddingArgs& a, int64_t channel, float* y) {
  const WeightLayout& layout = a.layout;
  const int64_t c = channel % kPanel;
  const int64_t line_bytes = layout.quad_bytes();
  const uint8_t* p = a.packed + channel / kPanel * layout.panel_bytes();
  for (int64_t group = 0; group < layout.groups(); ++group) {
    const float scale = read_scale(layout, p, c);
    float offset = layout.offsets ? read_scale(layout, p + layout.scale_bytes(), c) : 0.0F;
    if (layout.zeros) offset = -(offset * scale);
    p += layout.header_bytes();
    const int64_t first = group * layout.group_quads();
    const int64_t quads = layout.quads_of(group);
    for (int64_t q = 0; q < quads; ++q, p += line_bytes) {
      const int64_t input = (first + q) * kQuad;
      for (int64_t j = 0; j < kQuad && input + j < layout.k; ++j) {
        const float value = read_code(layout, p, c, j) * scale;
        y[input + j] = layout.offsets ? value + offset : value;
      }
    }
  }
}

}  // namespace

void pack(const PackArgs& a, ThreadPool& pool) {
  parallel_for(pool, a.layout.panels(), [&](int64_t panel, int) { pack_panel(a, panel); });
}

void embedding(const EmbeddingArgs& a, ThreadPool& pool) {
  parallel_for(pool, a.t,
               [&](int64_t t, int) { read_row(a, a.ids[t], a.y + t * a.layout.k); });
}

}  // namespace bifolio::BIFOLIO_ISA
