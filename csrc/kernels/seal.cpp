#include "kernels/seal.hpp"

#include "kernels/lanes.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace bifolio::BIFOLIO_ISA {
namespace {

// Names and values are those of the specification; what a seed of 0 leaves alone is left out.
constexpr uint64_t kPrime32_1 = 0x9E3779B1;
constexpr uint64_t kPrime32_2 = 0x85EBCA77;
constexpr uint64_t kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kPrimeMx1 = 0x165667919E3779F9;
constexpr uint64_t kPrimeMx2 = 0x9FB21C651E98DF25;

constexpr int64_t kSecretBytes = 192;
alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

template <class T>
T read(const uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

uint64_t read64(const uint8_t* p) { return read<uint64_t>(p); }

uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }

uint64_t folded_product(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t avalanche(uint64_t x) {
  x = (x ^ x >> 37) * kPrimeMx1;
  return x ^ x >> 32;
}

uint64_t avalanche_xxh64(uint64_t x) {
  x = (x ^ x >> 33) * kPrime64_2;
  x = (x ^ x >> 29) * kPrime64_3;
  return x ^ x >> 32;
}

uint64_t digest_1_to_3(const uint8_t* p, int64_t n) {
  const uint32_t combined = static_cast<uint32_t>(p[n - 1]) | static_cast<uint32_t>(n) << 8 |
                            static_cast<uint32_t>(p[0]) << 16 |
                            static_cast<uint32_t>(p[n >> 1]) << 24;
  return avalanche_xxh64(combined ^ (read<uint32_t>(kSecret) ^ read<uint32_t>(kSecret + 4)));
}

uint64_t digest_4_to_8(const uint8_t* p, int64_t n) {
  const uint64_t input = read<uint32_t>(p + n - 4) | static_cast<uint64_t>(read<uint32_t>(p)) << 32;
  uint64_t x = input ^ (read64(kSecret + 8) ^ read64(kSecret + 16));
  x = (x ^ rotated(x, 49) ^ rotated(x, 24)) * kPrimeMx2;
  x = (x ^ ((x >> 35) + static_cast<uint64_t>(n))) * kPrimeMx2;
  return x ^ x >> 28;
}

uint64_t digest_9_to_16(const uint8_t* p, int64_t n) {
  const uint64_t low = read64(p) ^ read64(kSecret + 24) ^ read64(kSecret + 32);
  const uint64_t high = read64(p + n - 8) ^ read64(kSecret + 40) ^ read64(kSecret + 48);
  return avalanche(static_cast<uint64_t>(n) + __builtin_bswap64(low) + high +
                   folded_product(low, high));
}

uint64_t mixed_16(const uint8_t* p, const uint8_t* secret) {
  return folded_product(read64(p) ^ read64(secret), read64(p + 8) ^ read64(secret + 8));
}

uint64_t digest_17_to_128(const uint8_t* p, int64_t n) {
  uint64_t sum = static_cast<uint64_t>(n) * kPrime64_1;
  for (int64_t i = (n - 1) / 32; i >= 0; --i) {
    sum += mixed_16(p + 16 * i, kSecret + 32 * i);
    sum += mixed_16(p + n - 16 * (i + 1), kSecret + 32 * i + 16);
  }
  return avalanche(sum);
}

uint64_t digest_129_to_240(const uint8_t* p, int64_t n) {
  uint64_t sum = static_cast<uint64_t>(n) * kPrime64_1;
  for (int64_t i = 0; i < 8; ++i) sum += mixed_16(p + 16 * i, kSecret + 16 * i);
  sum = avalanche(sum);
  for (int64_t i = 8; i < n / 16; ++i) sum += mixed_16(p + 16 * i, kSecret + 16 * (i - 8) + 3);
  return avalanche(sum + mixed_16(p + n - 16, kSecret + 136 - 17));
}

// Beyond 240 bytes: eight sums over stripes of 64 bytes, scrambled after each block of stripes.
constexpr int64_t kSums = 8;
constexpr int64_t kStripe = 64;
constexpr int64_t kStripesOfBlock = (kSecretBytes - kStripe) / 8;

using Words [[gnu::vector_size(kLanes * 4)]] = uint64_t;
constexpr int64_t kWords = kLanes / 2;
constexpr int64_t kVectors = kSums / kWords;

Words load_64(const uint8_t* p) {
  Words x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// In each word, its lower half times its upper half.
Words product_of_halves(Words x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_mul_epu32(
      reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(x >> 32)));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(_mm256_mul_epu32(
      reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(x >> 32)));
#elif defined(__SSE2__)
  return reinterpret_cast<Words>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(x >> 32)));
#else
  return (x & 0xffffffff) * (x >> 32);
#endif
}

