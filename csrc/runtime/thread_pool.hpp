// A small pool for parallel sections: dynamic tiles, workers that spin briefly and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "runtime/parallel.hpp"

namespace bifolio {

inline constexpr std::size_t kCacheLine = 64;

class TileCursor {
 public:
  void reset(int64_t tiles, int threads) noexcept {
    tiles_ = tiles;
    share_ = 2 * threads;
    next_.store(0, std::memory_order_relaxed);
  }

  int64_t next() noexcept {
    const int64_t tile = next_.fetch_add(1, std::memory_order_relaxed);
    return tile < tiles_ ? tile : -1;
  }

  bool next_range(int64_t& begin, int64_t& end) noexcept {
    begin = next_.load(std::memory_order_relaxed);
    do {
      if (begin >= tiles_) return false;
      const int64_t take = (tiles_ - begin) / share_;
      end = begin + (take > 1 ? take : 1);
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
  }

 private:
  alignas(kCacheLine) std::atomic<int64_t> next_{0};
  int64_t tiles_ = 0;
  int64_t share_ = 1;  // a range is this part of what is left
};

// One thread at a time may call run(). A section is open between its publication and the moment
// the caller finds no tile left; a worker that wakes later stays out, so the caller never waits
// for a thread that sleeps or was taken off its processor before it joined.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // the caller included
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }
  void run(int64_t tiles, SectionFn fn, const void* body) noexcept;

 private:
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
  TileCursor cursor_;
  std::vector<std::thread> workers_;
};

}  // namespace bifolio
