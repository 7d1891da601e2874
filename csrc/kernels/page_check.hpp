// Compares the block table of a pass with the pages and tags that its rows expect.
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct PageCheckArgs {
  const int32_t* block_table;  // [rows, .], rows table_width apart
  int64_t table_width;
  const int64_t* counts;  // [rows]: pages of each that are looked at
  const int64_t* pages;   // [sum of counts]: the expected ones, row behind row
  const uint64_t* tags;   // [sum of counts]
  const uint8_t* pool;    // [pool_pages, page_bytes]; a record begins with its tag
  int64_t page_bytes, pool_pages, rows;
  int64_t* wrong;   // [rows], written: first place with a page or tag not expected, or -1
  uint64_t* found;  // [rows], written where wrong: the tag there, 0 outside the pool
  int64_t* faults;  // [1], written: how many rows are wrong
};

BIFOLIO_DECLARE(page_check, PageCheckArgs)

}  // namespace bifolio