Words neighbours_exchanged(Words x) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#elif defined(__AVX2__)
  return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#else
  return __builtin_shufflevector(x, x, 1, 0);
#endif
}

struct Sums {
  Words at[kVectors];
};

// A stripe adds to each sum its own product and its neighbour's word. Sums wrap, so words may be
// added up over all the stripes and exchanged once.
void accumulate(Sums& sums, const uint8_t* p, int64_t stripes, const uint8_t* secret) {
  Sums words{};
  for (int64_t i = 0; i < stripes; ++i) {
    for (int64_t v = 0; v < kVectors; ++v) {
      constexpr auto kWidth = static_cast<int64_t>(sizeof(Words));
      const Words word = load_64(p + i * kStripe + v * kWidth);
      sums.at[v] += product_of_halves(word ^ load_64(secret + i * 8 + v * kWidth));
      words.at[v] += word;
    }
  }
  for (int64_t v = 0; v < kVectors; ++v) sums.at[v] += neighbours_exchanged(words.at[v]);
}

void scramble(Sums& sums) {
  for (int64_t v = 0; v < kVectors; ++v) {
    const Words key = load_64(kSecret + kSecretBytes - kStripe + v * kWords * 8);
    const Words x = sums.at[v] ^ sums.at[v] >> 47 ^ key;
    sums.at[v] = x * kPrime32_1;
  }
}

uint64_t digest_long(const uint8_t* p, int64_t n) {
  constexpr uint64_t kStart[kSums] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                      kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  constexpr int64_t kBlock = kStripe * kStripesOfBlock;
  Sums sums;
  std::memcpy(&sums, kStart, sizeof sums);
  const int64_t blocks = (n - 1) / kBlock;
  for (int64_t i = 0; i < blocks; ++i) {
    accumulate(sums, p + i * kBlock, kStripesOfBlock, kSecret);
    scramble(sums);
  }
  const int64_t done = blocks * kBlock;
  accumulate(sums, p + done, (n - 1 - done) / kStripe, kSecret);
  accumulate(sums, p + n - kStripe, 1, kSecret + kSecretBytes - kStripe - 7);

  uint64_t parts[kSums];
  std::memcpy(parts, &sums, sizeof sums);
  uint64_t merged = static_cast<uint64_t>(n) * kPrime64_1;
  for (int64_t i = 0; i < kSums; i += 2) {
    const uint8_t* secret = kSecret + 11 + 8 * i;
    merged += folded_product(parts[i] ^ read64(secret), parts[i + 1] ^ read64(secret + 8));
  }
  return avalanche(merged);
}

uint64_t digest(const uint8_t* p, int64_t n) {
  if (n > 240) return digest_long(p, n);
  if (n > 128) return digest_129_to_240(p, n);
  if (n > 16) return digest_17_to_128(p, n);
  if (n > 8) return digest_9_to_16(p, n);
  if (n > 3) return digest_4_to_8(p, n);
  if (n > 0) return digest_1_to_3(p, n);
  return avalanche_xxh64(read64(kSecret + 56) ^ read64(kSecret + 64));
}

}  // namespace

void seal(const SealArgs& a, ThreadPool& pool) {
  parallel_for(pool, a.count, [&](int64_t i, int) {
    a.digests[i] = digest(a.data + a.index[i] * a.stride, a.bytes);
  });
}

}  // namespace bifolio::BIFOLIO_ISA
