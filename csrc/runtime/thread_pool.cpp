#include "runtime/thread_pool.hpp"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bifolio {
namespace {

constexpr uint64_t kOpen = uint64_t{1} << 31;
constexpr uint64_t kInside = kOpen - 1;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsPerClock = 32;

uint64_t span(int64_t begin, int64_t end) {
  return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
}
int64_t first(uint64_t span) { return static_cast<int64_t>(span >> 32); }
int64_t last(uint64_t span) { return static_cast<int64_t>(span & 0xffffffff); }

// Each thread starts with an equal part of the tiles.
int64_t end_of_run(int64_t thread, int64_t tiles, int64_t threads) {
  return tiles * (thread + 1) / threads;
}

uint64_t opened(uint32_t epoch) { return uint64_t{epoch} << 32 | kOpen; }

void pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() holds or kSpin has passed; says whether it holds.
template <class Ready>
bool spin_until(const Ready& ready) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kSpinsPerClock; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

}  // namespace

int64_t next_tile(TileCursor& cursor) noexcept { return cursor.next(); }

TileRange next_tiles(TileCursor& cursor) noexcept { return cursor.some(); }

void run_section(ThreadPool& pool, int64_t tiles, SectionFn fn, const void* body) noexcept {
  pool.run(tiles, fn, body);
}

int thread_count(const ThreadPool& pool) noexcept { return pool.threads(); }

int64_t mirrored(int64_t tile, int64_t tiles, const ThreadPool& pool) noexcept {
  int64_t begin = 0;
  for (int64_t thread = 0;; ++thread) {
    const int64_t end = end_of_run(thread, tiles, pool.threads());
    if (tile < end) return begin + end - 1 - tile;
    begin = end;
  }
}

void TileRuns::reset(int64_t tiles) noexcept {
  const auto threads = static_cast<int64_t>(runs_.size());
  int64_t begin = 0;
  for (int64_t i = 0; i < threads; ++i) {
    const int64_t end = end_of_run(i, tiles, threads);
    runs_[static_cast<std::size_t>(i)].span.store(span(begin, end), std::memory_order_relaxed);
    begin = end;
  }
}

TileRange TileRuns::take(std::size_t thread, int64_t share) noexcept {
  Run& own = runs_[thread];
  const TileRange tiles = take_first(own, share);
  if (tiles.begin < tiles.end) return tiles;
  for (std::size_t i = 1; i < runs_.size(); ++i) {
    const int64_t taken = take_over(runs_[(thread + i) % runs_.size()], own);
    if (taken >= 0) return {taken, taken + 1};
  }
  return {};
}

TileRange TileRuns::take_first(Run& run, int64_t share) noexcept {
  uint64_t value = run.span.load(std::memory_order_relaxed);
  while (first(value) < last(value)) {
    const int64_t some = (last(value) - first(value)) / share;
    const TileRange tiles{first(value), first(value) + (some > 1 ? some : 1)};
    if (run.span.compare_exchange_weak(value, span(tiles.end, last(value)),
                                       std::memory_order_relaxed)) {
      return tiles;
    }
  }
  return {};
}

// Takes the later half of another's run: its first tile at once, the others become one's own.
int64_t TileRuns::take_over(Run& from, Run& own) noexcept {
  uint64_t value = from.span.load(std::memory_order_relaxed);
  while (first(value) < last(value)) {
    const int64_t middle = first(value) + (last(value) - first(value)) / 2;
    if (from.span.compare_exchange_weak(value, span(first(value), middle),
                                        std::memory_order_relaxed)) {
      own.span.store(span(middle + 1, last(value)), std::memory_order_relaxed);
      return middle;
    }
  }
  return -1;
}

ThreadPool::ThreadPool(int threads) : runs_(threads) {
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int thread = 1; thread < threads; ++thread) {
      workers_.emplace_back([this, thread] { work(thread); });
    }
  } catch (...) {  // a thread that is destroyed before it is joined ends the process
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() noexcept {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t tiles, SectionFn fn, const void* body) noexcept {
  if (tiles <= 0) return;
  runs_.reset(tiles);
  TileCursor cursor(runs_, 0);
  if (tiles == 1 || workers_.empty()) {
    fn(body, cursor, 0);
    return;
  }
  fn_ = fn;
  body_ = body;
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  gate_.store(opened(epoch), std::memory_order_release);
  epoch_.store(epoch, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) epoch_.notify_all();

  fn(body, cursor, 0);

  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  const auto empty = [this] { return (gate_.load(std::memory_order_acquire) & kInside) == 0; };
  while (!spin_until(empty)) std::this_thread::yield();
}

bool ThreadPool::try_join(uint32_t epoch) noexcept {
  uint64_t gate = gate_.load(std::memory_order_acquire);
  while ((gate & ~kInside) == opened(epoch)) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

uint32_t ThreadPool::await_epoch(uint32_t seen) noexcept {
  const auto changed = [this, seen] { return epoch_.load(std::memory_order_acquire) != seen; };
  if (!spin_until(changed)) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (epoch_.load(std::memory_order_seq_cst) == seen) epoch_.wait(seen);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
  return epoch_.load(std::memory_order_acquire);
}

void ThreadPool::work(int thread) noexcept {
  for (uint32_t seen = 0;;) {
    seen = await_epoch(seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!try_join(seen)) continue;
    TileCursor cursor(runs_, thread);
    fn_(body_, cursor, thread);
    gate_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace bifolio
