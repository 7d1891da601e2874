#include "kernels/linear/linear.hpp"

#include "kernels/linear/activations.hpp"
#include "kernels/linear/gate.hpp"
#include "kernels/linear/multiply.hpp"

namespace bifolio::BIFOLIO_ISA {
namespace {

// Activations of a row group stay in the second-level cache while panels pass by.
constexpr int64_t kRowGroupBytes = 384 << 10;
constexpr int64_t kTilesPerThread = 4;

// From so many rows a thread on, threads share the rows and not the panels: so the thread that wrote
// a row is the one that reads it in the next kernel. Lines that another core holds are written at a
// tenth of the speed where cores have no cache in common. Every thread reads all weights then, which
// so many rows hide.
constexpr int64_t kOwnRows = 16;

// Panels that a block of rows meets one after the other stay in the second-level cache too. Results
// of one panel alone are two lines of each row, which memory takes at a fifth of its speed.
constexpr int64_t kPanelGroupBytes = 192 << 10;
constexpr int64_t kMostPanels = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Index in kBlockRows of the smallest block that holds `rows` rows.
int block_size(int64_t rows) {
  int size = 0;
  while (kBlockRows[size] < rows) ++size;
  return size;
}

MultiplyFn choose(const WeightLayout& layout, int size) {
  switch (layout.codes) {
    case Codes::fp32:
    case Codes::bf16: return multiply_float(layout, size);
    case Codes::fp8: return multiply_fp8(layout, size);
    case Codes::int8: return multiply_int8(layout, size);
    case Codes::int4: return multiply_int4(layout, size);
  }
  return nullptr;
}

// How t rows are cut into blocks of nearly equal size.
struct Cut {
  Cut(const WeightLayout& layout, int64_t t)
      : shape(layout),
        blocks(ceil_div(t, kMaxRows)),
        size(block_size(ceil_div(t, blocks))),
        rows(kBlockRows[size]),
        block_bytes(shape.block_bytes(rows)) {
    blocks = ceil_div(t, rows);
    last_size = block_size(t - (blocks - 1) * rows);
  }

  int64_t packed_bytes() const { return blocks * block_bytes; }

  RowShape shape;
  int64_t blocks;
  int size, last_size;
  int64_t rows;
  int64_t block_bytes;
};

// How the product is cut into tiles of some blocks of rows and some panels.
struct Tiles {
  Tiles(const WeightLayout& layout, const Cut& cut, int64_t threads) {
    const int64_t own = ceil_div(cut.blocks, threads);
    row_groups = 1;
    if (own * cut.rows >= kOwnRows) {
      row_groups = threads * ceil_div(own * cut.block_bytes, kRowGroupBytes);
    }
    blocks = ceil_div(cut.blocks, row_groups);
    row_groups = ceil_div(cut.blocks, blocks);
    const int64_t all = layout.panels();
    const int64_t wanted = kTilesPerThread * threads;
    const int64_t fitting = least(kMostPanels, kPanelGroupBytes / layout.panel_bytes());
    panels = most(1, least(fitting, all / ceil_div(wanted, row_groups)));
    panel_groups = ceil_div(all, panels);
    panels = ceil_div(all, panel_groups);
    panel_groups = ceil_div(all, panels);
  }

  int64_t blocks, panels;  // of a tile
  int64_t row_groups, panel_groups;
};

class Product {
 public:
  Product(const LinearArgs& args, const Cut& cut)
      : a_(args),
        cut_(cut),
        panel_bytes_(args.layout.panel_bytes()),
        whole_(choose(args.layout, cut.size)),
        last_(choose(args.layout, cut.last_size)) {}

  void pack(int64_t block, uint8_t* packed, uint8_t* temporary) const {
    const int64_t first = block * cut_.rows;
    pack_block(a_, cut_.shape, first, least(cut_.rows, a_.t - first), rows_of(block),
               packed + block * cut_.block_bytes, temporary);
  }

  // Blocks begin … end - 1 against panels first … last - 1. Each block meets all of these panels
  // before the next one comes, so that whole stretches of its results are written together. Meanwhile
  // as many panels behind them come into the cache, an equal part of each with each block.
  void multiply(int64_t first, int64_t last, int64_t begin, int64_t end, uint8_t* packed) const {
    const int64_t step = ceil_div(kLineBytes, end - begin);
    for (int64_t b = begin; b < end; ++b) {
      const Block block = view(b, packed);
      const int64_t fetched = (b - begin) * (panel_bytes_ / kLineBytes * step);
      const Fetched ahead{(last - first) * panel_bytes_ + fetched, step};
      for (int64_t panel = first; panel < last; ++panel) {
        if (a_.layout.gated) {
          gate(panel, block, ahead);
        } else {
          put(panel, block, ahead);
        }
      }
    }
  }

 private:
  // A block of rows and what multiplies it, which may be made for more rows than there are.
  struct Block {
    MultiplyFn multiply;
    RowBlock rows;
    int64_t first, count;
    bool whole;
  };

  // What is fetched during the product of a panel: its distance from the panel, and `Ahead::step`.
  struct Fetched {
    int64_t distance, step;
  };

  int64_t rows_of(int64_t block) const {
    return kBlockRows[block + 1 < cut_.blocks ? cut_.size : cut_.last_size];
  }

