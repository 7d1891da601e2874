// What kernels see of the thread pool. Kernel files are compiled once per instruction set, so this
// header stays free of the standard library's templates: an inline function of theirs compiled
// for AVX-512 could be the copy that the linker keeps for every machine.
#pragma once

#include <cstdint>

namespace bifolio {

class ThreadPool;

template <class Args>
using Kernel = void (*)(const Args&, ThreadPool&);

// Bytes of workspace that a kernel may use for these arguments.
template <class Args>
using WorkspaceSize = int64_t (*)(const Args&, const ThreadPool&);

// Hands out the numbers 0 … tiles - 1 of one parallel section, each exactly once. A thread has a
// run of its own, which it takes in order, so that tiles behind each other in memory are one stream;
// then it takes over half of what another has left.
class TileCursor;
int64_t next_tile(TileCursor& cursor) noexcept;  // below 0: none left

// The same for tiles that take about equally long: a quarter of what is left of the own run at once.
// Each access is an atomic one, which waits for all that the core has still to write.
struct TileRange {
  int64_t begin, end;  // equal: none left
};
TileRange next_tiles(TileCursor& cursor) noexcept;

// Another order of the same section: what tile to take for one that was handed out, if each thread
// is to begin at the end of its run. For tiles of which the later ones take longer: the longest go
// first, and still every thread meets the part that it would have met.
int64_t mirrored(int64_t tile, int64_t tiles, const ThreadPool& pool) noexcept;

using SectionFn = void (*)(const void* body, TileCursor& cursor, int thread);

// Calls fn once on each thread that joins (the caller is thread 0 and always joins), returns when
// all of them have returned and every tile is taken. Sections do not nest.
void run_section(ThreadPool& pool, int64_t tiles, SectionFn fn, const void* body) noexcept;
int thread_count(const ThreadPool& pool) noexcept;

// body(cursor, thread) once per joining thread: for work with a prologue of each thread's own.
template <class Body>
void parallel_section(ThreadPool& pool, int64_t tiles, const Body& body) noexcept {
  run_section(
      pool, tiles,
      [](const void* b, TileCursor& cursor, int thread) {
        (*static_cast<const Body*>(b))(cursor, thread);
      },
      &body);
}

// body(tile, thread) for each tile.
template <class Body>
void parallel_for(ThreadPool& pool, int64_t tiles, const Body& body) noexcept {
  parallel_section(pool, tiles, [&body](TileCursor& cursor, int thread) {
    for (int64_t tile = next_tile(cursor); tile >= 0; tile = next_tile(cursor)) body(tile, thread);
  });
}

}  // namespace bifolio
