// A small pool for parallel sections: dynamic tiles, workers that spin briefly and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "runtime/parallel.hpp"

namespace bifolio {

inline constexpr std::size_t kCacheLine = 64;

// The tiles that are left, as one run per thread.
class TileRuns {
 public:
  explicit TileRuns(int threads) : runs_(static_cast<std::size_t>(threads)) {}

  void reset(int64_t tiles) noexcept;
  TileRange take(std::size_t thread, int64_t share) noexcept;  // 1 / share of the own run

 private:
  // begin << 32 | end, so that owner and thief cannot cross. A run never comes back to a value that
  // it had: its first tile is done before any part of it can return.
  struct alignas(kCacheLine) Run {
    std::atomic<uint64_t> span{0};
  };

  TileRange take_first(Run& run, int64_t share) noexcept;
  int64_t take_over(Run& from, Run& own) noexcept;

  std::vector<Run> runs_;
};

// One thread's access to the tiles.
class TileCursor {
 public:
  TileCursor(TileRuns& runs, int thread) noexcept
      : runs_(runs), thread_(static_cast<std::size_t>(thread)) {}
  int64_t next() noexcept {
    const TileRange one = runs_.take(thread_, INT64_MAX);
    return one.begin < one.end ? one.begin : -1;
  }
  TileRange some() noexcept { return runs_.take(thread_, kShare); }

 private:
  static constexpr int64_t kShare = 4;

  TileRuns& runs_;
  std::size_t thread_;
};

// One thread at a time may call run(). A section is open between its publication and the moment
// the caller finds no tile left; a worker that wakes later stays out, so the caller never waits
// for a thread that sleeps or was taken off its processor before it joined.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // at least 1, the caller included; std::system_error
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }
  void run(int64_t tiles, SectionFn fn, const void* body) noexcept;

 private:
  void stop() noexcept;
  void work(int thread) noexcept;
  uint32_t await_epoch(uint32_t seen) noexcept;
  bool try_join(uint32_t epoch) noexcept;

  // epoch << 32 | open << 31 | workers inside: one word, so that joining and closing cannot cross.
  alignas(kCacheLine) std::atomic<uint64_t> gate_{0};
  alignas(kCacheLine) std::atomic<uint32_t> epoch_{0};  // what sleepers wait on
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  SectionFn fn_ = nullptr;
  const void* body_ = nullptr;
  TileRuns runs_;
  std::vector<std::thread> workers_;
};

}  // namespace bifolio
