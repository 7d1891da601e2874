#include "kernels/probe.hpp"

#include "kernels/linear/codes.hpp"
#include "kernels/linear/multiply.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

constexpr int64_t kReadTile = 64 << 10;
constexpr auto kWidth = static_cast<int64_t>(sizeof(IntLanes));
constexpr int64_t kSteps = 4096;  // a tile of some microseconds
constexpr int kRows = kMaxRows;   // sums as in the largest block of the linear kernel

// The compiler must take x for a value it does not know.
void forget(IntLanes& x) {
#if defined(BIFOLIO_X86)
  asm volatile("" : "+v"(x));
#else
  asm volatile("" : "+w"(x));
#endif
}

// Products of a vector of weights and one of activations, as many sums as the linear kernel has.
template <class Sum, class Step>
int64_t repeat(const Step& step) {
  Sum sums[kRows][kVectors] = {};
  IntLanes w{};
  IntLanes x{};
  forget(w);
  forget(x);
  for (int64_t i = 0; i < kSteps; ++i) {
    for (auto& row : sums) {
      for (Sum& sum : row) {
        forget(w);
        sum = step(sum, w, x);
      }
    }
  }
  Sum all{};
  for (auto& row : sums) {
    for (Sum& sum : row) all = all + sum;
  }
  return static_cast<int64_t>(all[0]);
}

}  // namespace

void read_probe(const ReadProbeArgs& a, ThreadPool& pool) {
  parallel_section(pool, a.bytes / kReadTile, [&](TileCursor& cursor, int) {
    IntLanes seen[4] = {};
    for (int64_t tile = next_tile(cursor); tile >= 0; tile = next_tile(cursor)) {
      const uint8_t* p = a.data + tile * kReadTile;
      for (int64_t i = 0; i < kReadTile; i += 4 * kWidth) {
        for (int j = 0; j < 4; ++j) seen[j] = seen[j] ^ load_words(p + i + j * kWidth);
      }
    }
    const IntLanes all = seen[0] ^ seen[1] ^ seen[2] ^ seen[3];
    if (all[0] == 0x5eed5eed) *a.sink = all[1];  // never, but the compiler cannot know
  });
}

void peak_probe(const PeakProbeArgs& a, ThreadPool& pool) {
  const auto product = static_cast<Product>(a.product);
  const int64_t products = product == Product::fp32 ? 1 : product == Product::bf16 ? 2 : 4;
  *a.operations = a.repeats * kSteps * kRows * kPanel * products * 2;
  parallel_for(pool, a.repeats, [&](int64_t, int) {
    int64_t result = 0;
    switch (product) {
      case Product::fp32:
        result = repeat<Lanes>([](Lanes s, IntLanes w, IntLanes x) {
          return fma(from_bits(w), from_bits(x), s);
        });
        break;
      case Product::bf16:
        result = repeat<Lanes>([](Lanes s, IntLanes w, IntLanes x) {
          return dot_pair(s, pair_of(w), pair_of(x));
        });
        break;
      case Product::int8: result = repeat<IntLanes>(dot_bytes<false>); break;
    }
    if (result == 0x5eed5eed) *a.sink = result;
  });
}

}  // namespace bifolio::BIFOLIO_ISA