  Block view(int64_t block, uint8_t* packed) const {
    const int64_t rows = rows_of(block);
    const int64_t first = block * cut_.rows;
    const int64_t count = least(rows, a_.t - first);
    return {.multiply = block + 1 < cut_.blocks ? whole_ : last_,
            .rows = view_block(cut_.shape, rows, packed + block * cut_.block_bytes),
            .first = first,
            .count = count,
            .whole = count == rows};
  }

  void run(int64_t panel, const Block& block, const Fetched& ahead, const Output& out) const {
    const uint8_t* weights = a_.packed + panel * panel_bytes_;
    block.multiply(a_.layout, weights, {.start = weights + ahead.distance, .step = ahead.step},
                   block.rows, out);
  }

  static Output bare(float* y) {
    return {.y = y, .pitch = kPanel, .bias = nullptr, .residual = nullptr};
  }

  void put(int64_t panel, const Block& block, const Fetched& ahead) const {
    const int64_t n = a_.layout.n;
    const int64_t channel = panel * kPanel;
    const int64_t at = block.first * n + channel;
    if (block.whole && channel + kPanel <= n) {
      run(panel, block, ahead,
          {.y = a_.y + at,
           .pitch = n,
           .bias = a_.bias ? a_.bias + channel : nullptr,
           .residual = a_.residual ? a_.residual + at : nullptr});
      return;
    }
    alignas(64) float out[kMaxRows * kPanel];
    run(panel, block, ahead, bare(out));
    const int64_t width = least(kPanel, n - channel);
    for (int64_t r = 0; r < block.count; ++r) {
      put_part(out + r * kPanel, at + r * n, channel, width);
    }
  }

  // As `write` does it.
  void put_part(float* out, int64_t at, int64_t channel, int64_t width) const {
    if (a_.bias) {
      for (int64_t c = 0; c < width; ++c) out[c] += a_.bias[channel + c];
    }
    if (a_.residual) {
      for (int64_t c = 0; c < width; ++c) out[c] += a_.residual[at + c];
    }
    std::memcpy(a_.y + at, out, static_cast<std::size_t>(width) * sizeof(float));
  }

  void gate(int64_t panel, const Block& block, const Fetched& ahead) const {
    alignas(64) float out[kMaxRows * kPanel];
    run(panel, block, ahead, bare(out));
    const int64_t half = a_.layout.n / 2;
    const int64_t channel = panel * kHalfPanel;
    const int64_t width = least(kHalfPanel, half - channel);
    if (a_.bias) {
      for (int64_t r = 0; r < block.count; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          out[r * kPanel + c] += a_.bias[channel + c];
          out[r * kPanel + kHalfPanel + c] += a_.bias[half + channel + c];
        }
      }
    }
    gate_rows(out, block.count, width, a_.y + block.first * half + channel, half);
  }

  const LinearArgs& a_;
  const Cut& cut_;
  int64_t panel_bytes_;
  MultiplyFn whole_, last_;
};

// One block of rows: every thread prepares it for itself rather than wait for another, whose lines
// it would have to fetch.
void run_alone(const LinearArgs& a, const Cut& cut, const Product& product, ThreadPool& pool) {
  const int64_t bytes = cut.packed_bytes() + cut.shape.temporary_bytes();
  parallel_section(pool, a.layout.panels(), [&](TileCursor& cursor, int thread) {
    uint8_t* packed = a.workspace + thread * bytes;
    TileRange panels = next_tiles(cursor);
    if (panels.begin == panels.end) return;
    product.pack(0, packed, packed + cut.packed_bytes());
    for (; panels.begin < panels.end; panels = next_tiles(cursor)) {
      for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        product.multiply(panel, panel + 1, 0, 1, packed);
      }
    }
  });
}

void run_shared(const LinearArgs& a, const Cut& cut, const Product& product, ThreadPool& pool) {
  uint8_t* temporary = a.workspace + cut.packed_bytes();
  parallel_for(pool, cut.blocks, [&](int64_t block, int thread) {
    product.pack(block, a.workspace, temporary + thread * cut.shape.temporary_bytes());
  });
  const Tiles tiles(a.layout, cut, thread_count(pool));
  parallel_section(pool, tiles.row_groups * tiles.panel_groups, [&](TileCursor& cursor, int) {
    for (int64_t tile = next_tile(cursor); tile >= 0; tile = next_tile(cursor)) {
      const int64_t block = tile / tiles.panel_groups * tiles.blocks;
      const int64_t panel = tile % tiles.panel_groups * tiles.panels;
      product.multiply(panel, least(panel + tiles.panels, a.layout.panels()), block,
                       least(block + tiles.blocks, cut.blocks), a.workspace);
    }
  });
}

}  // namespace

int64_t linear_workspace(const LinearArgs& a, const ThreadPool& pool) {
  if (a.t == 0) return 0;
  const Cut cut(a.layout, a.t);
  const int64_t threads = thread_count(pool);
  return cut.packed_bytes() * (cut.blocks == 1 ? threads : 1) +
         cut.shape.temporary_bytes() * threads;
}

void linear(const LinearArgs& a, ThreadPool& pool) {
  if (a.t == 0) return;
  const Cut cut(a.layout, a.t);
  const Product product(a, cut);
  if (cut.blocks == 1) {
    run_alone(a, cut, product, pool);
  } else {
    run_shared(a, cut, product, pool);
  }
}

}  // namespace bifolio::BIFOLIO_ISA
