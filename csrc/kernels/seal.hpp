// Digests of records: XXH3-64 with seed 0 and the default secret, by its public specification
// (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct SealArgs {
  const uint8_t* data;   // what is digested of record 0
  int64_t stride;        // bytes from one record to the next
  int64_t bytes;         // digested of each
  const int64_t* index;  // [count]: which records
  int64_t count;
  uint64_t* digests;  // [count], written
};

BIFOLIO_DECLARE(seal, SealArgs)

}  // namespace bifolio
