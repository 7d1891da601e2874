// Sections of every kind at several thread counts, for the thread sanitizer to watch. Every access
// to memory that the pool must order is a plain one here, so that a tile taken twice, a result read
// too early or a body replaced too early is a race even where the values come out right. Checks
// also that each tile is done exactly once; exits with 1 at the first mistake.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <thread>
#include <vector>

#include "runtime/parallel.hpp"
#include "runtime/thread_pool.hpp"

namespace {

using bifolio::ThreadPool;
using bifolio::TileCursor;
using bifolio::TileRange;

constexpr int64_t kMostTiles = 300;
constexpr int64_t kMostWork = 5000;  // steps of a counter
constexpr int64_t kYieldsAbove = kMostWork / 2;
constexpr auto kLongerThanASpin = std::chrono::microseconds(200);

enum class Kind { one_by_one, some_at_once, mixed, mirrored };
constexpr Kind kKinds[] = {Kind::one_by_one, Kind::some_at_once, Kind::mixed, Kind::mirrored};

struct Counts {
  int64_t sections = 0, tiles = 0, by_workers = 0;
};

class Sections {
 public:
  explicit Sections(int threads) : pool_(threads), done_by_(static_cast<std::size_t>(threads)) {}

  void run(Kind kind, int64_t tiles, int64_t work, Counts& counts) {
    ++stamp_;  // read by every thread, written between sections
    parallel_section(pool_, tiles, [&](TileCursor& cursor, int thread) {
      int64_t& done = done_by_[static_cast<std::size_t>(thread)];
      bool some = kind == Kind::some_at_once;
      for (;; some ^= kind == Kind::mixed) {
        TileRange range = some ? next_tiles(cursor) : one(cursor);
        if (range.begin >= range.end) return;
        for (int64_t tile = range.begin; tile < range.end; ++tile) {
          finish(kind == Kind::mirrored ? mirrored(tile, tiles, pool_) : tile, work);
          ++done;
        }
      }
    });
    check(tiles, counts);
  }

 private:
  static TileRange one(TileCursor& cursor) {
    const int64_t tile = next_tile(cursor);
    return {tile, tile < 0 ? tile : tile + 1};
  }

  // The tile's mark goes from the last section's stamp, or an earlier one's, to this one's.
  void finish(int64_t tile, int64_t work) {
    int64_t& mark = marks_.at(static_cast<std::size_t>(tile));
    if (mark == stamp_) fail("a tile was done twice", tile);
    volatile int64_t spent = 0;
    while (spent < work) spent = spent + 1;
    if (work > kYieldsAbove) std::this_thread::yield();  // others come in, on few cores too
    mark = stamp_;
  }

  void check(int64_t tiles, Counts& counts) {
    int64_t sum = 0;
    for (int64_t& done : done_by_) sum += done;
    if (sum != tiles) fail("tiles done", sum);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      if (marks_[static_cast<std::size_t>(tile)] != stamp_) fail("a tile was left out", tile);
    }
    counts.sections += 1;
    counts.tiles += tiles;
    counts.by_workers += tiles - done_by_[0];
    for (int64_t& done : done_by_) done = 0;
  }

  [[noreturn]] void fail(const char* what, int64_t number) const {
    std::fprintf(stderr, "%d threads, section %lld: %s (%lld)\n", pool_.threads(),
                 static_cast<long long>(stamp_), what, static_cast<long long>(number));
    std::_Exit(1);
  }

  ThreadPool pool_;
  int64_t stamp_ = 0;
  std::vector<int64_t> marks_ = std::vector<int64_t>(kMostTiles, 0);
  std::vector<int64_t> done_by_;
};

// A pool's whole life: most sections follow at once, before some a part of the workers sleeps.
void live(int threads, int sections, std::mt19937& random, Counts& counts) {
  Sections pool(threads);
  for (int i = 0; i < sections; ++i) {
    const Kind kind = kKinds[random() % std::size(kKinds)];
    const auto tiles = random() % (random() % 4 ? 20 : kMostTiles) + 1;
    const auto work = random() % (random() % 3 ? 100 : kMostWork);
    pool.run(kind, static_cast<int64_t>(tiles), static_cast<int64_t>(work), counts);
    if (random() % 16 == 0) std::this_thread::sleep_for(kLongerThanASpin);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int lives = argc > 1 ? std::atoi(argv[1]) : 40;
  for (int threads = 1; threads <= 5; ++threads) {
    std::mt19937 random(static_cast<unsigned>(threads));
    Counts counts;
    for (int life = 0; life < lives; ++life) {
      live(threads, static_cast<int>(random() % 2 ? random() % 5 : 500), random, counts);
    }
    std::printf("%d threads: %d pools, %lld sections, %lld tiles, %lld of them by workers\n",
                threads, lives, static_cast<long long>(counts.sections),
                static_cast<long long>(counts.tiles), static_cast<long long>(counts.by_workers));
  }
}
