#include "kernels/page_check.hpp"

#include <cstring>

namespace bifolio::BIFOLIO_ISA {
namespace {

// Headers lie far apart, so the time goes into waiting for memory: ask early.
constexpr int64_t kAhead = 16;

// The page may lie outside the pool: an address that is fetched need not be one.
void fetch(const PageCheckArgs& a, int64_t page) {
  const auto offset = static_cast<uintptr_t>(page * a.page_bytes);
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(a.pool) + offset));
}

}  // namespace

// On the calling thread: waking others takes as long as the whole check.
void page_check(const PageCheckArgs& a, ThreadPool&) {
  const int64_t* pages = a.pages;
  const uint64_t* tags = a.tags;
  int64_t faults = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    const int32_t* table = a.block_table + row * a.table_width;
    const int64_t count = a.counts[row];
    int64_t wrong = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) fetch(a, table[i + kAhead]);
      const int64_t page = table[i];
      uint64_t tag = 0;
      if (page >= 0 && page < a.pool_pages) {
        std::memcpy(&tag, a.pool + page * a.page_bytes, sizeof tag);
      }
      if (page != pages[i] || tag != tags[i]) {
        wrong = i;
        a.found[row] = tag;
        ++faults;
        break;
      }
    }
    a.wrong[row] = wrong;
    pages += count;
    tags += count;
  }
  *a.faults = faults;
}

}  // namespace bifolio::BIFOLIO_ISA
